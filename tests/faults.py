"""Injects faults into small runs, and counts how they end: `python tests/faults.py --count 200 --workdir runs/faults`.

A trial begins with a folder as a run leaves it. A fault happens to a command or to a file, and the same command runs
again. It must end as it does without a fault, bit for bit, or report in one paragraph what is wrong and, with that put
right, end so. Signals come at a file operation or at a moment of computing. A disk is full or read-only from a file
operation on. Files get a flipped bit or a cut-off end. A library that is loaded before libc (faulty_files.c) does it.

Each command runs in a process that is forked from this one, which has imported everything and never computes. Compiled
programs are kept on disk.
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
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {
    "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1", "TQDM_DISABLE": "1",
}  # fmt: skip

LONGEST = 900  # seconds after which a command hangs
STEPS, EVERY, SENTENCES = 5, 2, 60
TEXTS = [f"sentence {i} has the number {i * i} and {i % 7} words more" for i in range(SENTENCES)]
PROBLEMS = ("lost", "silent", "traceback", "unclear", "hung", "left over")
OUTPUTS = {"export": "out", "evaluate": "results.json", "embed": "embedded"}
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT}
ERRORS = {"disk full": errno.ENOSPC, "read-only": errno.EROFS}
DAMAGES = ("flipped bit", "cut off")
SHARES = {
    "SIGKILL": 22, "SIGTERM": 14, "Ctrl-C": 18, "disk full": 46, "read-only": 28, "flipped bit": 40, "cut off": 22,
    "two at once": 10,
}  # fmt: skip


class World:
    """The folders of all trials. Each trial lives in `trial`, so that paths in files are the same in all."""

    def __init__(self, base: Path):
        self.base, self.inputs, self.trial = base, base / "inputs", base / "trial"
        self.workdir = self.trial / "workdir"
        self.export = self.workdir / "export"

    def keep(self, state: str) -> None:
        shutil.copytree(self.trial, self.base / "kept" / state, symlinks=True)

    def restore(self, state: str) -> None:
        shutil.rmtree(self.trial, ignore_errors=True)
        shutil.copytree(self.base / "kept" / state, self.trial, symlinks=True)


# Commands, as they run in a worker.


def train(world: World) -> int:
    from diffcse_jax import api
    from diffcse_jax.config import configuration

    settings = {
        "model.name_or_path": str(world.inputs / "model"), "data.train_file": str(world.inputs / "text.txt"),
        "data.max_length": 16, "data.cache_dir": str(world.trial / "cache"), "generator.head_steps": 2,
        "generator.head_batch_size": 8, "train.batch_size": 8, "train.log_every": 1, "train.steps": STEPS,
        "eval.every": EVERY, "eval.metric": "halves_retrieval", "optim.learning_rate": 1e-3,
    }  # fmt: skip
    api.run(configuration("diffcse_minilm", settings)[1], world.workdir)
    return 0


def diffcse(command: str, model: Path, *options: object) -> int:
    from diffcse_jax import cli

    return cli.main([command, "--model", *map(str, (model, *options))])


COMMANDS = {
    "train": train,
    "evaluate": lambda world: diffcse(
        "evaluate", world.export, "--tasks", "STSBenchmark", "--data_dir", world.inputs / "senteval",
        "--output", world.trial / OUTPUTS["evaluate"],
    ),
    "export": lambda world: diffcse("export", world.workdir, "--output", world.trial / OUTPUTS["export"]),
    "embed": lambda world: diffcse(
        "embed", world.export, "--input", f"{world.inputs}/shards/*.txt", "--rows_per_file", 20,
        "--output", world.trial / OUTPUTS["embed"],
    ),
}  # fmt: skip


def prepare() -> None:
    """Leave out what a trial does not need."""
    sys.modules["diffcse_jax.export.folder"]._installed = lambda module: False  # PyTorch's readers
    sys.modules["diffcse_jax.api"].draw_curves = lambda workdir: workdir


# Processes.


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
    operations: list[tuple[int, str, str]]  # number, name and path below the folder of those that were recorded
    seconds: float  # of computing


def load_library(folder: Path) -> None:
    """Compile the library and start this program again with it, unless that is done."""
    if "DIFFCSE_FAULTY_FILES" in os.environ:
        return
    source, library = Path(__file__).with_name("faulty_files.c"), folder / "faulty_files.so"
    command = [shutil.which("cc") or "gcc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lrt"]
    subprocess.run(command, check=True)
    os.environ |= {"DIFFCSE_FAULTY_FILES": str(library), "LD_PRELOAD": str(library)}
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def run(world: World, command: str, fault: Fault | None = None, *, record_all: bool = False) -> Ended:
    """Run a command in a process of its own."""
    log, record = world.base / "log", world.base / "record"
    log.write_bytes(b"")
    record.write_bytes(b"")
    arguments = (world, command, fault or Fault(), record_all, log, record)
    process = multiprocessing.get_context("fork").Process(target=serve, args=arguments)
    before = os.times()
    process.start()
    process.join(LONGEST)
    code = process.exitcode
    process.kill()
    process.join()
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    lines = [line.split("\t") for line in record.read_text(errors="replace").splitlines()]
    paths = [(int(number), name, str(Path(path).relative_to(world.trial))) for number, name, path in lines]
    return Ended(code, log.read_text(errors="replace"), paths, seconds)


def serve(world: World, command: str, fault: Fault, record_all: bool, log: Path, record: Path) -> None:
    """Be the process of a command. Its exit code is that of the command; `multiprocessing` prints tracebacks."""
    from diffcse_jax.errors import reported_to_user

    prepare()
    library = ctypes.CDLL(os.environ["DIFFCSE_FAULTY_FILES"])
    library.fault_after.argtypes = [ctypes.c_double, ctypes.c_int]
    records, output = (os.open(path, os.O_WRONLY | os.O_APPEND) for path in (record, log))
    for number in (1, 2):  # as C and threads use them, too
        os.dup2(output, number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if fault.seconds:
        library.fault_after(fault.seconds, fault.signal)
    operation = ctypes.c_long(fault.operation)
    library.fault_arm(str(world.trial).encode(), operation, fault.signal, fault.error, records, int(record_all))
    try:
        with reported_to_user():
            sys.exit(COMMANDS[command](world))
    finally:
        library.fault_disarm()


# The world before any fault.


def make_inputs(folder: Path) -> None:
    """Write a tiny encoder with a tokenizer of few words, text, files to embed, and scored pairs."""
    from test_sts import write_stsb
    from tiny_model import write_smallest_model

    (folder / "shards").mkdir(parents=True)
    words = sorted({word for text in TEXTS for word in text.split()})
    write_smallest_model(folder / "model", words)
    lines = [f"{text}\n" for text in TEXTS]
    for name, part in (("text", lines), ("shards/0", lines[::2]), ("shards/1", lines[1::2])):
        (folder / f"{name}.txt").write_text("".join(part))
    for split in ("dev", "test"):
        rows = [f"-\t-\t-\t-\t{score}\t{words[3 * score]} is here\t{words[5 * score]}\n" for score in range(6)]
        write_stsb(folder / "senteval", split, rows)


def outcome(world: World, command: str) -> dict[str, str]:
    """What a command has made, by part: a digest of all that must not depend on faults."""
    made = world.trial / OUTPUTS.get(command, "workdir/export")
    paths = [made] if made.is_file() else [path for path in made.rglob("[!.]*") if path.is_file()]
    found = {str(path.relative_to(made)): sha256(path.read_bytes()) for path in paths}
    if command == "train":
        rows = [comparable(line) for line in (world.workdir / "metrics.jsonl").read_bytes().splitlines()]
        found["metrics.jsonl"] = sha256(json.dumps(rows).encode())
        found["selection.json"] = sha256((world.workdir / "selection.json").read_bytes())
        for record in (world.workdir / "checkpoints").glob("[0-9]*/record/metadata"):
            digests = json.loads(record.read_text())["digests"]["params"]
            found[str(record.relative_to(world.workdir))] = json.dumps(digests, sort_keys=True)
    return found


def comparable(line: bytes) -> Any:
    """A row of the metrics without what differs from run to run; a damaged one as it is."""
    try:
        return {key: value for key, value in json.loads(line).items() if key != "sentences_per_second"}
    except (ValueError, AttributeError):
        return repr(line)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def kind_of_file(path: str) -> str:
    """The path without what differs between files of one kind."""
    for pattern, name in (
        (r"(checkpoints)/\d+", r"\1/STEP"), (r"/d/[0-9a-f]{32}", "/d/DATA"), (r"[0-9a-f]{32}", "HASH"),
        (r"tensorboard/.*", "tensorboard/EVENTS"), (r"ocdbt.process_\d+", "ocdbt.process_N"),
        (r"\b\d+\.txt(\.\d{6})?", "INPUT"), (r"\.\d+\.\w{8}\.tmp", ".TMP"),
    ):  # fmt: skip
        path = re.sub(pattern, name, path)
    return path


# Trials.


class Trial(NamedTuple):
    """Faults of a command's runs before the one that must end well, and files that are damaged before that one."""

    kind: str
    state: str  # what the folder holds before
    command: str
    faults: tuple[Fault, ...] = ()
    damaged: tuple[str, ...] = ()


