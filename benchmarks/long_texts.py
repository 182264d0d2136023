"""Memory and time of long texts: with attention in parts, and with attention at once, as short texts have it.

    python -m benchmarks.long_texts --output benchmarks/results/long_texts_cpu.json

The encoder has ModernBERT-base's sizes, with fewer blocks and random weights. Memory is what XLA plans for temporary
arrays. Encoding one text is timed by processor time, because other work on the machine changes it little; it is not run
if it needs more than 4 GiB. The train step (SimCSE with two texts, which makes four rows) is compiled and not run.
"""

import argparse
import dataclasses
import sys
import time
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
from diffcse_jax.models import parameters
from diffcse_jax.models.forward import SentenceNetwork, compiled_forward
from diffcse_jax.training.networks import build
from diffcse_jax.training.sharding import make_mesh, resolved
from diffcse_jax.training.step import abstract_state, make_optimizer, make_train_step

MODEL = "answerdotai/ModernBERT-base"
POOLER = "avg"
TEXTS = 2  # of a train step
MOST_BYTES = 4 << 30
QUERIES = 512  # at once: the default of `TransformerConfig.most_queries`


def config_of(length: int) -> Config:
    """Return the configuration of the step: SimCSE on one device."""
    return Config.from_dict(
        {
            "model": {"name_or_path": MODEL, "pooler": POOLER, "projector": "none", "attention_dropout": (0.1,)},
            "difference": {"weight": 0.0},
            "data": {"max_length": length},
            "train": {"batch_size": TEXTS, "packing": "off"},
            "mesh": {"data": 1},
            "precision": "float32",
        }
    )


def measured(blocks: int, length: int, most_queries: int, repeats: int) -> dict[str, Any]:
    """Return the planned memory and the time for texts of this length."""
    mesh = make_mesh(config_of(length))
    config = resolved(config_of(length), mesh)
    checkpoint = workload.abstract_checkpoint(workload.sizes_of(MODEL) | {"num_hidden_layers": blocks}, MODEL)
    sizes = dataclasses.replace(checkpoint.config, most_queries=most_queries)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    network = partial(SentenceNetwork, sizes, POOLER)
    forward = compiled_forward(sizes, POOLER, jnp.dtype("float32"), mesh)
    encode = forward.lower(parameters.shapes(network), ids, ids).compile()
    seconds = []
    if encode.memory_analysis().temp_size_in_bytes < MOST_BYTES:
        params = jax.device_put(parameters.initial(network, jax.random.key(0)))
        text = jnp.full((1, length), 7, jnp.int32), jnp.ones((1, length), jnp.int32)
        for _ in range(repeats + 1):
            start = time.process_time()
            jax.block_until_ready(encode(params, *text))
            seconds.append(time.process_time() - start)
    built = build(config, dataclasses.replace(checkpoint, config=sizes), None, Vocabulary(sizes.vocab_size, None, ()))
    optimizer = make_optimizer(config.optim, SCHEDULE_STEPS)
    rows = jax.ShapeDtypeStruct((TEXTS, 2, length), jnp.int32)
    step = make_train_step(built.networks, config, optimizer, mesh)
    state = abstract_state(built.params, optimizer, config, mesh)
    plans = encode, step.lower(state, built.frozen, Batch(rows, rows)).compile()
    memory = [plan.memory_analysis().temp_size_in_bytes for plan in plans]
    return {"encode_bytes": memory[0], "step_bytes": memory[1], "encode_cpu_seconds": min(seconds[1:], default=None)}


def main(argv: list[str]) -> dict[str, Any]:
    """Measure as the command line says, print and write the record, and return it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=6, help="of ModernBERT-base's 22 (default: %(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--repeats", type=int, default=3, help="of encoding, after a first time (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file for the record")
    options = parser.parse_args(argv)
    rows = []
    for length in options.lengths:
        for most_queries in dict.fromkeys((QUERIES, max(QUERIES, length))):
            row = measured(options.blocks, length, most_queries, options.repeats)
            rows.append({"length": length, "most_queries": most_queries} | row)
            print(rows[-1], flush=True)
    record = {"blocks": options.blocks, "texts_of_a_step": TEXTS, "rows": rows}
    return measure.write_record(options.output, "benchmarks.long_texts", argv, record)


if __name__ == "__main__":
    with reported_to_user():
        main(sys.argv[1:])
