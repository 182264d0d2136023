"""Read compiled programs from XLA's text: instructions, their estimated cycles, and collectives.

The instructions are in scheduled order. The compiler for TPUs writes `estimated_cycles` next to
each instruction.
"""

import collections
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "f32": 4,
    "s32": 4,
    "u32": 4,
}

# Categories of instructions that are not matrix products. The first pattern that is found in an
# instruction's name counts. The words are those of the package's scopes and of JAX's primitives.
CATEGORIES = (
    ("gradient norm", r"optimizer.*reduce_sum"),
    ("optimizer", r"optimizer"),
    ("random bits", r"threefry|random_bits|fold_in|random_split|/xor|shift_"),
    ("dropout", r"dropout"),
    ("norms", r"norm"),
    ("activations", r"activation"),
    ("embeddings", r"embedding|scatter|gather|_take"),
    ("attention", r"attention"),
)
RANDOM_BITS, MATRIX_PRODUCTS, COPIES, OTHER = (
    "random bits",
    "matrix products",
    "copies and casts",
    "other",
)


class Array(NamedTuple):
    """An array of a result: type and shape."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size without the padding of the device's tiles."""
        return BYTES.get(self.dtype, 8) * math.prod(self.sizes)


class Instruction(NamedTuple):
    """A line of a computation."""

    name: str
    opcode: str
    result: tuple[Array, ...]
    op_name: str  # from the source: the scopes and the primitive
    cycles: int  # estimated; 0 if the compiler gives none
    # The computations of a fusion, of a call, of a conditional's branches or of a loop's body.
    called: tuple[str, ...]
    trips: int  # of a loop
    channel: str  # of a collective
    operand: str  # the first one's name


class Collective(NamedTuple):
    """A collective, and how often it runs in a step."""

    kind: str
    arrays: tuple[Array, ...]
    op_name: str
    times: int
    # The arrays that they are rows of, if those are the result of another collective.
    source: tuple[Array, ...] = ()

    @property
    def bytes(self) -> int:
        """The bytes of the whole arrays that are summed or gathered.

        For a reduce-scatter, those of a device's part.
        """
        return self.times * sum(array.bytes for array in self.arrays)


