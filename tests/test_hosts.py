"""Two processes on this machine train like one, through the public command."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from diffcse_jax.training.metrics import read_metrics

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path: Path, minilm_dir: Path):
    model = write_tiny_model(tmp_path / "model", minilm_dir)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Sentence {i} has the number {i * i} and {i % 7} words more.\n" for i in range(60)))
    overrides = {
        "model.name_or_path": model, "generator.head_steps": 3, "generator.head_batch_size": 8,
        "data.train_file": text, "data.max_length": 16, "data.cache_dir": tmp_path / "cache", "train.batch_size": 8,
        "train.steps": 6, "train.log_every": 1, "eval.every": 3, "eval.metric": "halves_retrieval",
    }  # fmt: skip
    arguments = [f"--config.{key}={value}" for key, value in overrides.items()]
    alone, together = tmp_path / "alone", tmp_path / "together"

    finish([start(alone, arguments, {})])
    address = f"127.0.0.1:{free_port()}"
    hosts = [{"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(i)} for i in range(2)]
    outputs = finish([start(together, [*arguments, "--config.distributed=True"], host) for host in hosts])

    rows, expected = read_metrics(together), read_metrics(alone)
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, row_alone in zip(rows, expected, strict=True):
        name = "loss" if "loss" in row_alone else "dev/halves_retrieval"
        assert row[name] == pytest.approx(row_alone[name], rel=1e-5)
    assert (together / "export" / "model.safetensors").is_file()
    assert "exported to" in outputs[0]
    assert "step 6" in outputs[0]
    assert "step 6" not in outputs[1]  # one host speaks


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
