"""A run of the training command on a small model and a small text.

It is for tests that start processes.
"""

import contextlib
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tiny_model import write_tiny_model

from diffcse_jax.config import Config, known_keys
from diffcse_jax.hosts import StopRequest
from diffcse_jax.training.callbacks import MetricsFile, Training

SENTENCES = 60
WITHOUT_TORCH = str(Path(__file__).with_name("without_torch"))


def run_settings(folder: Path, tokenizer_from: Path, **groups: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of such a run, with its files in `folder`; `groups` are laid over them."""
    text = folder / "text.txt"
    text.write_text(
        "".join(
            f"Sentence {i} has the number {i * i} and {i % 7} words more.\n"
            for i in range(SENTENCES)
        )
    )
    settings = {
        "model.name_or_path": str(write_tiny_model(folder / "model", tokenizer_from, blocks=1)),
        "data.train_file": str(text), "data.max_length": 16, "data.cache_dir": str(folder / "cache"),
        "generator.head_steps": 3, "generator.head_batch_size": 8, "train.batch_size": 8, "train.log_every": 1,
        "eval.metric": "halves_retrieval", "train.recompute": "off",  # which compiles sooner
    }  # fmt: skip
    return settings | {
        f"{group}.{key}": value for group, values in groups.items() for key, value in values.items()
    }


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """A limit on the bytes of a file stands for the disk: libraries write in their own code."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def metrics_file(workdir: Path, *, resumed_at: int = 0) -> MetricsFile:
    """The metrics of a run that starts now."""
    file = MetricsFile()
    file.on_start(Training(Config(), workdir, resumed_at, 100, {}, lambda: None))
    return file


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """The settings as arguments of the command."""
    assert settings.keys() <= known_keys().keys()
    return [f"--config.{key}={value}" for key, value in settings.items()]


def stop_first_run(monkeypatch) -> None:
    """Let the next training loop stop after a step, as a signal does, and later ones go on."""
    asked = StopRequest()
    asked.make()
    requests = (contextlib.nullcontext(request) for request in (asked, *[StopRequest()] * 9))
    monkeypatch.setattr("diffcse_jax.training.loop.stop_requested", lambda: next(requests))


def environment(compiled: Path | str, **others: str) -> dict[str, str]:
    """Variables of a command with one device, which finds no PyTorch.

    What commands with the same folder `compiled` share is compiled once.
    """
    path = [WITHOUT_TORCH, others.pop("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
    return (
        os.environ
        | {
            "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1"),
            "JAX_COMPILATION_CACHE_DIR": str(compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
        }
        | others
    )