def trials(
    kind: str, observed: Mapping[tuple[str, str], Ended], files: Mapping[str, Sequence[str]], chance: random.Random
) -> Iterator[Trial]:
    """Faults of a kind without end, spread evenly over commands, kinds of file and moments of computing."""
    checkpoints = [path for path in files.get("begun", ()) if "workdir/checkpoints/" in path]
    of_training = [
        path for path in files["finished"] if re.match(r"workdir/(checkpoints|encoder|metrics|start|generator)", path)
    ]
    while True:
        if kind in DAMAGES:
            yield from damages(kind, files["finished"], chance)
        elif kind == "two at once":
            begun = observed["begun", "train"].operations
            saving = [number for number, _, path in begun if "checkpoints/" in path]
            kill, full = (Fault(*what, chance.choice(saving)) for what in ((signal.SIGKILL, 0), (0, errno.ENOSPC)))
            yield Trial(kind, "begun", "train", (kill,), (chance.choice(checkpoints),))
            yield Trial(kind, "begun", "train", (full, Fault(signal.SIGTERM, 0, full.operation)))
            yield Trial(kind, "finished", "train", (), tuple(chance.sample(of_training, 2)))
        else:
            yield from process_faults(kind, observed, chance)


def process_faults(kind: str, observed: Mapping[tuple[str, str], Ended], chance: random.Random) -> Iterator[Trial]:
    places: dict[tuple[str, str], dict[str, list[Fault]]]  # by state and command, and by kind of file
    places = collections.defaultdict(lambda: collections.defaultdict(list))
    what = (SIGNALS.get(kind, 0), ERRORS.get(kind, 0))
    for (state, command), ended in observed.items():
        if kind == "SIGTERM" and command != "train":
            continue  # only training listens to SIGTERM; to others it is what SIGKILL is
        for number, name, path in ended.operations:
            needs_room = re.match("p?write|mkdir|f?data?sync|sendfile|copy|link", name)
            if kind != "disk full" or needs_room:
                places[state, command][kind_of_file(path)].append(Fault(*what, number))
        if kind in SIGNALS and ended.operations:
            moments = [chance.random() * ended.seconds for _ in range(20)]
            places[state, command]["computing"] = [Fault(*what, seconds=moment) for moment in moments]
    while True:
        for state, command in sorted(places, key=lambda _: chance.random()):
            yield Trial(kind, state, command, (chance.choice(chance.choice([*places[state, command].values()])),))