class Program:
    """A compiled program.

    Args:
        text: `compiled.as_text()`.
    """

    def __init__(self, text: str):
        self._computations: dict[str, list[Instruction]] = {}
        self._entry = ""
        instructions: list[Instruction] = []
        for line in text.splitlines():
            if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
                instructions = self._computations[head[2]] = []
                self._entry = head[2] if head[1] else self._entry
            elif instruction := _instruction(line):
                instructions.append(instruction)

    def cycles(self) -> dict[str, int]:
        """Return estimated cycles by category, largest first.

        A conditional counts its most expensive branch.
        """
        total: collections.Counter[str] = collections.Counter()
        for instruction, times in self._scheduled(self._entry, 1):
            total[self.category(instruction)] += times * instruction.cycles
        return {category: cycles for category, cycles in total.most_common() if cycles}

    def dearest(self, count: int) -> list[dict[str, object]]:
        """Return the operations with most cycles, if they are estimated.

        Similar ones, as in all blocks, are joined.
        """
        total: collections.Counter[tuple[str, str]] = collections.Counter()
        times_of: collections.Counter[tuple[str, str]] = collections.Counter()
        for instruction, times in self._scheduled(self._entry, 1):
            key = (_shapes(instruction.result), re.sub(r"\d+", "#", instruction.op_name))
            total[key] += times * instruction.cycles
            times_of[key] += times
        return [
            {"cycles": cycles, "times": times_of[key], "result": key[0], "operation": key[1]}
            for key, cycles in total.most_common(count)
            if cycles
        ]

    def collectives(self) -> list[Collective]:
        """Return the collectives, those with most bytes first.

        Copies in several computations are joined.
        """
        found: dict[tuple[str, str], Collective] = {}
        for computation, times in self._times().items():
            scatters = computation.startswith("all-reduce-scatter")  # the form in TPU programs
            for instruction in self._computations[computation]:
                kind = instruction.opcode.removesuffix("-start")
                if kind not in COLLECTIVES:
                    continue
                kind = "reduce-scatter" if scatters else kind
                collective = Collective(kind, instruction.result, instruction.op_name, times)
                if scatters:  # it sums its input, to which it may first add rows of zeros
                    collective = collective._replace(arrays=self._given_to(computation))
                elif (
                    kind == "collective-permute"
                ):  # its start also has flags, besides what it sends and receives
                    source = self._summed_source(computation, instruction.operand)
                    collective = collective._replace(arrays=instruction.result[:1], source=source)
                # The parts of an asynchronous one share a channel; combined ones have no channel of
                # their own.
                shared = "" if scatters or kind == "collective-permute" else instruction.channel
                key = kind, shared or instruction.name
                if key not in found or collective.bytes < found[key].bytes:
                    found[key] = collective
        return sorted(found.values(), key=lambda collective: -collective.bytes)

    def _given_to(self, computation: str) -> tuple[Array, ...]:
        """Return the arrays that a computation takes."""
        instructions = self._computations[computation]
        return tuple(
            array for each in instructions if each.opcode == "parameter" for array in each.result
        )

    def _summed_source(self, computation: str, name: str) -> tuple[Array, ...]:
        """Return the operands of the reduce-scatter that gives the array its rows, if any."""
        by_name = {instruction.name: instruction for instruction in self._computations[computation]}
        while name in by_name and by_name[name].opcode in (
            "slice",
            "copy",
            "bitcast",
            "get-tuple-element",
        ):
            name = by_name[name].operand
        called = by_name[name].called if name in by_name else ()
        return next(
            (self._given_to(each) for each in called if each.startswith("all-reduce-scatter")), ()
        )

    def category(self, instruction: Instruction) -> str:
        """Return the category of an instruction."""
        opcodes = self._opcodes(instruction)
        if not opcodes.isdisjoint({"convolution", "dot"}):
            return MATRIX_PRODUCTS
        if "xor" in opcodes or "rng-bit-generator" in opcodes:
            return RANDOM_BITS
        for category, pattern in CATEGORIES:
            if re.search(pattern, instruction.op_name):
                return category
        moves = opcodes <= {
            "copy",
            "convert",
            "transpose",
            "reshape",
            "broadcast",
            "bitcast",
            "parameter",
            "fusion",
        }
        return COPIES if moves or instruction.opcode == "copy" else OTHER

    def _opcodes(self, instruction: Instruction) -> set[str]:
        """Return the names of an instruction and of those fused into it."""
        found = {instruction.opcode}
        if instruction.opcode == "fusion":
            for called in instruction.called:
                for inner in self._computations.get(called, ()):
                    found |= self._opcodes(inner)
        return found

    def _scheduled(self, computation: str, times: int) -> Iterator[tuple[Instruction, int]]:
        """Yield the scheduled instructions, and how often each runs."""
        for instruction in self._computations[computation]:
            if instruction.opcode == "conditional":
                yield from self._scheduled(max(instruction.called, key=self._cycles_of), times)
            elif instruction.opcode in ("while", "call", "async-start"):
                for called in instruction.called:
                    yield from self._scheduled(called, times * instruction.trips)
            else:
                yield instruction, times

    @functools.cache  # noqa: B019  the program lives as long as what asks it
    def _cycles_of(self, computation: str) -> int:
        return sum(
            times * instruction.cycles for instruction, times in self._scheduled(computation, 1)
        )

    def _times(self) -> Mapping[str, int]:
        """Return how often each computation runs in a step."""
        times: collections.Counter[str] = collections.Counter()

        def visit(computation: str, count: int) -> None:
            times[computation] = max(times[computation], count)
            for instruction in self._computations[computation]:
                for called in instruction.called:
                    if called in self._computations:
                        visit(called, count * instruction.trips)

        visit(self._entry, 1)
        return times


def _instruction(line: str) -> Instruction | None:
    match = re.match(
        r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(", re.sub(r"/\*.*?\*/", "", line)
    )
    if not match:
        return None
    name, result, opcode = match.groups()

    def found(pattern: str, default: str = "") -> str:
        hit = re.search(pattern, line)
        return hit[1] if hit else default

    called = re.findall(r"(?:calls|body|true_computation|false_computation)=%?([\w.\-]+)", line)
    called += re.findall(r"%?([\w.\-]+)", found(r"branch_computations=\{([^}]*)\}"))
    return Instruction(
        name,
        opcode,
        arrays_of(result),
        found(r'op_name="([^"]*)"'),
        int(found(r'"estimated_cycles":"?(\d+)', "0")),
        tuple(called),
        int(found(r'"known_trip_count":\{"n":"?(\d+)', "1")),
        found(r"channel_id=(\d+)"),
        found(rf" {opcode}\(%?([\w.\-]+)"),
    )


def arrays_of(result: str) -> tuple[Array, ...]:
    """Return the arrays of a result type such as `(f32[12,64]{1,0}, bf16[768]{0})`."""
    without_layouts = re.sub(r"\{[^}]*\}", "", result)
    return tuple(
        Array(dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", without_layouts)
    )


def _shapes(arrays: tuple[Array, ...]) -> str:
    text = ", ".join(f"{array.dtype}[{','.join(map(str, array.sizes))}]" for array in arrays[:3])
    return text + (f", and {len(arrays) - 3} more" if len(arrays) > 3 else "")
