"""Injects faults into small runs, and counts how they end.

    python tests/faults.py --count 200 --workdir runs/faults

A trial begins with a folder as a run leaves it. A fault happens to a command or to a file, and the
same command runs again. It must end as it does without a fault, bit for bit, or report in one
paragraph what is wrong and, with that put right, end so. Signals come at a file operation or at a
moment of computing. A disk is full or read-only from a file operation on. Files get a flipped bit
or a cut-off end. A library that is loaded before libc (faulty_files.c) does it.

Each command runs in a process that is forked from this one, which has imported everything and never
computes. Compiled programs are kept on disk.
"""

import argparse
import collections
import ctypes
import dataclasses
import errno
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {
    "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1", "TQDM_DISABLE": "1",
}  # fmt: skip

LONGEST = 900  # seconds after which a command hangs
COMMANDS = {  # in braces: folders of the world
    "train": "--config diffcse_minilm --workdir {workdir} --config.model.name_or_path={inputs}/model "
    "--config.data.train_file={inputs}/text.txt --config.data.cache_dir={trial}/cache --config.data.max_length=16 "
    "--config.generator.head_steps=2 --config.generator.head_batch_size=8 --config.train.batch_size=8 "
    "--config.train.log_every=1 --config.train.steps=5 --config.eval.every=2 --config.eval.metric=halves_retrieval "
    "--config.optim.learning_rate=1e-3",
    "export": "--model {workdir} --output {trial}/out",
    "evaluate": "--model {export} --tasks STSBenchmark --data_dir {inputs}/senteval --output {trial}/results.json",
    "embed": "--model {export} --input {inputs}/shards/*.txt --rows_per_file 20 --output {trial}/embedded",
}
OUTPUTS = {
    "train": "workdir/export",
    "export": "out",
    "evaluate": "results.json",
    "embed": "embedded",
}
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT}
ERRORS = {"disk full": errno.ENOSPC, "read-only": errno.EROFS}
SHARES = {
    "SIGKILL": 22, "SIGTERM": 14, "Ctrl-C": 18, "disk full": 46, "read-only": 28, "flipped bit": 40, "cut off": 22,
    "two at once": 10,
}  # fmt: skip
KINDS_OF_FILES = (
    (r"(checkpoints)/\d+", r"\1/STEP"), (r"/d/[0-9a-f]{32}", "/d/DATA"), (r"[0-9a-f]{32}", "HASH"),
    (r"tensorboard/.*", "tensorboard/EVENTS"), (r"ocdbt.process_\d+", "ocdbt.process_N"),
    (r"\b\d+\.txt(\.\d{6})?", "INPUT"), (r"\.\d+\.\w{8}\.tmp", ".TMP"),
)  # fmt: skip


class Fault(NamedTuple):
    """A signal or, from then on, errors; at a file operation (from 1) or after some seconds of computing."""

    signal: int = 0
    error: int = 0
    operation: int = 0
    seconds: float = 0.0


class Ended(NamedTuple):
    """How a command ended. `code` is negative if a signal ended the process, and None if it hung."""

    code: int | None
    output: str
    # number, name and path below the folder of those that were recorded
    operations: list[tuple[int, str, str]]
    seconds: float  # of computing


@dataclasses.dataclass
class Trial:
    """Faults of a command's runs before the one that must end well, files that are damaged before it, and its end."""

    kind: str
    state: str  # what the folder holds before
    command: str
    faults: Sequence[Fault] = ()
    damaged: Sequence[str] = ()
    ending: str = "identical"  # or `told`, if one paragraph came first
    problems: dict[str, str] = dataclasses.field(default_factory=dict)  # what was seen, by name
    where: str = ""
    happened: bool = True


