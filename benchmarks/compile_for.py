"""Compile the programs of the package for other machines, from shapes alone.

    python -m benchmarks.compile_for --target v5e:4x4 --config configs/diffcse_base.py --output FILE

Needs the TPU's compiler (`pip install -e '.[compile]'`), or JAX's CUDA plugin for `--target h100`.
Memory and collectives are those of the compiled program. **Cycles are the compiler's estimate**:
they rank variants of a program. They are not times.
"""

import argparse
import collections
import dataclasses
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import measure, topologies

topologies.prepare_environment()

import jax  # noqa: E402  after the environment
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from benchmarks import workload  # noqa: E402
from benchmarks.hlo import Array, Collective, Program  # noqa: E402
from benchmarks.train_step import SCHEDULE_STEPS  # noqa: E402
from diffcse_jax.apps.finetune.mixture import resting  # noqa: E402
from diffcse_jax.batch import (  # noqa: E402
    Batch,
    PackedLayout,
    Vocabulary,
)
from diffcse_jax.config import Config, configuration, read_overrides  # noqa: E402
from diffcse_jax.errors import ConfigError, reported_to_user  # noqa: E402
from diffcse_jax.models import layers  # noqa: E402
from diffcse_jax.models.forward import SentenceNetwork, compiled_forward  # noqa: E402
from diffcse_jax.models.hf import Pretrained  # noqa: E402
from diffcse_jax.models.layers import Network, Params  # noqa: E402
from diffcse_jax.models.sentence_folder import RecordedPooler  # noqa: E402
from diffcse_jax.training import networks  # noqa: E402
from diffcse_jax.training.generator import make_masked_lm_training  # noqa: E402
from diffcse_jax.training.networks import with_own_pooler  # noqa: E402
from diffcse_jax.training.optimizer import make_optimizer  # noqa: E402
from diffcse_jax.training.sharding import by_rules, make_mesh, replicated, resolved  # noqa: E402
from diffcse_jax.training.step import (  # noqa: E402
    abstract_state,
    make_train_step,
    root_key,
)

WHAT = ("step", "chunked", "encode", "generator_head")
CHUNK = 64  # sentences, for --what chunked if the configuration has no chunk size
# The compiler's error if memory is too small: what is required, and what is available.
OUT_OF_MEMORY = r"([\d.]+)([KMG])\)? (?:of|exceeds available HBM) \(?([\d.]+)([KMG])"


class Lowered(NamedTuple):
    """A program to compile, and what identifies the arrays that it moves."""

    lower: Callable[[], jax.stages.Lowered]
    params: Params  # trained, or those of the encoder
    rows: int  # of all views
    length: int
    hidden: frozenset[int]  # sizes of hidden states: the encoder's, and of its teachers


@dataclasses.dataclass(frozen=True)
class Request:
    """The configuration, the program of it to compile, and the shape of its batches."""

    config: Config
    what: str
    views: int
    real_tokens: float  # share of all positions, if padding is left out

    def with_batch(self, size: int) -> "Request":
        """Return the same request with another batch size."""
        train = dataclasses.replace(self.config.train, batch_size=size)
        generator = dataclasses.replace(self.config.generator, head_batch_size=size)
        return dataclasses.replace(
            self, config=dataclasses.replace(self.config, train=train, generator=generator)
        )

    @property
    def batch_size(self) -> int:
        """Examples, or sentences."""
        if self.what == "generator_head":
            return self.config.generator.head_batch_size
        return self.config.train.batch_size


def lowered(request: Request, mesh: Mesh) -> Lowered:
    """Return the program of a request for the devices of a mesh."""
    config = _with_classes(with_own_pooler(resolved(request.config, mesh), RecordedPooler()))
    encoder = _checkpoint(config.model.name_or_path, mesh)
    build = {"encode": _encoding, "generator_head": _head_step}.get(request.what, _step)
    return build(dataclasses.replace(request, config=config), encoder, mesh)


