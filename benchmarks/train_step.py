r"""Compare the train step with the same step in PyTorch.

    python -m benchmarks.train_step --objective simcse --torch eager compile \
        --output benchmarks/results/NAME.json

Weights are random and sentences synthetic, so no other files are needed. `--text FILE` takes real
sentences, with MiniLM's tokenizer.
"""

import argparse
import contextlib
import dataclasses
import itertools
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import measure, workload
from benchmarks.flops import BatchSize, step_flops
from benchmarks.measure import Implementation
from diffcse_jax.batch import Batch
from diffcse_jax.config import Config
from diffcse_jax.data.batches import BatchSource, Packing
from diffcse_jax.errors import reported_to_user
from diffcse_jax.models.hf import transformer_config
from diffcse_jax.training.networks import build
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.sharding import make_mesh, replicated, resolved, shard_batch
from diffcse_jax.training.step import initial_state, make_train_step, root_key

SCHEDULE_STEPS = 10_000  # of the learning rate; any number works

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
    """The settings of a measurement, from which a worker builds its side."""

    size: str
    objective: str
    length: int
    batch_size: int
    precision: str
    chunk_size: int = 0
    packing: str = "auto"
    recompute: str = "auto"
    text: Path | None = None
    distinct_batches: int = 8

    def config(self) -> Config:
        """Return the configuration that both sides read."""
        train = {
            name: getattr(self, name)
            for name in ("batch_size", "chunk_size", "packing", "recompute")
        }
        return Config.from_dict(
            {
                **OBJECTIVES[self.objective],
                "train": train,
                "mesh": {"data": 1},
                "precision": self.precision,
            }
        )

    def batches(self, packing: Packing | None = None) -> list[Batch]:
        """Return the batches that both sides repeat, as training makes them."""
        sentences = self.distinct_batches * self.batch_size
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "store"
            if self.text:
                store = workload.text_store(self.text, folder, sentences, self.length)
            else:
                store = workload.synthetic_store(self.size, folder, sentences, self.length)
            source = BatchSource(
                store,
                batch_size=self.batch_size,
                steps=self.distinct_batches,
                seed=0,
                pad_token_id=workload.PAD,
                packing=packing,
            )
            return [source[index] for index in range(len(source))]


class OurStep:
    """The JAX step. It includes moving the batch to the device, as in training."""

    def __init__(self, settings: Settings):
        self.mesh = make_mesh(settings.config())
        config = resolved(settings.config(), self.mesh)
        encoder = workload.random_checkpoint(workload.ENCODERS[settings.size], seed=0)
        generator = workload.random_checkpoint(workload.GENERATORS[settings.size], seed=1)
        built = build(config, encoder, generator, workload.vocabulary(settings.size))
        optimizer = make_optimizer(config.optim, SCHEDULE_STEPS)
        self.state = initial_state(built.params, optimizer, config, self.mesh)
        self.frozen = jax.device_put(built.frozen, replicated(self.mesh))
        self.root = root_key(config)
        self.train_step = make_train_step(built.networks, config, optimizer, self.mesh)
        packing = Packing(config.train.chunks, anchors=config.needs("anchors"))
        self.batches = settings.batches(packing if config.train.packing == "on" else None)
        self.turns = itertools.cycle(self.batches)
        self.compiled = {}
        self.metrics = None

    def compile(self, batches: list[Batch]) -> None:
        """Compile the step for the shapes of these batches."""
        for shape, views in {_shapes(views): views for views in batches}.items():
            placed = shard_batch(views, self.mesh)
            lowered = self.train_step.lower(self.state, self.frozen, placed, self.root)
            self.compiled[shape] = lowered.compile()

    def step(self) -> None:
        """Start a step. The first one compiles."""
        if not self.compiled:
            self.compile(self.batches)
        views = next(self.turns)
        program = self.compiled[_shapes(views)]
        placed = shard_batch(views, self.mesh)
        self.state, self.metrics = program(self.state, self.frozen, placed, self.root)

    def wait(self) -> None:
        """Wait until all steps have finished."""
        jax.block_until_ready((self.state, self.metrics))

    def plan(self) -> dict[str, Any]:
        """Return the device, and the planned memory of the step of the largest batch.

        The step is not run.
        """
        largest = max(self.batches, key=_computed_tokens)
        if _shapes(largest) not in self.compiled:
            self.compile([largest])
        plan = self.compiled[_shapes(largest)].memory_analysis()
        results = plan.output_size_in_bytes - plan.alias_size_in_bytes
        return {
            "device": self.mesh.devices.flat[0].device_kind,
            "computed_tokens": sorted({_computed_tokens(views) for views in self.batches}),
            "planned_memory_bytes": plan.argument_size_in_bytes + results + plan.temp_size_in_bytes,
        }

    def facts(self) -> dict[str, Any]:
        """Return other values to record."""
        peak = (self.mesh.devices.flat[0].memory_stats() or {}).get("peak_bytes_in_use")
        return {"loss": float(self.metrics["loss"]), "peak_memory_bytes": peak} | self.plan()


