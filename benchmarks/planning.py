"""Estimate what a run costs before it starts: FLOPs, bytes, time and money by number of sentences.

    python -m benchmarks.planning --size base --share 0.4 --prices 2.5 1.2

Times are calculated, not measured: FLOPs divided by `--share` of the vendor's dense bfloat16 peak.
To find the share, run `benchmarks.train_step` on your device. It counts FLOPs in the same way: all
positions of padded sentences in training.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import workload
from benchmarks.flops import BatchSize, step_flops, transformer_flops
from benchmarks.measure import PEAK_FLOPS
from benchmarks.train_step import OBJECTIVES
from diffcse_jax.config import Config
from diffcse_jax.losses import PretrainedCheckpoints
from diffcse_jax.models import layers
from diffcse_jax.models.hf import Pretrained, transformer_config
from diffcse_jax.models.layers import Network
from diffcse_jax.models.transformer import Transformer

SENTENCES = (10**6, 10**8, 10**9)
TOKENS = 26.3  # per sentence, on average: English Wikipedia in word pieces, cut at 32
DEVICES = {"H100": "H100 80GB HBM3", "TPU v5e": "TPU v5 lite"}
MACHINES = {"1 H100": ("H100", 1), "8 H100": ("H100", 8), "TPU v5e-16": ("TPU v5e", 16)}


def training_flops(size: str, objective: str) -> float:
    """Return model FLOPs per sentence and epoch."""
    encoder, generator = (
        transformer_config(sizes[size], source=size)
        for sizes in (workload.ENCODERS, workload.GENERATORS)
    )
    batch = BatchSize(encoder, generator, examples=64, views=2, length=32, mean_tokens=TOKENS)
    # The number of examples matters only to the similarity matrix.
    return step_flops(Config.from_dict(OBJECTIVES[objective]), batch) / batch.examples


def encoding_flops(size: str) -> float:
    """Return model FLOPs of the embedding of a sentence, at its own length."""
    return transformer_flops(
        transformer_config(workload.ENCODERS[size], source=size), 1, round(TOKENS)
    )


def state_bytes(size: str, objective: str) -> int:
    """Return the bytes of trained parameters and Adam's two moments in float32.

    The projector is left out.
    """
    encoder = _without_weights(workload.ENCODERS[size], size)
    checkpoints = PretrainedCheckpoints(encoder, _without_weights(workload.GENERATORS[size], size))
    networks = {"encoder": Network(partial(Transformer, encoder.config))}
    config = Config.from_dict(OBJECTIVES[objective])
    for loss in config.losses.values():
        networks |= loss.networks(checkpoints, config.run_info)
    shapes = [layers.shapes(network.build) for network in networks.values() if not network.frozen]
    return 3 * 4 * sum(math.prod(shape.shape) for params in shapes for shape in params.values())


def _without_weights(hf_config: Mapping[str, Any], size: str) -> Pretrained:
    config = transformer_config(hf_config, source=size)
    return Pretrained(Path(size), hf_config, config, transformer={}, pooler=None, mlm_head=None)


def table(size: str, share: float, prices: Sequence[float]) -> str:
    """Return a table in Markdown, with a row for each kind of work and number of sentences.

    Args:
        size: One of `workload.ENCODERS`.
        share: The share of the peak that is reached.
        prices: Dollars for an hour of each of `DEVICES`. More devices take less time for the same
            money.
    """
    work = {f"train, {objective}": training_flops(size, objective) for objective in OBJECTIVES}
    work["embed"] = encoding_flops(size)
    hidden = transformer_config(workload.ENCODERS[size], source=size).hidden_size
    seconds_per_flop = {
        name: 1 / (PEAK_FLOPS[device]["bfloat16"] * share) for name, device in DEVICES.items()
    }
    headings = [
        "work",
        "sentences",
        "model FLOPs",
        "data",
        *MACHINES,
        *(f"{name}, cost" for name in DEVICES),
    ]
    lines = [_row(headings), "|---|" + "---:|" * (len(headings) - 1)]
    for name, flops in work.items():
        for sentences in SENTENCES:
            # Token ids of 16 bits and the end of each sentence; or float32 embeddings.
            data = sentences * (4 * hidden if name == "embed" else 2 * TOKENS + 8)
            total = sentences * flops
            times = (
                _duration(total * seconds_per_flop[device] / count)
                for device, count in MACHINES.values()
            )
            hours = (total * seconds / 3600 for seconds in seconds_per_flop.values())
            costs = (f"${price * hour:,.2f}" for price, hour in zip(prices, hours, strict=True))
            lines.append(
                _row(
                    [
                        name,
                        f"10^{round(math.log10(sentences))}",
                        f"{total:.1e}",
                        _bytes(data),
                        *times,
                        *costs,
                    ]
                )
            )
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _bytes(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def main(argv: list[str]) -> None:
    """Print the table and the size of the train state."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=workload.ENCODERS, default="base")
    parser.add_argument(
        "--share", type=float, default=1.0, help="share of the peak that is reached (default: 1)"
    )
    parser.add_argument(
        "--prices",
        type=float,
        nargs=len(DEVICES),
        required=True,
        metavar=("H100", "V5E"),
        help="dollars per device-hour",
    )
    options = parser.parse_args(argv)
    if not 0 < options.share <= 1:
        parser.error(f"--share: expected a number above 0 and up to 1, got {options.share}")
    print(table(options.size, options.share, options.prices))
    states = (
        f"{objective} {_bytes(state_bytes(options.size, objective))}" for objective in OBJECTIVES
    )
    print(f"\nTrain state (parameters and moments, float32): {', '.join(states)}.")


if __name__ == "__main__":
    main(sys.argv[1:])
