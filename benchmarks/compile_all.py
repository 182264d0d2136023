"""Compile all configurations for TPUs and write one record, the source of docs/records/planning.md.

    python -m benchmarks.compile_all --output benchmarks/results/compiled_tpu.json

Each program is compiled in a process of its own. Run again with the same file, the command
continues where it stopped: the record contains the revision of each program and the version of the
compiler. If a program fails, its error is recorded. `--again PATTERN` compiles the programs again
that match. `--table` prints the record as Markdown.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import measure
from diffcse_jax.config import SHIPPED
from diffcse_jax.errors import reported_to_user
from diffcse_jax.run_folder.records import commit

REVISION = (commit(Path(__file__).parent) or {}).get("commit")
LARGE = "--config.model.name_or_path=bert-large-uncased"
SUPERVISED = "supervised_simcse_base"


def programs() -> Iterator[list[str]]:
    """Return the arguments of `benchmarks.compile_for` for every program."""
    yield ["v5e:2x2", "simcse_base", "--batch", "512"]
    for share in ("0.875", "0.75", "0.5"):
        yield [
            "v5e:2x2",
            "simcse_base",
            "--batch",
            "512",
            "--config.train.packing=on",
            "--real_tokens",
            share,
        ]
    for share in ("0.875", "0.75"):
        yield ["v5e:2x2", "simcse_base", "--config.train.packing=on", "--real_tokens", share]
    yield ["v5e:2x2", "diffcse_base", "--batch", "512"]
    yield ["v5e:2x2", "diffcse_base", "--batch", "512", "--what", "chunked"]
    yield ["v5e:2x2", "simcse_base", "--batch", "4096"]
    yield ["v5e:2x2", "simcse_base", "--batch", "4096", "--what", "chunked"]
    yield ["v5e:2x2", "diffcse_base", "--config.mesh.fully_sharded=True"]
    yield ["v5e:2x2", "diffcse_base", "--config.mesh.model=2"]
    yield ["v6e:2x2", "diffcse_base"]
    yield ["v5p:2x2x1", "diffcse_base"]
    yield ["v5e:16x16", "diffcse_base", "--batch", "4096"]
    yield ["v5e:2x2", "simcse_base", "--what", "encode", "--batch", "1024"]
    yield ["v5e:2x2", "diffcse_minilm", "--what", "generator_head"]
    yield ["v5e:2x2", "simcse_base", LARGE]
    yield ["v5e:2x2", "diffcse_base", LARGE]
    yield ["v5e:1x1", "diffcse_base"]
    yield ["v5e:2x2", "diffcse_base", "--config.train.recompute=on"]
    yield from _configurations("v5e:2x2")
    yield from _configurations("v5e:4x4")


def _configurations(target: str) -> Iterator[list[str]]:
    for config in sorted(path.stem for path in SHIPPED.glob("*.py")):
        yield [target, config, *(["--views", "3"] if config == SUPERVISED else [])]


def compile_all(path: Path, again: str | None) -> list[dict[str, Any]]:
    """Compile the programs that are not in the file yet, and write the file after each one."""
    records = json.loads(path.read_text())["programs"] if path.is_file() else []
    known = {record["arguments"]: record for record in records}
    # Old records are kept until the new ones are there.
    old = {arguments for arguments in known if again and re.search(again, arguments)}
    wanted = list(programs())
    for number, (target, config, *others) in enumerate(wanted, start=1):
        arguments = " ".join(["--target", target, "--config", config, *others])
        if arguments in known and arguments not in old:
            continue
        print(f"{number} of {len(wanted)}: {arguments}", flush=True)
        compiler = {"revision": REVISION, "libtpu": version("libtpu")}
        known[arguments] = {"arguments": arguments} | compiler | _compiled(arguments.split())
        measure.write_record(
            path, "benchmarks.compile_all", ["--output", str(path)], {"programs": [*known.values()]}
        )
    return [*known.values()]


def _compiled(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the record of one program, or its `error` if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "record.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.compile_for",
            *arguments,
            "--output",
            str(output),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return {
                "error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            }
        return compact(json.loads(output.read_text()))


def compact(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what pages cite of a record of `compile_for`.

    The `arguments` beside it give the target, the configuration and what is compiled. `moved` has
    the bytes of collectives by content, if they are at least a tenth of a megabyte.
    """
    moved: dict[str, int] = {}
    for entry in record.get("collectives", ()):
        moved[entry["carries"]] = moved.get(entry["carries"], 0) + entry["bytes"]
    memory, cycles = record["memory_per_chip"], record.get("estimated_cycles", {})
    return {
        "batch_size": record["batch_size"],
        "trained_parameters": record.get("trained_parameters"),
        "compile_seconds": round(record["compile_seconds"], 1),
        "memory_per_chip": {name: memory[name] for name in ("total", "available")},
        "fits": record["fits"],
        "moved": {name: size for name, size in moved.items() if size >= 1e5},
        "cycles": {"total": cycles.get("total", 0), **cycles.get("by_category", {})},
    }


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a table in Markdown: the programs, their memory, and what they move between chips."""
    lines = [
        "| program | for | memory per chip | fits | moved per step |",
        "|---|---|---:|---|---|",
    ]
    for record in records:
        if "error" in record:
            lines.append(f"| {record['arguments']} | | | | {record['error']} |")
            continue
        words = (
            re.sub(r"--target \S+ --config ", "", record["arguments"])
            .replace("--config.", "")
            .replace("--", "")
        )
        memory = record["memory_per_chip"]
        size = f"{memory['total'] / 2**30:.2f} of {memory['available'] / 2**30:.2f} GiB"
        fits = "yes" if record["fits"] else "no"
        target = record["arguments"].split()[1]
        lines.append(f"| {words} | {target} | {size} | {fits} | {_moved(record['moved'])} |")
    return "\n".join(lines)


def _moved(moved: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in moved.items()) or "nothing"


def main(argv: list[str]) -> None:
    """Compile all programs, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="JSON file, which is read and completed"
    )
    parser.add_argument(
        "--again", metavar="PATTERN", help="compile the programs again whose arguments match"
    )
    parser.add_argument("--table", action="store_true", help="only print the record")
    options = parser.parse_args(argv)
    if options.table and not options.output.is_file():
        parser.error(f"--output {options.output}: there is no such file")
    if options.table:
        print(table(json.loads(options.output.read_text())["programs"]))
    else:
        print(table(compile_all(options.output, options.again)))


if __name__ == "__main__":
    with reported_to_user():
        main(sys.argv[1:])
