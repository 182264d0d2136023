r"""Measure how long the kernels of a train step take on a GPU, and sum them by kind.

    python -m benchmarks.profile_step --size base --objective diffcse \
        --output benchmarks/results/NAME.json

The step is that of `benchmarks.train_step`, in bfloat16. JAX's profiler measures each kernel from
its start to its end. The time of a whole step is measured without the profiler.
"""

import argparse
import collections
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from benchmarks import measure, train_step, workload
from diffcse_jax.errors import reported_to_user

TURNS = 3
STEPS = 20  # in each turn
TRACED = 5  # steps
LISTED = 10  # kernels
# XLA names the kernels. A kernel belongs to the first kind whose pattern its name contains.
KINDS = {
    "matrix products": r"nvjet|gemm|cutlass|cublas|xmma",
    "sums over rows or columns": r"^input_reduce",
    "optimizer": r"^loop_select",
    "random bits": r"^loop_xor",
    "casts": r"^wrapped_convert",
    "copies": r"^(memcpy|memset|copy)|transpose",
    "other elementwise": r"",
}

Kernels = Mapping[str, tuple[float, float]]  # milliseconds and calls per step, by name


def kernels_of(planes: Iterable[Any], steps: int) -> Kernels:
    """Return the kernels of the GPUs in a profile of some steps, the longest first."""
    milliseconds: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
    for plane in planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            for event in line.events:
                milliseconds[event.name] += event.duration_ns / 1e6
                calls[event.name] += 1
    return {
        name: (total / steps, calls[name] / steps) for name, total in milliseconds.most_common()
    }


def by_kind(kernels: Kernels) -> dict[str, float]:
    """Return the milliseconds per step of each kind of kernel."""
    totals = dict.fromkeys(KINDS, 0.0)
    for name, (milliseconds, _) in kernels.items():
        kind = next(kind for kind, pattern in KINDS.items() if re.search(pattern, name))
        totals[kind] += milliseconds
    return totals


def summary(kernels: Kernels, programs: Iterable[str]) -> dict[str, Any]:
    """Return what a record says of the kernels.

    Args:
        kernels: The kernels.
        programs: The optimized HLO of the step, in which a kernel with a fusion has its name.
    """
    shapes: dict[str, str] = {}
    for program in programs:
        for name, shape in re.findall(
            r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) [\w\-]+\(", program, re.M
        ):
            shapes[re.sub(r"[.\-]", "_", name)] = shape
    return {
        "kernel_milliseconds": sum(milliseconds for milliseconds, _ in kernels.values()),
        "kernels_per_step": sum(calls for _, calls in kernels.values()),
        "kinds": by_kind(kernels),
        "longest": [
            {"kernel": name, "milliseconds": total, "calls": calls, "result": shapes.get(name, "")}
            for name, (total, calls) in [*kernels.items()][:LISTED]
        ],
    }


def main() -> None:
    """Time and profile the step, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=workload.ENCODERS, default="base")
    parser.add_argument("--objective", choices=train_step.OBJECTIVES, default="diffcse")
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--output", type=Path, help="JSON file for the record (default: print it)")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit(f"JAX found no GPU here, only {jax.default_backend()}. Run it where there is one")
    settings = train_step.Settings(
        size=options.size,
        objective=options.objective,
        length=options.length,
        batch_size=options.batch_size,
        precision="bfloat16",
    )
    side = train_step.OurStep(settings)
    for _ in range(TRACED):
        side.step()
    side.wait()
    seconds = []
    for _ in range(TURNS):
        start = time.perf_counter()
        for _ in range(STEPS):
            side.step()
        side.wait()
        seconds.append((time.perf_counter() - start) / STEPS)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(TRACED):
                side.step()
            side.wait()
        (file,) = Path(folder).rglob("*.xplane.pb")
        kernels = kernels_of(jax.profiler.ProfileData.from_file(str(file)).planes, TRACED)
    record = {
        "device": side.facts()["device"],
        "settings": train_step.recorded(settings),
        "step_seconds": measure.spread(seconds),
        **summary(kernels, [program.as_text() for program in side.compiled.values()]),
    }
    measure.write_record(options.output, "benchmarks.profile_step", sys.argv[1:], record)


if __name__ == "__main__":
    with reported_to_user():
        main()