def _step(request: Request, encoder: Pretrained, mesh: Mesh) -> Lowered:
    config = request.config
    generator = None
    if config.needs("generator"):
        own = config.generator_is_start or config.trains_generator_head
        generator = _checkpoint(
            config.model.name_or_path if own else config.generator.name_or_path, mesh
        )
    teachers = _teachers(config, mesh)
    built = networks.build(config, encoder, generator, _vocabulary(encoder), teachers=teachers)
    optimizer = make_optimizer(
        config.optim, SCHEDULE_STEPS, around=resting if "finetune" in config.losses else None
    )
    state = abstract_state(built.params, optimizer, config, mesh)
    frozen = jax.tree.map(_abstract, built.frozen, by_rules(built.frozen, mesh, config))
    step = make_train_step(built.networks, config, optimizer, mesh)
    root = _abstract(jax.eval_shape(lambda: root_key(config)), replicated(mesh))
    views = _views(request, mesh, request.views)._replace(labels=_labels(request, mesh))
    return Lowered(
        lambda: step.lower(state, frozen, views, root),
        built.params,
        config.train.batch_size * request.views,
        config.data.max_length,
        frozenset(
            {encoder.config.hidden_size, *(_hidden_size(teacher) for teacher in teachers.values())}
        ),
    )


def _head_step(request: Request, encoder: Pretrained, mesh: Mesh) -> Lowered:
    config = request.config
    initial, _, step = make_masked_lm_training(config, encoder.config, _vocabulary(encoder), mesh)
    params, opt_state = jax.eval_shape(initial)
    everywhere = replicated(mesh)
    params, opt_state, frozen, key, index = (
        jax.tree.map(lambda array: _abstract(array, everywhere), tree)
        for tree in (
            params,
            opt_state,
            layers.prefixed(encoder.transformer, "transformer"),
            jax.eval_shape(lambda: root_key(config)),
            jax.ShapeDtypeStruct((), jnp.int32),
        )
    )
    views = _views(request, mesh, 1)
    return Lowered(
        lambda: step.lower(params, opt_state, frozen, views, key, index),
        params,
        request.batch_size,
        config.data.max_length,
        frozenset({encoder.config.hidden_size}),
    )


def _encoding(request: Request, encoder: Pretrained, mesh: Mesh) -> Lowered:
    config = request.config
    # Another pooler differs only in its head, which is small.
    pooler = "cls_before_pooler" if config.encoding_pooler == "cls" else config.encoding_pooler
    forward = compiled_forward(encoder.config, pooler, jnp.dtype(config.precision), mesh)
    params = layers.prefixed(encoder.transformer, "transformer")
    params = {name: _abstract(array, replicated(mesh)) for name, array in params.items()}
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shape = (config.train.batch_size, config.data.max_length)
    batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)
    return Lowered(
        lambda: forward.lower(params, batch, batch),
        params,
        *shape,
        frozenset({encoder.config.hidden_size}),
    )


def _checkpoint(name: str, mesh: Mesh) -> Pretrained:
    checkpoint = workload.abstract_checkpoint(workload.sizes_of(name), source=name)
    return checkpoint.on(mesh.devices.flat[0], mesh.shape["data"])


def _teachers(config: Config, mesh: Mesh) -> dict[str, Network]:
    teachers = {}
    for objective in config.losses.values():
        for name, pooler in objective.named_teachers.items():
            teacher = _checkpoint(name, mesh)
            params = layers.prefixed(teacher.transformer, "transformer")
            build = partial(SentenceNetwork, teacher.config, pooler or "cls_before_pooler")
            teachers[name] = Network(build, params, frozen=True)
    return teachers


def _hidden_size(teacher: Network) -> int:
    return teacher.params["transformer.blocks.0.attention.query.kernel"].shape[0]


def _vocabulary(encoder: Pretrained) -> Vocabulary:
    """Return a vocabulary of the right size. The ids of special tokens do not change a program."""
    return Vocabulary(
        encoder.config.vocab_size, workload.MASK, (workload.PAD, workload.CLS, workload.SEP)
    )


