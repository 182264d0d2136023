"""The train step against its PyTorch twin.

    python -m benchmarks.train_step --objective simcse --torch eager compile --output benchmarks/results/NAME.json

Random weights, synthetic sentences: nothing is read but this repository. `--text FILE` takes real sentences, in
MiniLM's tokens.
"""

import argparse
import contextlib
import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import measure, workload
from benchmarks.flops import step_flops
from benchmarks.measure import Implementation
from diffcse_jax.config import Config
from diffcse_jax.errors import reported_to_user
from diffcse_jax.models.pretrained import transformer_config
from diffcse_jax.training.networks import build
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.rows import real_share
from diffcse_jax.training.sharding import make_mesh, replicated, shard_batch
from diffcse_jax.training.step import initial_state, make_train_step

SCHEDULE_STEPS = 10_000  # of the learning rate; any number does

SIMCSE = {"model": {"projector": "mlp"}, "difference": {"weight": 0.0}}
OBJECTIVES: dict[str, dict[str, dict[str, Any]]] = {
    "simcse": SIMCSE,
    "simcsepp": {
        **SIMCSE,
        "contrast": {"negatives": "off_dropout", "negative_ratio": 0.9},
        "dcl": {"weight": 0.1, "temperature": 5.0},
    },
    "diffcse": {},
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured; all that a worker needs to build its side."""

    size: str
    objective: str
    length: int
    batch_size: int
    precision: str
    chunk_size: int = 0
    text: Path | None = None
    distinct_batches: int = 8

    def config(self) -> Config:
        """The configuration that both sides read."""
        train = {"batch_size": self.batch_size} | ({"chunk_size": self.chunk_size} if self.chunk_size else {})
        return Config.from_dict(
            {**OBJECTIVES[self.objective], "train": train, "mesh": {"data": 1}, "precision": self.precision}
        )

    def batches(self) -> list[workload.Batch]:
        """The batches that both sides step through, again and again."""
        shape = (self.distinct_batches, self.batch_size, self.length)
        return workload.text_batches(self.text, *shape) if self.text else workload.synthetic_batches(self.size, *shape)


class OurStep:
    """The JAX step. Moving the batch to the device is part of it, as in training."""

    def __init__(self, settings: Settings):
        config = settings.config()
        self.mesh = make_mesh(config)
        encoder = workload.random_checkpoint(workload.ENCODERS[settings.size], seed=0)
        generator = workload.random_checkpoint(workload.GENERATORS[settings.size], seed=1)
        networks, params, batch_stats, frozen = build(config, encoder, generator, workload.vocabulary(settings.size))
        optimizer = make_optimizer(config.optim, SCHEDULE_STEPS)
        self.state = initial_state(params, batch_stats, optimizer, config, self.mesh)
        self.frozen = jax.device_put(frozen, replicated(self.mesh))
        self.train_step = make_train_step(networks, config, optimizer, self.mesh)
        self.batches = [(batch, self._share_of(batch, settings)) for batch in settings.batches()]
        self.shares = sorted({share for _, share in self.batches})
        self.turns = itertools.cycle(self.batches)
        self.compiled = {}
        self.metrics = None

    @staticmethod
    def _share_of(batch: workload.Batch, settings: Settings) -> float:
        return real_share(batch["attention_mask"].sum(axis=-1), settings.length, settings.chunk_size)

    def compile(self) -> None:
        """Compiles the step for all batches."""
        arguments = self.state, self.frozen, shard_batch(self.batches[0][0], self.mesh)
        self.compiled = {share: self.train_step.lower(*arguments, share).compile() for share in self.shares}

    def step(self) -> None:
        """Starts a step; the first one compiles."""
        if not self.compiled:
            self.compile()
        batch, share = next(self.turns)
        self.state, self.metrics = self.compiled[share](self.state, self.frozen, shard_batch(batch, self.mesh))

    def wait(self) -> None:
        """Returns when all steps are done."""
        jax.block_until_ready((self.state, self.metrics))

    def plan(self) -> dict[str, Any]:
        """What is known of the compiled step without running it."""
        plan = self.compiled[self.shares[-1]].memory_analysis()
        results = plan.output_size_in_bytes - plan.alias_size_in_bytes
        return {
            "device": self.mesh.devices.flat[0].device_kind,
            "real_shares": self.shares,
            "planned_memory_bytes": plan.argument_size_in_bytes + results + plan.temp_size_in_bytes,
        }

    def facts(self) -> dict[str, Any]:
        """What else to record."""
        peak = (self.mesh.devices.flat[0].memory_stats() or {}).get("peak_bytes_in_use")
        return {"loss": float(self.metrics["loss"]), "peak_memory_bytes": peak} | self.plan()


def ours(settings: Settings) -> Implementation:
    """The JAX step for a worker."""
    side = OurStep(settings)
    return Implementation(side.step, side.wait, side.facts)


def planned(settings: Settings) -> dict[str, Any]:
    """The record of a step that is compiled and not run: what it would take."""
    side = OurStep(settings)
    side.compile()
    plan = side.plan()
    return {"device": plan.pop("device"), "settings": _recorded(settings), "implementations": {"ours": plan}}


def twin(settings: Settings, compiled: bool) -> Implementation:
    """The PyTorch step, under the same conditions."""
    import torch

    from benchmarks import torch_twin

    torch.manual_seed(0)
    config = settings.config()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    networks = torch_twin.Twin(
        config,
        workload.ENCODERS[settings.size],
        workload.GENERATORS[settings.size],
        workload.vocabulary(settings.size),
    ).to(device)
    train_step = torch_twin.make_step(networks, config, SCHEDULE_STEPS, compiled=compiled)
    batches = itertools.cycle(settings.batches())
    loss = torch.zeros(())

    def step() -> None:
        nonlocal loss
        batch = next(batches)
        # Padded to the longest sentence, as the authors' batches; compiled, to one length: each is compiled anew.
        longest = settings.length if compiled else batch["attention_mask"].sum(axis=-1).max()
        rows = (batch[name][:, 0, :longest] for name in ("input_ids", "attention_mask"))
        loss = train_step(*(torch.from_numpy(values).to(device).long() for values in rows))

    on_gpu = device.type == "cuda"
    return Implementation(
        step,
        torch.cuda.synchronize if on_gpu else lambda: None,
        lambda: {
            "loss": loss.item(),
            "threads": torch.get_num_threads(),
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        },
    )


def measured(settings: Settings, against: list[str], *, steps: int, block: int) -> dict[str, Any]:
    """The record of a comparison.

    Args:
        settings: what is measured.
        against: PyTorch variants, `eager` or `compile`.
        steps: timed steps of each side.
        block: steps per turn.
    """
    config = settings.config()
    tokens = [batch["attention_mask"].sum(axis=-1) for batch in settings.batches()]
    mean_tokens = float(np.mean(tokens))
    flops = step_flops(
        config,
        transformer_config(workload.ENCODERS[settings.size], source=settings.size),
        transformer_config(workload.GENERATORS[settings.size], source=settings.size),
        batch_size=settings.batch_size,
        length=settings.length,
        mean_tokens=mean_tokens,
    )
    with contextlib.ExitStack() as stack:
        workers = {"ours": stack.enter_context(measure.worker(ours, settings))}
        for variant in against:
            workers[f"torch_{variant}"] = stack.enter_context(measure.worker(twin, settings, variant == "compile"))
        seconds = measure.alternate(workers, steps=steps, block=block)
        sides = {
            name: measure.summary(seconds[name], side.first_call, settings.batch_size) | side.finish()
            for name, side in workers.items()
        }
    device = sides["ours"].pop("device")
    for side in sides.values():
        side["flops_per_second"] = flops / side["step_seconds"]["median"]
        side["share_of_peak"] = measure.share_of_peak(side["flops_per_second"], device, settings.precision)
    return {
        "device": device,
        "settings": _recorded(settings),
        "mean_tokens": mean_tokens,
        "step_flops": flops,
        "implementations": sides,
        "ratios": measure.ratios(sides),
    }


def _recorded(settings: Settings) -> dict[str, Any]:
    return dataclasses.asdict(settings) | {"text": settings.text and settings.text.name}


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=workload.ENCODERS, default="minilm")
    parser.add_argument("--objective", choices=OBJECTIVES, default="simcse")
    parser.add_argument("--length", type=int, default=32, help="positions per sentence (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=64, help="sentences per step (default: %(default)s)")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--chunk_size", type=int, default=0, help="train.chunk_size of our side; 0: the plain step")
    parser.add_argument("--text", type=Path, help="a file of real sentences, one a line")
    parser.add_argument(
        "--steps", type=int, default=20, help="timed steps of each side; 0: only compile ours (default: %(default)s)"
    )
    parser.add_argument("--block", type=int, default=2, help="steps per turn (default: %(default)s)")
    parser.add_argument(
        "--torch", nargs="+", choices=("eager", "compile", "none"), default=["eager"], help="what to compare with"
    )
    parser.add_argument("--threads", type=int, default=0, help="cores to use; 0: all")
    parser.add_argument("--output", type=Path, help="JSON file; without it the record is printed")
    args = parser.parse_args(argv)
    if args.text and args.size == "tiny":
        parser.error("--text gives tokens of BERT's vocabulary, which --size tiny does not have")
    if args.steps < 0 or args.block < 1:
        parser.error("--steps must be at least 0 and --block at least 1")
    if args.length > workload.MAX_LENGTH:
        parser.error(f"--length: the models have {workload.MAX_LENGTH} positions")
    if args.chunk_size and args.batch_size % args.chunk_size:
        parser.error(f"--chunk_size {args.chunk_size} does not divide --batch_size {args.batch_size}")
    if "none" in args.torch and len(args.torch) > 1:
        parser.error("--torch: none stands alone")
    return args


def main(argv: list[str]) -> dict[str, Any]:
    """Measures what the command line says and writes the record, which is also returned."""
    args = parse(argv)
    measure.use_cores(args.threads)
    settings = Settings(
        size=args.size,
        objective=args.objective,
        length=args.length,
        batch_size=args.batch_size,
        precision=args.precision,
        chunk_size=args.chunk_size,
        text=args.text,
    )
    against = [variant for variant in args.torch if variant != "none"]
    record = measured(settings, against, steps=args.steps, block=args.block) if args.steps else planned(settings)
    return measure.write_record(args.output, "benchmarks.train_step", argv, record)


if __name__ == "__main__":
    with reported_to_user():
        main(sys.argv[1:])
