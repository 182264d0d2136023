"""Versions, devices and settings of a run: a line of `WORKDIR/starts.jsonl` for every start of its training."""

import datetime
import importlib.metadata
import json
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

import diffcse_jax
from diffcse_jax.config import Config
from diffcse_jax.io import append_line, disk_errors, read_json
from diffcse_jax.storage.workdir import START

STARTS = "starts.jsonl"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "transformers", "tokenizers")


def record_start(workdir: Path, config: Config, *, text: str, step: int) -> None:
    """Adds the line of this start, and tells of versions and devices that differ from those of the start before.

    Args:
        workdir: the run's folder.
        config: the resolved configuration.
        text: identifies the tokenised training text.
        step: from where training goes on.
    """
    path = workdir / STARTS
    now = environment() | {
        "step": step,
        "configuration": config.to_dict(),
        "digests": {"text": text, **read_json(workdir / START)},
    }
    before = _last(path)
    with disk_errors(path, safe="The checkpoints are whole."):
        append_line(path, json.dumps(now))
    if changed := _differences(before, now):
        print(f"notice: results may differ in their last digits from here on: {changed}", file=sys.stderr)


def environment() -> dict[str, Any]:
    """Time, host, versions, devices, and the commit of the package where it is in a git repository."""
    return {
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "versions": {"python": platform.python_version(), "diffcse_jax": diffcse_jax.__version__}
        | {package: importlib.metadata.version(package) for package in _PACKAGES},
        "devices": {"kind": jax.devices()[0].device_kind, "count": jax.device_count(), "hosts": jax.process_count()},
        "git": commit(Path(diffcse_jax.__file__).parent),
    }


def commit(folder: Path) -> dict[str, Any] | None:
    """The commit of the repository that tracks the folder, and whether tracked files differ from it; else None."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        if not git("ls-files", "."):
            return None
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):  # no git, no repository, no commit
        return None


def _last(path: Path) -> Mapping[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return {}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Versions and devices that differ, as `jax 0.10.2 then, 0.11.0 now`; empty where none does."""
    return ", ".join(
        f"{name} {before[group][name]} then, {value} now"
        for group in ("versions", "devices")
        for name, value in now[group].items()
        if before.get(group, {}).get(name, value) != value
    )