def serve(world: "World", command: str, fault: Fault, record_all: bool) -> None:
    """Be the process of a command. Its exit code is that of the command; `multiprocessing` prints tracebacks."""
    from diffcse_jax import cli, errors

    # PyTorch's readers take long
    sys.modules["diffcse_jax.export"]._installed = lambda module: False
    sys.modules["diffcse_jax.api"].draw_curves = lambda workdir: workdir
    library = ctypes.CDLL(os.environ["DIFFCSE_FAULTY_FILES"])
    library.fault_after.argtypes = [ctypes.c_double, ctypes.c_int]
    records, output = (
        os.open(path, os.O_WRONLY | os.O_APPEND) for path in (world.record, world.log)
    )
    for number in (1, 2):  # as C and threads use them, too
        os.dup2(output, number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if fault.seconds:
        library.fault_after(fault.seconds, fault.signal)
    operation = ctypes.c_long(fault.operation)
    library.fault_arm(
        str(world.trial).encode(), operation, fault.signal, fault.error, records, int(record_all)
    )
    try:
        with errors.reported_to_user():
            sys.exit(
                cli.main(
                    [command, *(word.format_map(vars(world)) for word in COMMANDS[command].split())]
                )
            )
    finally:
        library.fault_disarm()


class World:
    """The folders of all trials. Each trial lives in `trial`, so that paths in files are the same in all."""

    def __init__(self, base: Path):
        self.base, self.inputs, self.trial = base, base / "inputs", base / "trial"
        self.log, self.record = base / "log", base / "record"
        self.workdir = self.trial / "workdir"
        self.export = self.workdir / "export"

    def make_inputs(self) -> None:
        """Write a tiny encoder with a tokenizer of few words, text, files to embed, and scored pairs."""
        from test_sts import write_stsb
        from tiny_model import write_smallest_model

        (self.inputs / "shards").mkdir(parents=True)
        lines = [f"sentence {i} has the number {i * i} and {i % 7} words more\n" for i in range(60)]
        words = sorted({word for line in lines for word in line.split()})
        write_smallest_model(self.inputs / "model", words)
        for name, part in (("text", lines), ("shards/0", lines[::2]), ("shards/1", lines[1::2])):
            (self.inputs / f"{name}.txt").write_text("".join(part))
        for split in ("dev", "test"):
            rows = [(score, f"{words[3 * score]} is here", words[5 * score]) for score in range(6)]
            write_stsb(self.inputs / "senteval", split, rows)

    def keep(self, state: str) -> None:
        shutil.copytree(self.trial, self.base / "kept" / state, symlinks=True)

    def restore(self, state: str) -> None:
        shutil.rmtree(self.trial, ignore_errors=True)
        shutil.copytree(self.base / "kept" / state, self.trial, symlinks=True)

    def run(self, command: str, fault: Fault | None = None, *, record_all: bool = False) -> Ended:
        """Run a command in a process of its own."""
        self.log.write_bytes(b"")
        self.record.write_bytes(b"")
        before = sum(os.times()[2:4])  # which children have computed
        arguments = (self, command, fault or Fault(), record_all)
        process = multiprocessing.get_context("fork").Process(target=serve, args=arguments)
        process.start()
        process.join(LONGEST)
        code = process.exitcode
        process.kill()
        process.join()
        lines = [line.split("\t") for line in self.record.read_text(errors="replace").splitlines()]
        paths = [
            (int(number), name, str(Path(path).relative_to(self.trial)))
            for number, name, path in lines
        ]
        return Ended(
            code, self.log.read_text(errors="replace"), paths, sum(os.times()[2:4]) - before
        )

    def outcome(self, command: str) -> dict[str, str]:
        """Return what a command has made, by part: a digest of all that must not depend on faults."""
        made = self.trial / OUTPUTS[command]
        paths = (
            [made] if made.is_file() else [path for path in made.rglob("[!.]*") if path.is_file()]
        )
        found = {str(path.relative_to(made)): sha256(path.read_bytes()) for path in paths}
        if command == "train":
            rows = re.sub(
                r', "sentences_per_second": [^,}]*',
                "",
                (self.workdir / "metrics.jsonl").read_text(),
            )
            found["metrics.jsonl"] = sha256(rows.encode())
            found["selection.json"] = sha256((self.workdir / "selection.json").read_bytes())
            for record in (self.workdir / "checkpoints").glob("[0-9]*/record/metadata"):
                digests = json.loads(record.read_text())["digests"]["params"]
                found[str(record.relative_to(self.workdir))] = json.dumps(digests, sort_keys=True)
        return found


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def kind_of_file(path: str) -> str:
    """Return the path without what differs between files of one kind."""
    for pattern, name in KINDS_OF_FILES:
        path = re.sub(pattern, name, path)
    return path


def observe(world: World) -> tuple[dict[tuple[str, str], Ended], dict[str, dict[str, str]]]:
    """Make the states. Return what each command does in a state without a fault, and what it makes."""
    found: dict[tuple[str, str], Ended] = {}
    expected: dict[str, dict[str, str]] = {}

    def clean(state: str, command: str, fault: Fault | None = None, code: int = 0) -> None:
        found[state, command] = ended = world.run(command, fault, record_all=True)
        assert ended.code == code, (
            f"{command} ends with {ended.code} instead of {code}:\n{ended.output}"
        )

    world.trial.mkdir()
    world.keep("fresh")
    for state, command in (
        ("fresh", "train"),
        ("finished", "export"),
        ("finished", "evaluate"),
        ("finished", "embed"),
    ):
        clean(state, command)
        expected[command] = world.outcome(command)
    world.keep("finished")
    first_save = min(
        number for number, _, path in found["fresh", "train"].operations if "checkpoints/" in path
    )
    world.restore("fresh")
    # stops with everything saved
    clean("begun", "train", Fault(signal.SIGTERM, operation=first_save), code=130)
    world.keep("begun")
    clean("begun", "train")
    assert world.outcome("train") == expected["train"], (
        "a run that was stopped does not end as one that was not"
    )
    return found, expected


def make_trial(
    world: World, kind: str, observed: Mapping[tuple[str, str], Ended], chance: random.Random
) -> Trial:
    """Return a random trial of a kind, with equal chances for each command and for each kind of file."""
    files = {}
    for state in ("begun", "finished"):
        kept = world.base / "kept" / state
        files[state] = sorted(
            str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file()
        )
    if kind == "two at once":
        saving = [
            number
            for number, _, path in observed["begun", "train"].operations
            if "checkpoints/" in path
        ]
        kill = Fault(signal.SIGKILL, operation=chance.choice(saving))
        full = Fault(error=errno.ENOSPC, operation=chance.choice(saving))
        checkpoint = chance.choice(
            [path for path in files["begun"] if "workdir/checkpoints/" in path]
        )
        of_training = [
            path
            for path in files["finished"]
            if re.match(r"workdir/(checkpoints|encoder|metrics)", path)
        ]
        return chance.choice([
            Trial(kind, "begun", "train", [kill], [checkpoint]),
            Trial(kind, "begun", "train", [full, Fault(signal.SIGTERM, operation=full.operation)]),
            Trial(kind, "finished", "train", [], chance.sample(of_training, 2)),
        ])  # fmt: skip
    by_kind = collections.defaultdict(list)
    if kind in ("flipped bit", "cut off"):
        for path in files["finished"]:
            if not path.endswith(".parquet"):  # no command here reads them
                by_kind[kind_of_file(path)].append(path)
        path = chance.choice(by_kind[chance.choice(sorted(by_kind))])
        readers = [("finished", "train")]
        if path.startswith("workdir/export"):
            readers = [("finished", "evaluate")]
        elif path.startswith("embedded"):
            readers = [("finished", "embed")]
        elif path.startswith("workdir") and not re.search(r"checkpoints|selection|report", path):
            readers = [("begun", "train"), *readers, ("finished", "export")]
        return Trial(kind, *chance.choice(readers), damaged=[path])
    # Only training listens to SIGTERM; to other commands it is what SIGKILL is.
    state, command = chance.choice(
        [place for place in observed if kind != "SIGTERM" or place[1] == "train"]
    )
    ended, what = observed[state, command], (SIGNALS.get(kind, 0), ERRORS.get(kind, 0))
    for number, name, path in ended.operations:
        if kind != "disk full" or re.match("p?write|mkdir|f?data?sync|sendfile|copy|link", name):
            by_kind[kind_of_file(path)].append(Fault(*what, number))
    if kind in SIGNALS:
        by_kind["computing"] = [Fault(*what, seconds=chance.random() * ended.seconds)]
    return Trial(kind, state, command, [chance.choice(by_kind[chance.choice(sorted(by_kind))])])


def judge(world: World, trial: Trial, expected: Mapping[str, str], chance: random.Random) -> None:
    """Carry out a trial, from its state to the end that it must have, and write down how it ended."""

    def begin() -> None:
        world.restore(trial.state)
        # otherwise there is an earlier one
        if trial.faults and trial.command != "train" and has_no_output:
            output = world.trial / OUTPUTS[trial.command]
            output.unlink() if output.is_file() else shutil.rmtree(output)

    def check_message(ended: Ended) -> None:
        """Look for tracebacks, and for an error of more or less than one paragraph."""
        if re.search(
            r"Traceback|Exception ignored|Fatal Python error|terminate called", ended.output
        ):
            trial.problems["traceback"] = ended.output[-2500:]
        errors = re.findall(r"^error: .*", ended.output, re.MULTILINE)
        if ended.code == 2 and (
            len(errors) != 1 or len(ended.output[ended.output.index(errors[0]) :]) > 2000
        ):
            trial.problems["unclear"] = ended.output[-1500:]

    has_no_output, printed = chance.random() < 0.7, ""
    trial.where = ", ".join(map(kind_of_file, trial.damaged))
    begin()
    for fault in trial.faults:
        ended = world.run(trial.command, fault)
        # done before: a process that has compiled is faster
        while fault.seconds > 0.001 and ended.code == 0:
            fault = fault._replace(seconds=fault.seconds / 3)
            begin()
            ended = world.run(trial.command, fault)
        printed += ended.output
        trial.where = f"after {fault.seconds:.2f} s"
        if ended.operations:
            trial.where = f"{ended.operations[-1][1]} {kind_of_file(ended.operations[-1][2])}"
        check_message(ended)
        if ended.code == 0:
            trial.happened = bool(ended.operations)
        elif ended.code is None:
            trial.problems["hung"] = ended.output[-900:]
        elif ended.code not in ((-fault.signal, 130) if fault.signal else (2,)):
            trial.problems.setdefault("unclear", f"{ended.code}: {ended.output[-900:]}")
        elif ended.code == 2:
            trial.ending = "told"
    checkpoints = [
        int(path.name)
        for path in (world.workdir / "checkpoints").glob("*")
        if path.name.isdecimal()
    ]
    intact = {path: damage(world.trial / path, trial.kind, chance) for path in trial.damaged}
    ended = world.run(trial.command)
    check_message(ended)
    printed += ended.output
    if ended.code == 2 and intact:
        trial.ending = "told"
        for path, content in intact.items():
            (world.trial / path).parent.mkdir(parents=True, exist_ok=True)
            (world.trial / path).write_bytes(content)
        ended = world.run(trial.command)
        printed += ended.output
    if ended.code != 0:
        trial.problems["hung" if ended.code is None else "lost"] = (
            f"{ended.code}: {ended.output[-900:]}"
        )
        return
    resumed = re.findall(r"resumed at step (\d+)", ended.output)
    if (
        trial.command == "train"
        and checkpoints
        and not trial.damaged
        and resumed != [str(max(checkpoints))]
    ):
        trial.problems["lost"] = f"resumed at {resumed} with checkpoints {checkpoints}"
    try:
        found = world.outcome(trial.command)
        # A run that is killed while it removes an old checkpoint keeps it, and nothing reads it.
        compared = expected.keys() | {name for name in found if not name.startswith("checkpoints/")}
        differing = {name for name in compared if found.get(name) != expected.get(name)}
    except (OSError, ValueError, KeyError) as error:
        differing = {repr(error)}
    damaged = {Path(path).name for path in trial.damaged}
    if (
        differing
        and differing <= damaged
        and all(name in printed for name in [*differing, "warning: "])
    ):
        trial.ending = "told"  # a damaged file that nothing depends on is named, and stays damaged
    elif differing:
        trial.problems["silent" if trial.damaged else "lost"] = f"differ: {sorted(differing)[:5]}"
    partial = re.compile(r"tmp$|\.tmp[.-]|\.old$|(^|/)\.[^/]+\.[0-9a-f]{32}$")
    paths = (str(path.relative_to(world.trial)) for path in world.trial.rglob("*"))
    if left := [path for path in paths if partial.search(path)]:
        trial.problems["left over"] = ", ".join(left[:5])


def damage(file: Path, kind: str, chance: random.Random) -> bytes:
    """Flip a bit of a file, or cut it off. Return what it was."""
    content = file.read_bytes() if file.is_file() else b""
    if content:
        at = chance.randrange(len(content))
        flipped = bytes([content[at] ^ 1 << chance.randrange(8)])
        file.write_bytes(
            content[:at] if kind == "cut off" else content[:at] + flipped + content[at + 1 :]
        )
    return content


def load_library(folder: Path) -> None:
    """Compile the library and start this program again with it, unless that is done."""
    if "DIFFCSE_FAULTY_FILES" in os.environ:
        return
    source, library = Path(__file__).with_name("faulty_files.c"), folder / "faulty_files.so"
    command = [
        shutil.which("cc") or "gcc",
        "-O1",
        "-shared",
        "-fPIC",
        "-o",
        library,
        source,
        "-ldl",
        "-lrt",
    ]
    subprocess.run(command, check=True)
    os.environ |= {"DIFFCSE_FAULTY_FILES": str(library), "LD_PRELOAD": str(library)}
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="faults (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of their choice (default: 0)")
    parser.add_argument(
        "--workdir", type=Path, required=True, help="a folder for the runs; it is emptied"
    )
    parser.add_argument("--output", type=Path, help="a JSON file for the counts")
    options = parser.parse_args()
    options.workdir.mkdir(parents=True, exist_ok=True)
    load_library(options.workdir)
    world = World(options.workdir.resolve())
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(world.base / "compiled")
    for name in ("api", "cli", "apps.embed", "evaluation.runner"):  # so that no process has to
        importlib.import_module(f"diffcse_jax.{name}")
    for name in ("inputs", "trial", "kept"):
        shutil.rmtree(world.base / name, ignore_errors=True)
    world.make_inputs()
    observed, expected = observe(world)
    chance = random.Random(options.seed)
    counts = [-(-share * options.count // 200) for share in SHARES.values()]
    kinds = chance.sample([*SHARES], options.count, counts=counts)
    trials: list[Trial] = []
    for number, kind in enumerate(kinds, 1):
        trials.append(trial := make_trial(world, kind, observed, chance))
        judge(world, trial, expected[trial.command], chance)
        ending = trial.ending if trial.happened else "did not happen"
        problems = "".join(f"\n    {name}: {text}" for name, text in trial.problems.items())
        where = f"{trial.kind} ({trial.state} {trial.command}: {trial.where})"
        print(f"{number}/{options.count} {where}: {ending}{problems}", flush=True)
        if options.output:
            record = {"command": shlex.join(["python", *sys.orig_argv[1:]]), **summary(trials)}
            options.output.write_text(json.dumps(record, indent=1) + "\n")
    counts = summary(trials)
    print(f"{counts['faults']} faults: {counts['ended']}, problems: {counts['problems']}")
    return 1 if counts["problems"] else 0


def summary(trials: Sequence[Trial]) -> dict[str, Any]:
    """Count the faults that happened, by state, command and kind, and list trials with a problem."""
    happened = [trial for trial in trials if trial.happened]
    kinds: dict[str, collections.Counter[str]] = {}
    for trial in happened:
        kinds.setdefault(f"{trial.state} {trial.command}", collections.Counter())[trial.kind] += 1
    return {
        "faults": len(happened),
        "ended": dict(collections.Counter(trial.ending for trial in happened)),
        "problems": dict(
            collections.Counter(name for trial in happened for name in trial.problems)
        ),
        "kinds": kinds,
        "trials_with_problems": [dataclasses.asdict(trial) for trial in happened if trial.problems],
    }


if __name__ == "__main__":
    sys.exit(main())
