"""Time implementations side by side: workers that take turns, the machine, and the record.

Implementations take turns: a block of steps of one, a block of the other, and so on. Other work on
the machine then slows all of them. Each has a process of its own, with its own threads and memory.
While one works, the others wait on a pipe and use no processor.
"""

import contextlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffcse_jax.errors import ConfigError
from diffcse_jax.io import write_text

ENVIRONMENT = ("GLIBC_TUNABLES", "XLA_FLAGS", "OMP_NUM_THREADS")
PACKAGES = ("jax", "jaxlib", "flax", "torch", "transformers", "sentence-transformers", "numpy")

# Dense matrix products per second that vendors state. Float32 is without TF32, which neither side
# uses here.
PEAK_FLOPS = {
    "H100 80GB HBM3": {"bfloat16": 989e12, "float32": 67e12},
    "H200": {"bfloat16": 989e12, "float32": 67e12},
    "A100": {"bfloat16": 312e12, "float32": 19.5e12},
    "TPU v5 lite": {"bfloat16": 197e12},
}


class Implementation(NamedTuple):
    """One side of a comparison, inside its worker."""

    step: Callable[[], object]  # starts one step; may return before it has finished
    wait: Callable[[], object]  # returns when all started steps have finished
    facts: Callable[[], dict[str, Any]]  # other values to record, asked at the end


class Worker(NamedTuple):
    """A running implementation, as the measuring process sees it."""

    first_call: float  # seconds of the first step, including compilation
    run: Callable[[int], float]  # runs this many steps and returns the seconds per step
    finish: Callable[[], dict[str, Any]]  # ends the worker and returns its facts


@contextlib.contextmanager
def worker(build: Callable[..., Implementation], *arguments: object) -> Iterator[Worker]:
    """Start `build(*arguments)` in a process of its own and run its first step.

    Raises:
        RuntimeError: The process ended. Its own error is on stderr.
    """
    # By default JAX takes three quarters of a GPU's memory at once, and the other side needs some.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.45")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, build, arguments), daemon=True)
    process.start()
    there.close()

    def receive() -> Any:
        try:
            return here.recv()
        except EOFError:
            raise RuntimeError(
                f"the worker of {build.__name__} ended; its error is above"
            ) from None

    def run(steps: int) -> float:
        here.send(steps)
        return receive()

    def finish() -> dict[str, Any]:
        here.send(0)
        return receive()

    try:
        yield Worker(receive(), run, finish)
    finally:
        here.close()
        process.join(timeout=10)
        process.kill()


def _serve(connection: Any, build: Callable[..., Implementation], arguments: tuple) -> None:
    implementation = build(*arguments)
    connection.send(_seconds_per_step(implementation, 1))
    _reset_peak_rss()
    with contextlib.suppress(EOFError):  # the measuring process was interrupted
        while steps := connection.recv():
            connection.send(_seconds_per_step(implementation, steps))
        connection.send(implementation.facts() | {"peak_rss_bytes": _peak_rss()})


def _seconds_per_step(implementation: Implementation, steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        implementation.step()
    implementation.wait()
    return (time.perf_counter() - start) / steps


def _reset_peak_rss() -> None:
    """Reset the peak of resident memory, which is the compiler's so far (Linux only)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_rss() -> int:
    status = Path("/proc/self/status")
    if status.is_file():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def alternate(workers: Mapping[str, Worker], *, steps: int, block: int) -> dict[str, list[float]]:
    """Return the seconds per step of every block. The implementations take turns.

    Args:
        steps: Steps of each implementation, rounded up to whole blocks.
        block: Steps per turn. The step before each turn, which may find cold caches, is not
            counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(-(-steps // block)):
        for name, side in workers.items():
            side.run(1)
            seconds[name].append(side.run(block))
    return seconds


def summary(seconds: list[float], first_call: float, items: int) -> dict[str, Any]:
    """Return the entries of a record for the times of one implementation.

    Args:
        seconds: Seconds per step, one for each block.
        first_call: Seconds of the first step.
        items: Sentences per step.
    """
    median = statistics.median(seconds)
    return {
        "step_seconds": spread(seconds),
        "sentences_per_second": items / median,
        "compile_seconds": max(first_call - median, 0.0),
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median and the range of repeated times, and their number."""
    return {
        "median": statistics.median(seconds),
        "min": min(seconds),
        "max": max(seconds),
        "turns": len(seconds),
    }


def ratios(sides: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return how many times as long as ours each other side takes, by medians."""
    medians = {name: side["step_seconds"]["median"] for name, side in sides.items()}
    return {name: median / medians["ours"] for name, median in medians.items() if name != "ours"}


def changed_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a configuration that differ from the defaults.

    The folder of tokens is left out, because it changes no result.
    """
    from diffcse_jax.config import Config, flat  # imports JAX, which some benchmarks set up first

    defaults = flat(Config().to_dict()) | {"data.cache_dir": values["data"]["cache_dir"]}
    return {key: value for key, value in flat(values).items() if value != defaults.get(key)}


def share_of_peak(flops_per_second: float, device: str, precision: str) -> float | None:
    """Return the share of the device's peak, or None if the peak is unknown."""
    peaks = [peak.get(precision) for name, peak in PEAK_FLOPS.items() if name in device]
    return flops_per_second / peaks[0] if peaks and peaks[0] else None


def use_cores(count: int) -> None:
    """Limit this process and its workers to `count` cores (0: all).

    Both thread pools follow (Linux only).
    """
    if count:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def machine() -> dict[str, Any]:
    """Return the processor, usable cores, memory, and environment variables that change speed."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": cores,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def versions() -> dict[str, str | None]:
    """Return the versions of Python and important packages; None for a package that is missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def write_record(
    path: Path | None, module: str, argv: list[str], record: Mapping[str, Any]
) -> dict[str, Any]:
    """Add command, machine and versions to a record, and write it as JSON.

    If the path is None, the record is printed.

    Raises:
        ConfigError: The file cannot be written. The record is printed.
    """
    command = shlex.join(["python", "-m", module, *argv])
    complete = {"command": command, "machine": machine(), "versions": versions(), **record}
    text = json.dumps(complete, indent=1)
    if path is None:
        print(text)
    else:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text + "\n")
        except OSError as error:
            print(text)  # so that the measurement is not lost
            raise ConfigError(f"--output {path}: {error}; the record is printed above") from error
    return complete
