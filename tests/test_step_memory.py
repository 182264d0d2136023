"""Whether a batch is cut into chunks, if `train.chunking=auto` leaves that to the free memory."""

from unittest import mock

import jax
import pytest
from tiny_networks import ENCODER, SIMCSE, VOCABULARY, config_of, random_batch, views_of
from tiny_run import run_settings

from diffcse_jax.apps.finetune.train import _check
from diffcse_jax.config import configuration
from diffcse_jax.errors import ConfigError
from diffcse_jax.run_folder.records import read_starts
from diffcse_jax.training import memory, networks, train
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.sharding import make_mesh, shard_batch
from diffcse_jax.training.step import initial_state, make_train_step, root_key

MUCH = 10**9
MEMINFO = "MemTotal: 24000 kB\nMemFree: 5000 kB\nHugePages_Total: 0\nMemAvailable:  8000 kB\n"


@pytest.fixture
def settings(tmp_path, minilm_dir, monkeypatch):
    monkeypatch.setattr(memory, "AUTOMATIC_CHUNK", 4)
    return run_settings(
        tmp_path,
        minilm_dir,
        train={"chunking": "auto", "steps": 1},
        mesh={"data": 1},
    )


def prepared(settings, tmp_path, monkeypatch, free, **values) -> train.Run:
    """Return the run of a configuration, with this much free memory."""
    monkeypatch.setattr(memory, "free_memory", lambda device: free)
    _, config = configuration("simcse_minilm", settings | values)
    with mock.patch.object(train, "train_and_select", return_value="") as started:
        train.train_in_folder(config, tmp_path / "run")
    return started.call_args.args[0]


@pytest.mark.parametrize(
    ("batch_size", "free", "size", "said"),
    [
        (8, MUCH, 0, None),
        (8, 1000, 4, "and 0.0 GB are free. They are computed in chunks of 4"),
        (6, None, 3, "and the free memory is not known. They are computed in chunks of 3"),
        (7, 1000, 1, "They are computed in chunks of 1"),
        (4, 1000, 0, None),  # no more than a chunk
    ],
)
def test_batches_are_cut_where_they_may_not_fit(
    settings, tmp_path, monkeypatch, capsys, batch_size, free, size, said
):
    settings["train.batch_size"] = batch_size
    run = prepared(settings, tmp_path, monkeypatch, free)
    assert run.chunk_size == size
    chunks = batch_size // size if size else 1
    assert run.computing.train.chunks == run.source.packing.chunks == chunks
    assert run.config.train.chunk_size == 0  # what identifies the run
    out = capsys.readouterr().err
    assert said in out if said else "memory:" not in out


def test_chunks_of_a_few_sentences_are_not_worth_it(settings, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory, "AUTOMATIC_CHUNK", 6)
    run = prepared(settings, tmp_path, monkeypatch, 1000, **{"train.batch_size": 7})
    assert run.chunk_size == 0
    assert "If it runs out, choose a train.batch_size that 6 divides" in capsys.readouterr().err


def test_a_size_that_is_given_decides(settings, tmp_path, monkeypatch, capsys):
    run = prepared(settings, tmp_path, monkeypatch, 1000, **{"train.chunk_size": 2})
    assert run.chunk_size == 0
    assert run.computing.train.chunks == run.source.packing.chunks == 4
    assert "memory:" not in capsys.readouterr().err


def test_a_resumed_run_keeps_its_chunks(settings, tmp_path, monkeypatch, capsys):
    """Its results do not depend on the memory that is free by then. Whole batches may no longer fit."""
    _, config = configuration("simcse_minilm", settings)
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    train.train_in_folder(config, tmp_path / "run")
    capsys.readouterr()
    assert read_starts(tmp_path / "run")[-1]["devices"]["chunk_size"] == 4
    assert prepared(settings, tmp_path, monkeypatch, MUCH).chunk_size == 4
    off = prepared(settings, tmp_path, monkeypatch, MUCH, **{"train.chunking": "off"})
    assert off.chunk_size == 0
    assert "memory:" not in capsys.readouterr().err


def test_a_step_needs_about_what_its_forward_pass_keeps():
    """The plan of XLA for a CPU: more than what is kept, and less than what is counted on."""
    config = config_of(SIMCSE, {"train": {"batch_size": 64}, "mesh": {"data": 1}})
    mesh = make_mesh(config)
    built = networks.build(config, ENCODER, None, VOCABULARY)
    batch = shard_batch(views_of(random_batch(size=64)), mesh)
    kept = memory.kept_bytes(config, built, batch, mesh)
    optimizer = make_optimizer(config.optim, 1)
    state = initial_state(built.params, optimizer, config, mesh)
    step = make_train_step(built.networks, config, optimizer, mesh)
    plan = step.lower(state, built.frozen, batch, root_key(config)).compile().memory_analysis()
    assert kept < plan.temp_size_in_bytes < memory.PER_KEPT_BYTE * kept


STAT = "cache 900\ninactive_file 512000\ntotal_inactive_file 256000\n"


@pytest.mark.parametrize(
    ("groups", "files", "kilobytes"),
    [
        ("0::/\n", {}, 8000),  # no limit
        ("0::/\n", {"memory.max": "max", "memory.current": "1024"}, 8000),
        ("0::/\n", {"memory.max": "4096000", "memory.current": "1024000"}, 3500),
        ("0::/a/b\n", {"a/memory.max": "2048000", "a/memory.current": "0"}, 2500),
        ("0::/a/b\n", {"memory.max": "1024000", "memory.current": "1024000"}, 500),
        (
            "5:cpu:/\n4:memory:/a\n0::/\n",
            {"memory/memory.limit_in_bytes": "1024000", "memory/memory.usage_in_bytes": "512000"},
            750,
        ),
    ],
)
def test_the_free_memory_of_a_process(tmp_path, groups, files, kilobytes):
    """Files that are cached in a group count as free."""
    stats = {f"{name.rpartition('memory.')[0]}memory.stat": STAT for name in files}
    for name, text in {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": text for name, text in {**files, **stats}.items()},
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory.free_memory(jax.devices()[0], tmp_path) == kilobytes * 1024


@pytest.mark.parametrize(
    ("statistics", "free"),
    [({"bytes_limit": 100, "bytes_in_use": 30}, 70), ({"bytes_in_use": 1}, None), (None, None)],
)
def test_the_free_memory_of_an_accelerator(statistics, free):
    device = mock.Mock(spec=jax.Device, platform="gpu", memory_stats=lambda: statistics)
    assert memory.free_memory(device) == free


def test_another_system_does_not_say_how_much_is_free(tmp_path):
    assert memory.free_memory(jax.devices()[0], tmp_path) is None


def test_fine_tuning_does_not_decide():
    off = {"contrast": {"weight": 0.0}, "difference": {"weight": 0.0}}
    task = {"pair": {"texts": ("a", "b"), "kind": "regression"}}
    config = config_of(
        off,
        {"model": {"projector": "none"}, "train": {"chunking": "auto"}},
        {"finetune": {"weight": 1.0, "tasks": task}},
    )
    with pytest.raises(ConfigError, match=r"train\.chunking=auto: .*train\.chunk_size"):
        _check(config)
