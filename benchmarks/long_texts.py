"""Memory and time of long texts, with each way to compute attention.

    python -m benchmarks.long_texts --output benchmarks/results/long_texts_cpu.json

The encoder has ModernBERT-base's sizes, with fewer blocks and random weights. Attention is computed
at once, as for short texts, in parts, or by the GPU's kernel. The train step is SimCSE with two
texts, which makes four rows. Memory is what XLA plans for temporary arrays. On a CPU, encoding one
text is timed by processor time, because other work on the machine changes it little, and the train
step is compiled and not run. On a GPU, both are timed by the clock.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import measure, workload
from benchmarks.train_step import SCHEDULE_STEPS
from diffcse_jax.batch import Batch, Vocabulary
from diffcse_jax.config import Config
from diffcse_jax.errors import reported_to_user
from diffcse_jax.models import layers, transformer
from diffcse_jax.models.forward import SentenceNetwork, compiled_forward
from diffcse_jax.training.networks import build
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.sharding import make_mesh, replicated, resolved
from diffcse_jax.training.step import abstract_state, initial_state, make_train_step, root_key

MODEL = "answerdotai/ModernBERT-base"
POOLER = "avg"
TEXTS = 2  # of a train step
PARTS, AT_ONCE, KERNEL = "in parts", "at once", "kernel"


def config_of(length: int, precision: str) -> Config:
    """Return the configuration of the step: SimCSE on one device."""
    return Config.from_dict(
        {
            "model": {
                "name_or_path": MODEL,
                "pooler": POOLER,
                "projector": "none",
                "attention_dropout": (0.0,),
            },
            "difference": {"weight": 0.0},
            "data": {"max_length": length},
            "train": {"batch_size": TEXTS, "packing": "off"},
            "mesh": {"data": 1},
            "precision": precision,
        }
    )


def measured(options: argparse.Namespace, length: int, attention: str) -> dict[str, Any]:
    """Return the planned memory and the time for texts of this length."""
    mesh = make_mesh(config_of(length, options.precision))
    config = resolved(config_of(length, options.precision), mesh)
    hf_config = workload.sizes_of(MODEL) | {"num_hidden_layers": options.blocks}
    runs_step = jax.default_backend() != "cpu"
    checkpoint = (
        workload.random_checkpoint(hf_config, 0)
        if runs_step
        else workload.abstract_checkpoint(hf_config, MODEL)
    )
    sizes = checkpoint.config
    if attention == AT_ONCE:
        sizes = dataclasses.replace(sizes, most_queries=length)
    # Otherwise the device would decide.
    transformer.has_fused_attention = lambda device: attention == KERNEL
    compiled_forward.cache_clear()
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    network = partial(SentenceNetwork, sizes, POOLER)
    forward = compiled_forward(sizes, POOLER, jnp.dtype(options.precision), mesh)
    encode = forward.lower(layers.shapes(network), ids, ids).compile()
    row: dict[str, Any] = {
        "length": length,
        "attention": attention,
        "encode_bytes": planned_bytes(encode),
    }
    if row["encode_bytes"] < options.most_bytes:
        params = jax.device_put(layers.initial(network, jax.random.key(0)))
        text = jnp.full((1, length), 7, jnp.int32), jnp.ones((1, length), jnp.int32)
        row["encode_seconds"] = seconds(lambda: encode(params, *text), options.repeats)

    built = build(
        config,
        dataclasses.replace(checkpoint, config=sizes),
        None,
        Vocabulary(sizes.vocab_size, None, ()),
    )
    optimizer = make_optimizer(config.optim, SCHEDULE_STEPS)
    rows = jax.ShapeDtypeStruct((TEXTS, 2, length), jnp.int32)
    step = make_train_step(built.networks, config, optimizer, mesh)
    state = abstract_state(built.params, optimizer, config, mesh)
    compiled = step.lower(state, built.frozen, Batch(rows, rows), root_key(config)).compile()
    row["step_bytes"] = planned_bytes(compiled)
    if runs_step and row["step_bytes"] < options.most_bytes:
        state = initial_state(built.params, optimizer, config, mesh)
        batch = Batch(jnp.full(rows.shape, 7, jnp.int32), jnp.ones(rows.shape, jnp.int32))
        frozen = jax.device_put(built.frozen, replicated(mesh))

        def train() -> Any:
            nonlocal state
            state, metrics = compiled(state, frozen, batch, root_key(config))
            return metrics

        row["step_seconds"] = seconds(train, options.repeats)
    return row


def planned_bytes(compiled: jax.stages.Compiled) -> int:
    """Return what XLA plans for temporary arrays."""
    return compiled.memory_analysis().temp_size_in_bytes


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Return the median time of a call after a first one.

    It is processor time on a CPU, and time on the clock elsewhere.
    """
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    times = []
    for _ in range(repeats + 1):
        start = clock()
        jax.block_until_ready(call())
        times.append(clock() - start)
    return statistics.median(times[1:])


def main(argv: list[str]) -> dict[str, Any]:
    """Measure as the command line says, print and write the record, and return it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--blocks", type=int, default=6, help="of ModernBERT-base's 22 (default: %(default)s)")
    add("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    add("--attention", nargs="+", choices=(PARTS, AT_ONCE, KERNEL), default=[PARTS, AT_ONCE])
    add("--precision", choices=("float32", "bfloat16"), default="float32")
    add(
        "--repeats",
        type=int,
        default=3,
        help="of a call, after a first time (default: %(default)s)",
    )
    add("--most_bytes", type=float, default=4 << 30, help="more is not run (default: 4 GiB)")
    add("--output", type=Path, help="JSON file for the record")
    options = parser.parse_args(argv)
    if KERNEL in options.attention and (
        jax.default_backend() != "gpu" or options.precision != "bfloat16"
    ):
        parser.error("--attention kernel needs an NVIDIA GPU and --precision bfloat16")
    rows = []
    for length in options.lengths:
        for attention in options.attention:
            rows.append(measured(options, length, attention))
            print(rows[-1], flush=True)
    record = {
        "device": jax.devices()[0].device_kind,
        "blocks": options.blocks,
        "precision": options.precision,
    }
    record |= {"texts_of_a_step": TEXTS, "rows": rows}
    return measure.write_record(options.output, "benchmarks.long_texts", argv, record)


if __name__ == "__main__":
    with reported_to_user():
        main(sys.argv[1:])