def _shapes(views: Batch) -> Batch:
    """Return the shapes of a batch's arrays. The step is compiled for each."""
    return jax.tree.map(np.shape, views)


def _computed_tokens(views: Batch) -> int:
    """Return the number of tokens that the networks compute.

    Without a layout, it includes padding.
    """
    return views.layout.positions.size if views.layout else views.input_ids.size


def ours(settings: Settings) -> Implementation:
    """Build the JAX step in a worker."""
    side = OurStep(settings)
    return Implementation(side.step, side.wait, side.facts)


def planned(settings: Settings) -> dict[str, Any]:
    """Return the record of a step that is compiled but not run."""
    plan = OurStep(settings).plan()
    return {
        "device": plan.pop("device"),
        "settings": recorded(settings),
        "implementations": {"ours": plan},
    }


def twin(settings: Settings, compiled: bool) -> Implementation:
    """Build the PyTorch step under the same conditions."""
    import torch

    from benchmarks import torch_twin

    torch.manual_seed(0)
    config = settings.config()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    encoder = torch_twin.random_encoder(workload.ENCODERS[settings.size])
    generator = None
    if config.needs("generator"):
        generator = torch_twin.random_generator(workload.GENERATORS[settings.size])
    vocabulary = workload.vocabulary(settings.size)
    networks = torch_twin.Twin(config, encoder, generator, vocabulary).to(device)
    train_step = torch_twin.make_step(networks, config, SCHEDULE_STEPS, compiled=compiled)
    batches = itertools.cycle(settings.batches())
    loss = torch.zeros(())

    def step() -> None:
        nonlocal loss
        anchors = next(batches).anchors
        # Eager batches are padded to the longest sentence, as the authors' are; compiled ones are
        # padded like ours.
        longest = None if compiled else anchors.attention_mask.sum(axis=-1).max()
        rows = (values[:, :longest] for values in (anchors.input_ids, anchors.attention_mask))
        loss = train_step(
            *(torch.tensor(values, dtype=torch.long, device=device) for values in rows)
        )

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
    """Return the record of a comparison.

    Args:
        settings: The settings of the measurement.
        against: PyTorch variants, `eager` or `compile`.
        steps: Timed steps of each side.
        block: Steps per turn.
    """
    batches = settings.batches()
    flops = statistics.mean(_flops(settings, views) for views in batches)
    with contextlib.ExitStack() as stack:
        workers = {"ours": stack.enter_context(measure.worker(ours, settings))}
        for variant in against:
            workers[f"torch_{variant}"] = stack.enter_context(
                measure.worker(twin, settings, variant == "compile")
            )
        seconds = measure.alternate(workers, steps=steps, block=block)
        sides = {
            name: measure.summary(seconds[name], side.first_call, settings.batch_size)
            | side.finish()
            for name, side in workers.items()
        }
    device = sides["ours"].pop("device")
    for side in sides.values():
        side["flops_per_second"] = flops / side["step_seconds"]["median"]
        side["share_of_peak"] = measure.share_of_peak(
            side["flops_per_second"], device, settings.precision
        )
    return {
        "device": device,
        "settings": recorded(settings),
        "mean_tokens": statistics.mean(map(_mean_tokens, batches)),
        "step_flops": flops,
        "implementations": sides,
        "ratios": measure.ratios(sides),
    }