def damages(kind: str, files: Sequence[str], chance: random.Random) -> Iterator[Trial]:
    """Damaged files, by turns of all kinds, with a state and a command that reads them."""
    by_kind = collections.defaultdict(list)
    for path in files:
        if not path.endswith(".parquet"):  # no command here reads them
            by_kind[kind_of_file(path)].append(path)
    for name in sorted(by_kind, key=lambda _: chance.random()):
        path = chance.choice(by_kind[name])
        readers = [("finished", "train")]
        if path.startswith("workdir/export"):
            readers = [("finished", "evaluate")]
        elif path.startswith("embedded"):
            readers = [("finished", "embed")]
        elif path.startswith("workdir") and not re.search(r"checkpoints|selection|report", path):
            readers = [("begun", "train"), *readers, ("finished", "export")]
        yield Trial(kind, *chance.choice(readers), damaged=(path,))


@dataclasses.dataclass
class Verdict:
    """How a trial ended: `identical`, or `told` if one paragraph came first; problems with what was seen."""

    trial: Trial
    ending: str = "identical"
    problems: dict[str, str] = dataclasses.field(default_factory=dict)
    where: str = ""
    fired: bool = True  # the fault did happen


class Judge:
    """Runs trials and compares their outcomes with those without faults."""

    def __init__(self, world: World, seed: int):
        self._world, self._chance = world, random.Random(seed)
        self._expected: dict[str, dict[str, str]] = {}

    def observe(self) -> dict[tuple[str, str], Ended]:
        """Make the states and learn what each command does and gives without a fault."""
        world, found = self._world, {}
        world.trial.mkdir()

        def observe(state: str, *commands: str) -> None:
            for command in commands:
                found[state, command] = self._clean(command)
                self._expected[command] = outcome(world, command)

        world.keep("fresh")
        observe("fresh", "train")
        observe("finished", "export", "evaluate", "embed")
        world.keep("finished")
        uninterrupted = self._expected["train"]
        saving = [number for number, _, path in found["fresh", "train"].operations if "checkpoints/" in path]
        world.restore("fresh")
        self._clean("train", Fault(signal.SIGTERM, operation=saving[0]), code=130)  # stops with everything saved
        world.keep("begun")
        observe("begun", "train")
        assert self._expected["train"] == uninterrupted, "a run that was stopped does not end as one that was not"
        return found

    def _clean(self, command: str, fault: Fault | None = None, *, code: int = 0) -> Ended:
        ended = run(self._world, command, fault, record_all=True)
        assert ended.code == code, f"{command} ends with {ended.code} instead of {code}:\n{ended.output}"
        return ended

    def judge(self, trial: Trial) -> Verdict:
        """Carry out one trial, from its state to the end that it must have."""
        verdict, world = Verdict(trial, where=", ".join(map(kind_of_file, trial.damaged))), self._world
        self._begin(trial)
        printed = ""
        for fault in trial.faults:
            ended = run(world, trial.command, fault)
            while fault.seconds > 0.001 and ended.code == 0:  # done before: a process that has compiled is faster
                fault = fault._replace(seconds=fault.seconds / 3)
                self._begin(trial)
                ended = run(world, trial.command, fault)
            printed += ended.output
            self._judge_fault(verdict, fault, ended)
        names = [path.name for path in (world.workdir / "checkpoints").glob("*")]
        checkpoints = sorted(int(name) for name in names if name.isdecimal())
        intact = {path: self._damage(trial.kind, world.trial / path) for path in trial.damaged}
        ended = run(world, trial.command)
        self._judge_message(verdict, ended)
        printed += ended.output
        if ended.code == 2 and intact:
            verdict.ending = "told"
            for path, content in intact.items():
                (world.trial / path).parent.mkdir(parents=True, exist_ok=True)
                (world.trial / path).write_bytes(content)
            ended = run(world, trial.command)
            printed += ended.output
        if ended.code != 0:
            verdict.problems["hung" if ended.code is None else "lost"] = f"{ended.code}: {ended.output[-900:]}"
            return verdict
        self._judge_outcome(verdict, printed)
        resumed = re.findall(r"resumed at step (\d+)", ended.output)
        if trial.command == "train" and checkpoints and not trial.damaged and resumed != [str(checkpoints[-1])]:
            verdict.problems["lost"] = f"resumed at {resumed} with checkpoints {checkpoints}"
        return verdict

    def _begin(self, trial: Trial) -> None:
        world = self._world
        world.restore(trial.state)
        if trial.faults and trial.command in OUTPUTS and self._chance.random() < 0.7:  # else there is an earlier one
            output = world.trial / OUTPUTS[trial.command]
            output.unlink() if output.is_file() else shutil.rmtree(output)

    def _judge_fault(self, verdict: Verdict, fault: Fault, ended: Ended) -> None:
        """Judge the run that the fault happened to."""
        if ended.operations:
            verdict.where = f"{ended.operations[-1][1]} {kind_of_file(ended.operations[-1][2])}"
        else:
            verdict.where = f"after {fault.seconds:.2f} s"
        self._judge_message(verdict, ended)
        if ended.code == 0:
            verdict.fired = bool(ended.operations)
        elif ended.code is None:
            verdict.problems["hung"] = ended.output[-900:]
        elif ended.code not in ((-fault.signal, 130) if fault.signal else (2,)):
            verdict.problems.setdefault("unclear", f"{ended.code}: {ended.output[-900:]}")
        elif ended.code == 2:
            verdict.ending = "told"

    def _judge_message(self, verdict: Verdict, ended: Ended) -> None:
        """Look for tracebacks, and for an error of more or less than one paragraph."""
        if re.search(r"Traceback|Exception ignored|Fatal Python error|terminate called", ended.output):
            verdict.problems["traceback"] = ended.output[-2500:]
        errors = re.findall(r"^error: .*", ended.output, re.MULTILINE)
        if ended.code == 2 and (len(errors) != 1 or len(ended.output[ended.output.index(errors[0]) :]) > 2000):
            verdict.problems["unclear"] = ended.output[-1500:]

    def _judge_outcome(self, verdict: Verdict, printed: str) -> None:
        trial, expected = verdict.trial, self._expected[verdict.trial.command]
        try:
            found = outcome(self._world, trial.command)
            differing = {name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)}
        except (OSError, ValueError, KeyError) as error:
            differing = {repr(error)}
        damaged = {Path(path).name for path in trial.damaged}
        if differing and differing <= damaged and all(name in printed for name in [*differing, "warning: "]):
            verdict.ending = "told"  # a damaged file that nothing depends on is named, and stays damaged
        elif differing:
            verdict.problems["silent" if trial.damaged else "lost"] = f"differ: {sorted(differing)[:5]}"
        partial = re.compile(r"tmp$|\.tmp[.-]|\.old$|(^|/)\.[^/]+\.[0-9a-f]{32}$")
        paths = (str(path.relative_to(self._world.trial)) for path in self._world.trial.rglob("*"))
        if left := [path for path in paths if partial.search(path)]:
            verdict.problems["left over"] = ", ".join(left[:5])

    def _damage(self, kind: str, file: Path) -> bytes:
        """Flip a bit of a file, or cut it off. Return what it was."""
        content = file.read_bytes() if file.is_file() else b""
        if content:
            at = self._chance.randrange(len(content))
            flipped = bytes([content[at] ^ 1 << self._chance.randrange(8)])
            file.write_bytes(content[:at] if kind == "cut off" else content[:at] + flipped + content[at + 1 :])
        return content


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="faults (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of their choice (default: 0)")
    parser.add_argument("--workdir", type=Path, required=True, help="a folder for the runs; it is emptied")
    parser.add_argument("--output", type=Path, help="a JSON file for the counts and all trials")
    options = parser.parse_args()
    options.workdir.mkdir(parents=True, exist_ok=True)
    load_library(options.workdir)
    world = World(options.workdir.resolve())
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(world.base / "compiled")
    for name in ("api", "cli", "apps.embed", "evaluation.geometry", "evaluation.runner"):  # so that no worker has to
        importlib.import_module(f"diffcse_jax.{name}")
    for name in ("inputs", "trial", "kept"):
        shutil.rmtree(world.base / name, ignore_errors=True)
    make_inputs(world.inputs)
    judge = Judge(world, options.seed)
    observed = judge.observe()
    files = {
        state.name: sorted(str(path.relative_to(state)) for path in state.rglob("*") if path.is_file())
        for state in (world.base / "kept").iterdir()
    }
    chance, chosen = random.Random(options.seed), []
    for kind, share in SHARES.items():
        source = trials(kind, observed, files, chance)
        chosen += [next(source) for _ in range(max(1, round(share * options.count / sum(SHARES.values()))))]
    chance.shuffle(chosen)
    verdicts: list[Verdict] = []
    for number, trial in enumerate(chosen, 1):
        verdicts.append(verdict := judge.judge(trial))
        ending = verdict.ending if verdict.fired else "did not happen"
        problems = "".join(f"\n    {name}: {text}" for name, text in verdict.problems.items())
        where = f"{trial.kind} ({trial.state} {trial.command}: {verdict.where})"
        print(f"{number}/{len(chosen)} {where}: {ending}{problems}", flush=True)
        found = document(verdicts, options.seed)
        if options.output:
            options.output.write_text(json.dumps(found, indent=1) + "\n")
    print(found["faults"], "faults:", found["ended"], "problems:", found["problems"])
    return 1 if any(verdict.problems for verdict in verdicts) else 0


def document(verdicts: Sequence[Verdict], seed: int) -> dict[str, Any]:
    """The counts and all trials, for a JSON file."""
    happened = [verdict for verdict in verdicts if verdict.fired]
    counts = collections.Counter((each.trial.command, each.trial.kind, each.ending) for each in happened)
    return {
        "command": f"python tests/faults.py --count {len(verdicts)} --seed {seed}",
        "versions": {name: version(name) for name in ("jax", "orbax-checkpoint", "tensorstore", "pyarrow")},
        "faults": len(happened),
        "ended": dict(collections.Counter(verdict.ending for verdict in happened)),
        "problems": {name: sum(name in verdict.problems for verdict in happened) for name in PROBLEMS},
        "counts": [{"command": c, "kind": k, "ended": e, "n": n} for (c, k, e), n in sorted(counts.items())],
        "trials": [dataclasses.asdict(verdict) for verdict in verdicts],
    }


if __name__ == "__main__":
    sys.exit(main())
