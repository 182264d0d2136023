"""Whether a batch is cut into chunks, if `train.chunking=auto` leaves that to the free memory."""

from unittest import mock

import jax
import pytest
from tiny_networks import ENCODER, SIMCSE, VOCABULARY, config_of, random_batch, views_of
from tiny_run import run_settings

from diffcse_jax.apps.finetune.train import _check
from diffcse_jax.config import configuration
from diffcse_jax.errors import ConfigError
from diffcse_jax.training import memory, networks, train
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.sharding import make_mesh, shard_batch
from diffcse_jax.training.step import initial_state, make_train_step, root_key

BATCH = {"train": {"batch_size": 16, "chunking": "auto"}, "mesh": {"data": 1}}
MEMINFO = "MemTotal: 24000 kB\nMemFree: 5000 kB\nMemAvailable:  8000 kB\n"


@pytest.fixture
def run_of(tmp_path, minilm_dir, monkeypatch):
    """Return the prepared run of a configuration, with this much free memory."""

    def of(free: int | None, **values: object) -> train.Run:
        monkeypatch.setattr("diffcse_jax.config.groups.AUTOMATIC_CHUNK", 4)
        monkeypatch.setattr(memory, "free_memory", lambda device: free)
        settings = run_settings(tmp_path, minilm_dir, train={"chunking": "auto"}, mesh={"data": 1})
        _, config = configuration("simcse_minilm", settings | values)
        with mock.patch.object(train, "train_and_select", return_value="") as prepared:
            train.train_in_folder(config, tmp_path / "run")
        return prepared.call_args.args[0]

    return of


@pytest.mark.parametrize(
    ("free", "chunks", "said"),
    [(10**9, 1, None), (1000, 2, "and 0.0 GB are free. They"), (None, 2, "nothing says how much")],
)
def test_batches_are_whole_where_they_fit(run_of, capsys, free, chunks, said):
    run = run_of(free)
    assert run.config.train.chunks == run.source.packing.chunks == chunks
    out = capsys.readouterr().err
    assert said in out if said else "memory:" not in out
    assert said is None or "batches of 8 sentences may need" in out
    # The same folder, with more or less memory: a resume would be accepted.
    assert run_of(10**9).config.train.chunks == 1


def test_a_size_that_is_given_decides(run_of):
    assert run_of(10**9, **{"train.chunk_size": 2}).config.train.chunks == 4


def test_a_step_needs_about_what_its_forward_pass_keeps():
    """The plan of XLA for a CPU: more than what is kept, and less than what is counted on."""
    config = config_of(SIMCSE, BATCH, {"train": {"batch_size": 64}})
    mesh = make_mesh(config)
    built = networks.build(config, ENCODER, None, VOCABULARY)
    batch = shard_batch(views_of(random_batch(size=64)), mesh)
    kept = memory.kept_bytes(config, built, batch, mesh)
    optimizer = make_optimizer(config.optim, 1)
    state = initial_state(built.params, optimizer, config, mesh)
    step = make_train_step(built.networks, config, optimizer, mesh)
    plan = step.lower(state, built.frozen, batch, root_key(config)).compile().memory_analysis()
    assert kept < plan.temp_size_in_bytes < memory.PER_KEPT_BYTE * kept


@pytest.mark.parametrize(
    ("groups", "files", "kilobytes"),
    [
        ("0::/\n", {}, 8000),  # no limit
        ("0::/\n", {"memory.max": "max", "memory.current": "1024"}, 8000),
        ("0::/\n", {"memory.max": "4096000", "memory.current": "1024000"}, 3000),
        ("0::/a/b\n", {"a/memory.max": "2048000", "a/memory.current": "0"}, 2000),
        ("0::/a/b\n", {"memory.max": "1024000", "memory.current": "0"}, 1000),
        (
            "5:cpu:/\n4:memory:/a\n0::/\n",
            {"memory/memory.limit_in_bytes": "1024000", "memory/memory.usage_in_bytes": "512000"},
            500,
        ),
    ],
)
def test_the_free_memory_of_a_process(tmp_path, groups, files, kilobytes):
    for name, text in {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory.free_memory(jax.devices()[0], tmp_path) == kilobytes * 1024


def test_the_free_memory_of_a_device_or_of_another_system(tmp_path):
    gpu = mock.Mock(spec=jax.Device, memory_stats=lambda: {"bytes_limit": 100, "bytes_in_use": 30})
    assert memory.free_memory(gpu) == 70
    assert memory.free_memory(jax.devices()[0], tmp_path) is None


def test_fine_tuning_does_not_decide():
    task = {"pair": {"texts": ("a", "b"), "kind": "regression"}}
    off = {
        "contrast": {"weight": 0.0},
        "difference": {"weight": 0.0},
        "model": {"projector": "none"},
    }
    config = config_of(BATCH, off, {"finetune": {"weight": 1.0, "tasks": task}})
    with pytest.raises(ConfigError, match=r"train\.chunking=auto: .*train\.chunk_size"):
        _check(config)