def _flops(settings: Settings, views: Batch) -> float:
    encoder, generator = (
        transformer_config(sizes[settings.size], source=settings.size)
        for sizes in (workload.ENCODERS, workload.GENERATORS)
    )
    shape = views.input_ids.shape  # (examples, views, length)
    return step_flops(settings.config(), BatchSize(encoder, generator, *shape, _mean_tokens(views)))


def _mean_tokens(views: Batch) -> float:
    return float(views.attention_mask.sum(axis=-1).mean())


def recorded(settings: Settings) -> dict[str, Any]:
    """Return the settings for a record."""
    return dataclasses.asdict(settings) | {"text": settings.text and settings.text.name}


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=workload.ENCODERS, default="minilm")
    parser.add_argument("--objective", choices=OBJECTIVES, default="simcse")
    parser.add_argument(
        "--length", type=int, default=32, help="positions per sentence (default: %(default)s)"
    )
    parser.add_argument(
        "--batch_size", type=int, default=64, help="sentences per step (default: %(default)s)"
    )
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--chunk_size", type=int, default=0, help="train.chunk_size of our side; 0: the plain step"
    )
    for name in ("packing", "recompute"):
        parser.add_argument(
            f"--{name}",
            choices=("auto", "on", "off"),
            default="auto",
            help=f"train.{name} of our side",
        )
    parser.add_argument("--text", type=Path, help="a file of real sentences, one per line")
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        help="timed steps of each side; 0: only compile ours (default: %(default)s)",
    )
    parser.add_argument(
        "--block", type=int, default=2, help="steps per turn (default: %(default)s)"
    )
    parser.add_argument(
        "--torch",
        nargs="+",
        choices=("eager", "compile", "none"),
        default=["eager"],
        help="what to compare with",
    )
    parser.add_argument("--threads", type=int, default=0, help="number of cores; 0: all")
    parser.add_argument("--output", type=Path, help="JSON file for the record (default: print it)")
    args = parser.parse_args(argv)
    if args.text and args.size == "tiny":
        parser.error("--text gives tokens of BERT's vocabulary, which --size tiny does not have")
    if args.steps < 0 or args.block < 1:
        parser.error("--steps must be at least 0 and --block at least 1")
    if args.length > workload.MAX_LENGTH:
        parser.error(f"--length: the models have {workload.MAX_LENGTH} positions")
    if "none" in args.torch and len(args.torch) > 1:
        parser.error("--torch none cannot be combined with others")
    return args


def main(argv: list[str]) -> dict[str, Any]:
    """Measure as the command line says, write the record and return it."""
    args = parse(argv)
    measure.use_cores(args.threads)
    settings = Settings(
        size=args.size,
        objective=args.objective,
        length=args.length,
        batch_size=args.batch_size,
        precision=args.precision,
        chunk_size=args.chunk_size,
        packing=args.packing,
        recompute=args.recompute,
        text=args.text,
    )
    against = [variant for variant in args.torch if variant != "none"]
    record = (
        measured(settings, against, steps=args.steps, block=args.block)
        if args.steps
        else planned(settings)
    )
    return measure.write_record(args.output, "benchmarks.train_step", argv, record)


if __name__ == "__main__":
    with reported_to_user():
        main(sys.argv[1:])
