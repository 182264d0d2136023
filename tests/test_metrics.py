"""TensorBoard events."""

from diffcse_jax.config import Config
from diffcse_jax.training.callbacks import TensorBoard, Training


def test_tensorboard_reads_the_rows(tmp_path):
    """After a resumption, those of later steps are told to be void."""
    from tensorboardX.proto.event_pb2 import Event

    for resumed_at in (0, 1):
        writer = TensorBoard()
        writer.on_start(Training(Config(), tmp_path, resumed_at, 9, {}, lambda: None))
        writer.on_step(resumed_at + 1, {"loss": 5.0})
        writer.on_step(resumed_at + 2, {})  # is not logged
        writer.on_evaluation(resumed_at + 1, {"stsb": 81.0})
        writer.on_end()
        file = max((tmp_path / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        events, content = [], file.read_bytes()
        while content:
            size = int.from_bytes(content[:8], "little")
            events.append(Event.FromString(content[12 : 12 + size]))
            content = content[16 + size :]
        assert events[0].file_version == "brain.Event:2"
        assert [event.step for event in events[1:]] == ([1, 1] if resumed_at == 0 else [2, 2, 2])
        values = [value for event in events for value in event.summary.value]
        assert {value.tag: value.simple_value for value in values} == {"loss": 5.0, "dev/stsb": 81.0}
        file.unlink()