def _views(request: Request, mesh: Mesh, views: int) -> Batch:
    """Return a batch of full length.

    If padding is left out, its layouts have the share of real tokens.
    """
    config, length = request.config, request.config.data.max_length
    sharding = NamedSharding(mesh, PartitionSpec("data"))

    def placed(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

    def layout(rows: int) -> PackedLayout:
        chunks = 1 if request.what == "generator_head" else config.train.chunks
        blocks = mesh.shape["data"] * chunks
        positions = rows * length // blocks
        return PackedLayout(
            placed(blocks, math.ceil(positions * request.real_tokens)), placed(blocks, positions)
        )

    size = request.batch_size
    ids = placed(size, views, length)
    if config.train.packing != "on" or request.real_tokens == 1.0:
        return Batch(ids, ids)
    return Batch(ids, ids, layout(size * views), layout(size))


def _with_classes(config: Config) -> Config:
    """Give tasks without named classes two of them, so that the head's last layer has a size."""
    tasks = config.finetune.tasks
    nameless = [
        name for name, task in tasks.items() if task.kind == "classification" and not task.labels
    ]
    settings = config.to_dict()
    for name in nameless:
        settings["finetune"]["tasks"][name]["labels"] = ("0", "1")
    return Config.from_dict(settings)


def _labels(request: Request, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct] | None:
    """Return the labels of a batch of fine-tuning.

    They are those of the first task with this many sentences per example.
    """
    config = request.config
    if "finetune" not in config.losses:
        return None
    tasks = config.finetune.tasks
    name = next((name for name, task in tasks.items() if len(task.texts) == request.views), None)
    if name is None:
        raise ConfigError(
            f"--views {request.views}: no task in finetune.tasks has examples of this many "
            "sentences"
        )
    dtype = jnp.float32 if tasks[name].kind == "regression" else jnp.int32
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return {name: jax.ShapeDtypeStruct((request.batch_size,), dtype, sharding=sharding)}


def _abstract(array: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def compiled(
    request: Request, target: topologies.Target, *, text: Path | None = None
) -> dict[str, Any]:
    """Compile a program and return its record.

    Args:
        request: The program.
        target: The machine.
        text: A file for the compiled program.
    """
    mesh = make_mesh(request.config, target.devices)
    program = lowered(request, mesh)
    start = time.perf_counter()
    try:
        executable = program.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        used = re.search(OUT_OF_MEMORY, str(error))
        if used is None:
            raise
        total, available = (
            float(used[at]) * 2.0 ** {"K": 10, "M": 20, "G": 30}[used[at + 1]] for at in (1, 3)
        )
        memory = {"total": int(total), "available": int(available)}
        return {
            "compile_seconds": time.perf_counter() - start,
            "memory_per_chip": memory,
            "fits": False,
        }
    seconds = time.perf_counter() - start
    if text:
        text.write_text(executable.as_text())
    read = Program(executable.as_text())
    memory = _memory(executable, target)
    by_category = read.cycles()
    return {
        "trained_parameters": sum(math.prod(array.shape) for array in program.params.values()),
        "compile_seconds": seconds,
        "memory_per_chip": memory,
        "fits": memory["total"] <= memory["available"],
        "collectives": summed(read.collectives(), program, mesh),
        "flops": (executable.cost_analysis() or {}).get("flops"),  # not known without the GPU
        "estimated_cycles": {"total": sum(by_category.values()), "by_category": by_category},
        "dearest": read.dearest(5),
    }


def _memory(executable: jax.stages.Compiled, target: topologies.Target) -> dict[str, int]:
    plan = executable.memory_analysis()
    results = plan.output_size_in_bytes - plan.alias_size_in_bytes
    parts = {
        "arguments": plan.argument_size_in_bytes,
        "results": results,
        "temporaries": plan.temp_size_in_bytes,
        "program": plan.generated_code_size_in_bytes,
    }
    return parts | {"total": sum(parts.values()), "available": target.chip.memory_bytes}


def summed(collectives: Iterable[Collective], program: Lowered, mesh: Mesh) -> list[dict[str, Any]]:
    """Count the collectives by kind and content, with the bytes of whole arrays."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    moved: collections.Counter[tuple[str, str]] = collections.Counter()
    for collective in collectives:
        arrays = collective.source or collective.arrays
        carried = {carries(array, collective, program, mesh) for array in arrays}
        key = collective.kind, " and ".join(sorted(carried))
        counts[key] += collective.times
        moved[key] += collective.bytes
    return [
        {"kind": kind, "carries": what, "count": counts[kind, what], "bytes": size}
        for (kind, what), size in moved.most_common()
    ]


def carries(array: Array, collective: Collective, program: Lowered, mesh: Mesh) -> str:
    """Return the content of a collective (gradients, tokens, ...).

    It follows from the type, the size and the pass of its array.
    """
    size = math.prod(array.sizes)
    rows, hidden = program.rows, program.hidden
    if array.dtype.startswith(("s", "u", "pred")):
        return "tokens" if size >= rows * program.length / mesh.size else "counts"
    if size in _sizes(program.params, mesh) and (
        len(array.sizes) > 1 or "transpose" in collective.op_name
    ):
        return "parameters" if collective.kind == "all-gather" else "gradients"
    if array.sizes and array.sizes[-1] in hidden and size <= rows * array.sizes[-1]:
        return "sentence vectors"
    if size >= rows * program.length * min(hidden) / mesh.size:
        return "activations"
    return "statistics" if size <= 4 * max(hidden) else "similarities"


def _sizes(params: Params, mesh: Mesh) -> set[int]:
    """Return the numbers of elements of parameters and of their parts on the mesh."""
    sizes = {math.prod(array.shape) for array in params.values()}
    parts = {1, mesh.size, *mesh.shape.values()}
    return {size // part for size in sizes for part in parts}


def largest_batch(
    request: Request, target: topologies.Target, *, report: Callable[[str], None]
) -> dict[str, Any]:
    """Double the batch size until it does not fit, and return the largest that does."""
    size, fitting = request.batch_size, None
    while True:
        record = compiled(request.with_batch(size), target)
        total = record["memory_per_chip"]["total"]
        report(
            f"batch {size:,}: {_gigabytes(total)} per chip, "
            f"{'fits' if record['fits'] else 'does not fit'}"
        )
        if not record["fits"]:
            return {"fits": fitting, "does_not": size}
        fitting = size
        size *= 2


def described(record: dict[str, Any]) -> str:
    """Describe a record as text."""
    memory = record["memory_per_chip"]
    lines = [
        f"{record['what']} of {record['config']}, batch {record['batch_size']:,}, for "
        f"{record['target']} ({record['chips']} x {record['chip']}), {record['precision']}",
        f"compiled in {record['compile_seconds']:.0f} s",
        f"memory per chip: {_gigabytes(memory['total'])} of {_gigabytes(memory['available'])}"
        f"{'' if record['fits'] else ': does not fit'}",
    ]
    if "largest_batch" in record:
        largest = record["largest_batch"]
        lines.append(f"largest batch that fits: {largest['fits']}; {largest['does_not']} does not")
    if "collectives" in record:
        lines += (
            ["collectives, bytes of the whole arrays:"]
            if record["collectives"]
            else ["no collectives"]
        )
        lines += [
            f"  {entry['kind']:<18} {entry['count']:>4} x {entry['carries']:<40} "
            f"{entry['bytes']:>14,}"
            for entry in record["collectives"]
        ]
        if record["flops"]:
            lines.append(
                f"FLOPs per chip: {record['flops']:.3g} (the compiler counts one branch of a "
                "conditional)"
            )
        lines += _cycles(record)
    return "\n".join(lines)


def _cycles(record: dict[str, Any]) -> list[str]:
    cycles = record["estimated_cycles"]
    total = cycles["total"]
    if not total:
        return ["the compiler estimates no cycles for this machine"]
    lines = [f"cycles, estimated by the compiler: {total:,}"]
    lines += [
        f"  {count:>12,} {count / total:6.1%}  {name}"
        for name, count in cycles["by_category"].items()
    ]
    lines.append("dearest operations:")
    lines += [
        f"  {entry['cycles']:>12,} {entry['times']:>4} x {entry['result']}  "
        f"{entry['operation'][-80:]}"
        for entry in record["dearest"]
    ]
    return lines


def _gigabytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read the command line: options, and overrides of the configuration."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target", required=True, help="v5e:2x2, v5e:4x4, v5p:2x2x1, v6e:1x1, ... or h100"
    )
    parser.add_argument(
        "--config", required=True, help="a file such as those in configs/, or its name"
    )
    parser.add_argument(
        "--what", choices=WHAT, default="step", help="the program (default: %(default)s)"
    )
    parser.add_argument(
        "--batch", type=int, help="train.batch_size, in place of the configuration's"
    )
    parser.add_argument(
        "--views",
        type=int,
        default=2,
        help="per example: 3 with hard negatives, 1 or 2 for fine-tuning (default: 2)",
    )
    parser.add_argument(
        "--real_tokens",
        type=float,
        default=1.0,
        help="share of real positions, if train.packing is on "
        "(default: all, as in the fullest batches)",
    )
    parser.add_argument(
        "--largest", action="store_true", help="also find the largest batch that fits"
    )
    parser.add_argument("--text", type=Path, help="a file for the compiled program")
    parser.add_argument(
        "--output", type=Path, help="JSON file for the record (default: only print a description)"
    )
    options, rest = parser.parse_known_args(argv)
    for argument in rest:
        if not argument.startswith("--config."):
            parser.error(f"unknown argument {argument}; overrides are written --config.KEY=VALUE")
    if options.batch is not None and options.batch < 2:
        parser.error(f"--batch: at least 2, got {options.batch}")
    if not 0 < options.real_tokens <= 1:
        parser.error(
            f"--real_tokens: expected a share above 0 and up to 1, got {options.real_tokens}"
        )
    return options, rest


def read_config(options: argparse.Namespace, overrides: list[str]) -> Config:
    """Return the configuration of the command line."""
    _, config = configuration(options.config, read_overrides(overrides))
    settings = config.to_dict()
    if options.what == "generator_head":
        settings["generator"]["name_or_path"] = ""
    if options.batch:
        settings["train"]["batch_size"] = options.batch
        settings["generator"]["head_batch_size"] = options.batch
    if options.what == "chunked" and not settings["train"]["chunk_size"]:
        settings["train"]["chunk_size"] = min(CHUNK, settings["train"]["batch_size"])
    return Config.from_dict(settings)


def main(argv: list[str]) -> dict[str, Any]:
    """Compile as the command line says, print and write the record, and return it."""
    options, overrides = parse(argv)
    target = topologies.find(options.target)
    request = Request(
        read_config(options, overrides), options.what, options.views, options.real_tokens
    )
    precision = resolved(request.config, make_mesh(request.config, target.devices)).precision
    record: dict[str, Any] = {
        "target": target.name,
        "chip": target.chip.kind,
        "chips": len(target.devices),
        "config": Path(options.config).stem,
        "overrides": overrides,
        "what": options.what,
        "batch_size": request.batch_size,
        "length": request.config.data.max_length,
        "precision": precision,
    }
    record |= compiled(request, target, text=options.text)
    if options.largest:
        record["largest_batch"] = largest_batch(
            request, target, report=lambda line: print(line, flush=True)
        )
    print(described(record))
    if options.output:
        measure.write_record(options.output, "benchmarks.compile_for", argv, record)
    return record


if __name__ == "__main__":
    with reported_to_user():
        main(sys.argv[1:])
