"""Several processes on this machine train like one, through the public command."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from diffcse_jax.training.metrics import read_metrics
from diffcse_jax.workdir import read_encoder

REPOSITORY = Path(__file__).parents[1]
STEPS = 6
BOUND = 120  # seconds in which the loss of a process must be noticed


@pytest.fixture(scope="module")
def arguments(tmp_path_factory, minilm_dir) -> list[str]:
    """A run of six steps on a small model and a small text."""
    folder = tmp_path_factory.mktemp("hosts")
    text = folder / "text.txt"
    text.write_text("".join(f"Sentence {i} has the number {i * i} and {i % 7} words more.\n" for i in range(60)))
    return overrides(
        {
            "model.name_or_path": write_tiny_model(folder / "model", minilm_dir), "generator.head_steps": 3,
            "generator.head_batch_size": 8, "data.train_file": text, "data.max_length": 16,
            "data.cache_dir": folder / "cache", "train.batch_size": 8, "train.steps": STEPS, "train.log_every": 1,
            "eval.every": 3, "eval.metric": "halves_retrieval",
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory, arguments) -> Path:
    """The workdir of one process that trained without the others."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    finish([start(workdir, arguments, {})])
    return workdir


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path, arguments, alone):
    outputs = finish(start_hosts(tmp_path / "together", arguments, count=2))
    check_same(tmp_path / "together", alone)
    assert (tmp_path / "together" / "export" / "model.safetensors").is_file()
    assert "exported to" in outputs[0]
    assert "step 6" in outputs[0]
    assert "step 6" not in outputs[1]  # one host speaks


@pytest.mark.slow
def test_a_killed_run_goes_on_with_other_processes(tmp_path, arguments, alone):
    """Four processes with split weights are killed behind their first checkpoint; one process finishes the run."""
    workdir = tmp_path / "run"
    hosts = start_hosts(workdir, [*arguments, *overrides({"mesh.fully_sharded": True})], count=4)
    wait_for(lambda: any((workdir / "checkpoints").glob("3")), hosts)
    for host in hosts:
        host.kill()
        host.communicate()
    assert read_encoder(workdir / "checkpoints/3").step == 3  # without the processes that wrote it
    (output,) = finish([start(workdir, arguments, {})])
    assert f"of {STEPS} from" in output  # resumed
    check_same(workdir, alone)


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others(tmp_path, arguments):
    endless = overrides({"train.steps": 1_000_000, "eval.every": 0, "generator.head_steps": 1})
    hosts = start_hosts(tmp_path / "run", [*arguments, *endless], count=2)
    wait_for(lambda: (tmp_path / "run/metrics.jsonl").is_file(), hosts)
    hosts[1].kill()
    hosts[1].communicate()
    try:
        output = hosts[0].communicate(timeout=BOUND)[0]
    finally:
        hosts[0].kill()
    assert hosts[0].returncode != 0
    assert "error" in output.lower()


def overrides(values: dict[str, object]) -> list[str]:
    return [f"--config.{key}={value}" for key, value in values.items()]


def check_same(workdir: Path, expected: Path) -> None:
    """Both runs have the same losses and dev scores, step by step."""
    rows, rows_expected = read_metrics(workdir), read_metrics(expected)
    assert [row["step"] for row in rows] == [row["step"] for row in rows_expected]
    for row, row_expected in zip(rows, rows_expected, strict=True):
        name = "loss" if "loss" in row_expected else "dev/halves_retrieval"
        assert row[name] == pytest.approx(row_expected[name], rel=1e-5)


def wait_for(condition, hosts: list[subprocess.Popen]) -> None:
    for _ in range(3000):
        if condition():
            return
        assert all(host.poll() is None for host in hosts), [host.communicate()[0] for host in hosts]
        time.sleep(0.1)
    pytest.fail("waited for 300 seconds")


def start_hosts(workdir: Path, arguments: list[str], count: int) -> list[subprocess.Popen]:
    address = f"127.0.0.1:{free_port()}"
    environments = [
        {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(index)}
        for index in range(count)
    ]
    arguments = [*arguments, *overrides({"distributed": True})]
    return [start(workdir, arguments, environment) for environment in environments]


def start(workdir: Path, arguments: list[str], host: dict[str, str]) -> subprocess.Popen:
    command = [sys.executable, "train.py", "--config", "configs/diffcse_minilm.py", "--workdir", str(workdir)]
    return subprocess.Popen(
        [*command, *arguments],
        cwd=REPOSITORY, env=os.environ | {"XLA_FLAGS": ""} | host, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(processes: list[subprocess.Popen]) -> list[str]:
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
