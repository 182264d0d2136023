"""Injects faults into small runs, and counts how they end: `python tests/faults.py --count 200`.

Each trial begins with a folder as a run leaves it (bare, fresh, begun, finished). A fault happens to a command or to a
file, and then the same command runs again. It must end as it does without a fault, bit for bit, or report in one
paragraph what is wrong and, with that put right, end so.

Signals come at a file operation or at a moment of computing. A write that SIGKILL hits is done by half. A disk is full
or read-only from a file operation on. Every kind of file gets a flipped bit or a cut-off end.
"""

import argparse
import collections
import contextlib
import dataclasses
import datetime
import errno
import functools
import hashlib
import importlib
import json
import os
import platform
import random
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "HF_HUB_OFFLINE": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1",
    "TQDM_DISABLE": "1",
}

from faulty_process import Compiled, Ended, Fault, Worker, kept, load_library

STEPS, EVERY = 5, 2
SENTENCES = 60
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PROBLEMS = ("lost", "silent", "traceback", "unclear", "hung", "left over")
PACKAGES = ("jax", "orbax-checkpoint", "tensorstore", "safetensors", "pyarrow", "tokenizers", "transformers")
UNTRAINED = ("evaluate", "embed", "load", "vectors")
OUTPUTS = {"export": "out", "evaluate": "results.json", "embed": "embedded"}


class World:
    """The folders of all trials. Each trial lives in `trial`, so that paths in files are the same in all."""

    def __init__(self, base: Path):
        self.base, self.inputs, self.trial = base, base / "inputs", base / "trial"
        self.workdir = self.trial / "workdir"
        self.export = self.workdir / "export"
        self.vectors = base / "vectors"  # that `load` and `vectors` have read

    def keep(self, state: str) -> None:
        shutil.copytree(self.trial, self.base / "kept" / state, symlinks=True)

    def restore(self, state: str) -> None:
        shutil.rmtree(self.trial, ignore_errors=True)
        shutil.copytree(self.base / "kept" / state, self.trial, symlinks=True)


@dataclasses.dataclass(frozen=True)
class Trial:
    """Faults, and where they happen."""

    kind: str
    phase: str
    state: str  # what the folder holds before
    command: str  # that the faults happen to, or that reads the damaged files
    faults: tuple[Fault, ...] = ()  # of the command's runs before the one that must end well
    damaged: tuple[str, ...] = ()  # files that are damaged before that one
    cold: bool = False  # the command has compiled nothing


# Commands, as they run in a worker.


def train(world: World) -> int:
    from diffcse_jax import api
    from diffcse_jax.config import Config, shipped_config
    from diffcse_jax.errors import reported_to_user

    config = shipped_config("diffcse_minilm")
    config.update_from_flattened_dict(
        {
            "model.name_or_path": str(world.inputs / "model"), "data.train_file": str(world.inputs / "text.txt"),
            "data.max_length": 16, "data.cache_dir": str(world.trial / "cache"), "generator.head_steps": 2,
            "generator.head_batch_size": 8, "train.batch_size": 8, "train.log_every": 1, "train.steps": STEPS,
            "eval.every": EVERY, "eval.metric": "halves_retrieval", "optim.learning_rate": 1e-3,
        }
    )  # fmt: skip
    with reported_to_user():
        api.run(Config.from_dict(config.to_dict()), world.workdir)
    return 0


def diffcse(*arguments: object) -> int:
    from diffcse_jax import cli

    return cli.main([*map(str, arguments)])


def evaluate(world: World) -> int:
    data, output = world.inputs / "senteval", world.trial / "results.json"
    options = ("--tasks", "STSBenchmark", "--data_dir", data, "--output", output)
    return diffcse("evaluate", "--model", world.export, *options)


def export(world: World) -> int:
    return diffcse("export", "--model", world.workdir, "--output", world.trial / "out")


def embed(world: World) -> int:
    options = ("--input", f"{world.inputs}/shards/*.txt", "--output", world.trial / "embedded", "--rows_per_file", 20)
    return diffcse("embed", "--model", world.export, *options)


def load(world: World) -> int:
    """A reader of the export."""
    from diffcse_jax import SentenceEncoder
    from diffcse_jax.errors import reported_to_user

    with reported_to_user():
        vectors = SentenceEncoder.from_pretrained(world.export).encode(sentences(8))
        world.vectors.write_bytes(vectors.tobytes())
    return 0


def vectors(world: World) -> int:
    """A reader of stored vectors."""
    import numpy as np

    from diffcse_jax.config import DataConfig
    from diffcse_jax.data.sources import open_corpus
    from diffcse_jax.data.token_store import build_or_open, open_vectors
    from diffcse_jax.data.tokenizer import load_tokenizer
    from diffcse_jax.errors import reported_to_user
    from diffcse_jax.search.vector_store import find_store

    with reported_to_user():
        corpus = open_corpus(DataConfig(train_file=str(world.inputs / "text.txt")))
        store = find_store(str(world.trial / "embedded"))
        assert store is not None
        tokens = build_or_open(corpus, load_tokenizer(world.inputs / "model"), 16, world.trial / "cache")
        found = open_vectors(store, corpus, tokens).gather(tokens.sentences(np.arange(len(tokens))))
        world.vectors.write_bytes(found.tobytes())
    return 0


COMMANDS = {each.__name__: each for each in (train, evaluate, export, embed, load, vectors)}


def prepare(world: World) -> None:
    """A worker's first act: what a trial does not need is left out, what costs much is done once."""
    sys.modules["diffcse_jax.export.folder"]._installed = lambda module: False  # PyTorch's readers
    sys.modules["diffcse_jax.api"].draw_curves = _no_curves
    generator, training = (sys.modules[f"diffcse_jax.training.{name}"] for name in ("generator", "train"))
    generator.make_head_training = kept(generator.make_head_training)
    training.make_train_step = kept(training.make_train_step, Compiled)


def _no_curves(workdir: Path) -> Path:
    sys.modules["diffcse_jax.run_folder.records"].read_metrics(workdir)  # as drawing does
    path = workdir / "report" / "curves.png"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"no picture")
    return path


# The world before any fault.


def sentences(count: int) -> list[str]:
    return [f"sentence {i} has the number {i * i} and {i % 7} words more" for i in range(count)]


def make_inputs(folder: Path) -> None:
    """A tiny encoder with a tokenizer of few words, text, files to embed, and scored pairs."""
    import tokenizers
    import transformers
    from tiny_model import hf_config_of, random_params

    from diffcse_jax.io import write_tensors
    from diffcse_jax.models import hf
    from diffcse_jax.models.heads import MlpProjector
    from diffcse_jax.models.transformer import Transformer

    model = folder / "model"
    (folder / "shards").mkdir(parents=True)
    model.mkdir()
    words = sorted({word for sentence in sentences(SENTENCES) for word in sentence.split()})
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *words])}
    hf_config = hf_config_of("bert", blocks=1) | {"vocab_size": len(vocabulary)}
    (model / "config.json").write_text(json.dumps(hf_config))
    config = hf.transformer_config(hf_config, source="faults")
    tensors = hf.to_hf(random_params(Transformer, config), "transformer", config)
    tensors |= hf.to_hf(random_params(MlpProjector, config), "pooler", config)
    write_tensors(model / "model.safetensors", tensors)
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {f"{name[1:-1].lower()}_token": name for name in SPECIAL}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(model)

    text = "".join(f"{sentence}\n" for sentence in sentences(SENTENCES))
    (folder / "text.txt").write_text(text)
    lines = text.splitlines(keepends=True)
    for index in range(2):
        (folder / f"shards/{index}.txt").write_text("".join(lines[index::2]))
    for split in ("dev", "test"):
        path = folder / f"senteval/STS/STSBenchmark/sts-{split}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = (f"-\t-\t-\t-\t{score}\t{words[3 * score]} is here\t{words[5 * score]}\n" for score in range(6))
        path.write_text("".join(rows))


def outcome(world: World, command: str) -> dict[str, str]:
    """What a command has made, by part: a digest of all that must not depend on faults."""
    if command in ("load", "vectors"):
        return {"vectors": _sha256(world.vectors.read_bytes())}
    if command == "evaluate":
        return {"results.json": _sha256((world.trial / OUTPUTS[command]).read_bytes())}
    if command in OUTPUTS:
        return _files(world.trial / OUTPUTS[command])
    found = _files(world.export)
    rows = [_row(line) for line in (world.workdir / "metrics.jsonl").read_bytes().splitlines()]
    found["metrics.jsonl"] = _sha256(json.dumps(rows).encode())
    found["selection.json"] = _sha256((world.workdir / "selection.json").read_bytes())
    for record in (world.workdir / "checkpoints").glob("[0-9]*/record/metadata"):
        content = json.loads(record.read_text())
        found[str(record.relative_to(world.workdir))] = json.dumps(content["digests"]["params"], sort_keys=True)
    return found


def _row(line: bytes) -> Any:
    """A row of the metrics without what differs from run to run; a spoiled one as it is."""
    try:
        row = json.loads(line)
        row.pop("sentences_per_second", None)
    except (ValueError, AttributeError):
        return repr(line)
    return row


def _files(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(folder)): _sha256(path.read_bytes()) for path in files}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def left_over(folder: Path) -> list[str]:
    """Partial files and folders that should be gone, or have another name."""
    paths = (path.relative_to(folder) for path in folder.rglob("*"))
    paths = (path for path in paths if path.parts[0] != "compiled")
    return [str(path) for path in paths if re.search(r"tmp$|\.tmp[.-]|\.old$|(^|/)\.[^/]+\.[0-9a-f]{32}$", str(path))]


def kind_of_file(path: str) -> str:
    """The path without what differs between files of one kind."""
    path = re.sub(r"(checkpoints)/\d+", r"\1/STEP", path)
    path = re.sub(r"/d/[0-9a-f]{32}", "/d/DATA", path)
    path = re.sub(r"[0-9a-f]{32}", "HASH", path)
    path = re.sub(r"tensorboard/.*", "tensorboard/EVENTS", path)
    path = re.sub(r"ocdbt.process_\d+", "ocdbt.process_N", path)
    return re.sub(r"\b\d+\.txt(\.\d{6})?", "INPUT", path)


PHASES = (
    (r"^cache/\w+/vectors", "stored vectors"),
    (r"^cache", "tokenising"),
    (r"^workdir/generator", "head training"),
    (r"^workdir/checkpoints", "save"),
    (r"^(workdir/export|out)", "export"),
    (r"^workdir/(metrics|tensorboard)", "step"),
    (r"^workdir/(start_scores|selection|selected|report)", "evaluation"),
    (r"^(results|report)", "evaluation"),
    (r"^embedded", "embed"),
    (r"^compiled", "compile"),
)


def phase_of(path: str, command: str) -> str:
    """The phase of a command that writes to a path below the trial's folder."""
    otherwise = {"train": "start", "evaluate": "evaluation"}.get(command, command)
    return next((phase for pattern, phase in PHASES if re.search(pattern, path)), otherwise)


# Which faults there are.


class Observed(NamedTuple):
    """What commands do without a fault, by state and command."""

    operations: dict[tuple[str, str], list[tuple[int, str, str]]]  # number, name, path
    seconds: dict[tuple[str, str], float]  # of computing


# Phases of these runs that others do not have, or that cost more there.
ONLY = {
    ("bare", "train"): ("compile",),
    ("fresh", "train"): ("tokenising", "start", "head training"),
    ("finished", "load"): (),
    ("finished", "vectors"): ("stored vectors",),
}
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT}
ERRORS = {"disk full": errno.ENOSPC, "read-only": errno.EROFS}
# Of 200 trials; half of the signals come at moments of computing.
SHARES = {
    "SIGKILL": 22, "SIGTERM": 14, "Ctrl-C": 18, "disk full": 46, "read-only": 28, "flipped bit": 40, "cut off": 22,
}  # fmt: skip
SHARES["two at once"] = 200 - sum(SHARES.values())


def trials(count: int, seed: int, observed: Observed, files: Sequence[str]) -> list[Trial]:
    """So many faults of all kinds, spread evenly over phases and kinds of files."""
    chance = random.Random(seed)
    numbers = {kind: max(1, round(share * count / 200)) for kind, share in SHARES.items()}
    if ("begun", "train") not in observed.operations:
        del numbers["SIGTERM"], numbers["two at once"]  # of training
    numbers["disk full"] += max(0, count - sum(numbers.values()))
    chosen: list[Trial] = []
    for kind, number in numbers.items():
        makers: dict[str, Callable[[], Iterator[Trial]]] = {
            "flipped bit": lambda kind=kind: _damages(kind, files, chance),
            "cut off": lambda kind=kind: _damages(kind, files, chance),
            "two at once": lambda: _pairs(observed, files, chance),
        }
        source = makers.get(kind, lambda kind=kind: _processes(kind, observed, chance))()
        chosen += [next(source) for _ in range(number)]
    chance.shuffle(chosen)
    return chosen


def _processes(kind: str, observed: Observed, chance: random.Random) -> Iterator[Trial]:
    """Faults of running commands, evenly in all phases and quarters of computing."""
    places: dict[tuple[str, str, str, int], list[Fault]] = collections.defaultdict(list)
    what = (SIGNALS.get(kind, 0), ERRORS.get(kind, 0))
    for (state, command), operations in observed.operations.items():
        if kind == "SIGTERM" and command != "train":
            continue  # only training listens to SIGTERM; to others it is what SIGKILL is
        for number, name, path in operations:
            phase = phase_of(path, command)
            if kind == "disk full" and not re.match("p?write|mkdir|f?data?sync|sendfile|copy|link", name):
                continue  # nothing that needs room
            if phase in ONLY.get((state, command), [phase]):
                places[phase, state, command, 0].append(Fault(*what, operation=number))
        if kind in SIGNALS and state != "bare" and ONLY.get((state, command), True):
            for quarter in range(1, 5):
                shares = [(quarter - chance.random()) / 4 for _ in range(20)]
                faults = [Fault(*what, seconds=share * observed.seconds[state, command]) for share in shares]
                places["computing", state, command, quarter] = faults
    order = sorted(places)
    while True:
        chance.shuffle(order)
        for place in list(order):
            is_cold = place[1] == "bare"
            if is_cold:  # once, since it costs much
                order.remove(place)
            yield Trial(kind, *place[:3], (chance.choice(places[place]),), cold=is_cold)


def _damages(kind: str, files: Sequence[str], chance: random.Random) -> Iterator[Trial]:
    """Spoiled files: by turns of all kinds."""
    untrained = not any(path.startswith("workdir/checkpoints") for path in files)
    by_kind = collections.defaultdict(list)
    for path in files:
        by_kind[kind_of_file(path)].append(path)
    order = sorted(by_kind)
    while True:
        chance.shuffle(order)
        for name in order:
            path = chance.choice(by_kind[name])
            state, command = _reader(path, chance, untrained=untrained)
            yield Trial(
                kind, phase_of(path, "train"), state, command, damaged=(path,), cold=path.startswith("compiled")
            )


def _reader(path: str, chance: random.Random, *, untrained: bool) -> tuple[str, str]:
    """The state in which a file is spoiled, and the command that reads it."""
    if path.startswith("workdir/export"):
        return "finished", "load"
    if path.startswith("embedded"):
        return "finished", "vectors" if path.endswith(".parquet") else "embed"
    if path.startswith("cache"):
        return "finished", chance.choice(["vectors"] if untrained or "vectors" in path else ["vectors", "train"])
    if path.startswith("workdir") and not re.search(r"checkpoints|selection|report", path):
        return chance.choice([("begun", "train"), ("finished", "train"), ("finished", "export")])
    return "finished", "train"


def _pairs(observed: Observed, files: Sequence[str], chance: random.Random) -> Iterator[Trial]:
    """Two faults: a spoiled checkpoint after a kill, a kill while going on, a signal on a full disk, two files."""
    begun = observed.operations["begun", "train"]
    saving = [number for number, _, path in begun if phase_of(path, "train") == "save"]
    checkpoints = [path for path in files if re.search(r"checkpoints/\d+/(params|opt_state|record)", path)]
    others = [path for path in files if re.match(r"workdir/(encoder|metrics|start|generator)|cache/\w+/\w+\.", path)]
    while True:
        first, second = (Fault(signal.SIGKILL, operation=chance.choice(saving)) for _ in range(2))
        newest = next((path for path in checkpoints if "checkpoints/2/" in path), checkpoints[0])
        yield Trial("two at once", "save", "begun", "train", (first,), (newest,))
        full = Fault(error=errno.ENOSPC, operation=chance.choice(saving))
        yield Trial("two at once", "save", "begun", "train", (full, Fault(signal.SIGTERM, operation=full.operation)))
        damaged = tuple(chance.sample(others, 2))
        yield Trial("two at once", phase_of(damaged[0], "train"), "finished", "train", damaged=damaged)
        yield Trial("two at once", "save", "begun", "train", (first, second))
        damaged = (chance.choice(checkpoints), chance.choice(others))
        yield Trial("two at once", "save", "finished", "train", damaged=damaged)


# One trial, and how it ended.


@dataclasses.dataclass
class Verdict:
    """How a trial ended."""

    trial: Trial
    ending: str = "identical"  # or "told": one paragraph first
    problems: dict[str, str] = dataclasses.field(default_factory=dict)  # of `PROBLEMS`, with what was seen
    fired: bool = True  # the fault did happen
    where: str = ""
    phase: str = ""


class Judge:
    """Runs trials and compares their outcomes with those without faults."""

    def __init__(self, world: World, worker: Worker, seed: int, *, untrained: bool):
        self._world, self._worker, self._untrained = world, worker, untrained
        self._chance = random.Random(seed)
        self._expected: dict[str, dict[str, str]] = {}

    def observe(self) -> Observed:
        """Makes the states and learns what each command does and gives without a fault."""
        from tiny_model import HIDDEN

        from diffcse_jax.models import pooling_modules

        world, observed = self._world, Observed({}, {})
        world.trial.mkdir()

        def observe(state: str, command: str) -> None:
            ended = self._clean(command)
            paths = [(name, str(Path(path).relative_to(world.trial))) for _, name, path in ended.operations]
            # Programs are compiled, and kept on disk, in the trials of `bare` alone.
            own = [each for each in paths if state == "bare" or not each[1].startswith("compiled")]
            observed.operations[state, command] = [(number, *each) for number, each in enumerate(own, 1)]
            observed.seconds[state, command] = ended.seconds
            self._expected[command] = outcome(world, command)

        if self._untrained:  # there is only the state with all that is made of it
            shutil.copytree(world.inputs / "model", world.export)
            pooling_modules.write(world.export, "avg", num_blocks=1, hidden_size=HIDDEN, head=None)
            for command in UNTRAINED:
                observe("finished", command)
            world.keep("finished")
            return observed
        world.keep("bare")
        observe("bare", "train")
        for path in world.trial.iterdir():
            if path.name != "compiled":
                shutil.rmtree(path)
        world.keep("fresh")
        observe("fresh", "train")
        for command in ("export", "evaluate", "embed", "load", "vectors"):
            observe("finished", command)
        world.keep("finished")
        expected = self._expected["train"]
        saving = [number for number, _, path in observed.operations["fresh", "train"] if "checkpoints/" in path]
        world.restore("fresh")
        self._clean("train", Fault(signal.SIGTERM, operation=saving[0]), code=130)  # stops with everything saved
        world.keep("begun")
        self._worker.renew()
        observe("begun", "train")
        if self._expected["train"] != expected:
            raise RuntimeError("a run that was stopped does not end as one that was not")
        return observed

    def _clean(self, command: str, fault: Fault | None = None, *, code: int = 0) -> Ended:
        ended = self._worker.run(command, self._world, folder=self._world.trial, fault=fault, every=True)
        if ended.code != code:
            raise RuntimeError(f"{command} ends with {ended.code} instead of {code}:\n{ended.output}")
        return ended

    def _differing(self, command: str) -> list[str]:
        try:
            found = outcome(self._world, command)
        except (OSError, ValueError, KeyError) as error:
            return [repr(error)]
        expected = self._expected[command]
        return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))

    def try_out(self, trial: Trial) -> Verdict:
        """One trial, from its state to the end that it must have."""
        verdict, world = Verdict(trial, phase=trial.phase), self._world
        self._begin(trial)
        if trial.cold:
            self._worker.renew()
        printed = ""
        for fault in trial.faults:
            ended = self._worker.run(trial.command, world, folder=world.trial, fault=fault)
            while fault.seconds > 0.001 and ended.code == 0:  # done before: a process that has compiled is faster
                fault = dataclasses.replace(fault, seconds=fault.seconds / 3)
                self._begin(trial)
                ended = self._worker.run(trial.command, world, folder=world.trial, fault=fault)
            printed += ended.output
            self._judge_fault(verdict, fault, ended)
            if fault.error and verdict.phase == "save":
                self._worker.renew()  # threads that still write end with their process
        checkpoints = _steps(world.workdir)
        spoiled = {path: self._spoil(trial, path) for path in trial.damaged}
        ended = self._worker.run(trial.command, world, folder=world.trial)
        printed += ended.output
        self._judge_message(verdict, ended)
        if ended.code == 2 and spoiled:
            verdict.ending = "told"
            for path, content in spoiled.items():
                (world.trial / path).parent.mkdir(parents=True, exist_ok=True)
                (world.trial / path).write_bytes(content)
            ended = self._worker.run(trial.command, world, folder=world.trial)
            printed += ended.output
        if ended.code != 0:
            verdict.problems["hung" if ended.code is None else "lost"] = f"{ended.code}: {ended.output[-900:]}"
            return verdict
        self._judge_outcome(verdict, printed, ended, checkpoints)
        return verdict

    def _begin(self, trial: Trial) -> None:
        world = self._world
        world.restore(trial.state)
        if trial.faults and trial.command in OUTPUTS and self._chance.random() < 0.7:  # else there is an earlier one
            output = world.trial / OUTPUTS[trial.command]
            output.unlink() if output.is_file() else shutil.rmtree(output)
        if trial.faults and trial.command == "vectors":
            for path in world.trial.glob("cache" if self._untrained else "cache/*/vectors-*"):
                shutil.rmtree(path)

    def _judge_fault(self, verdict: Verdict, fault: Fault, ended: Ended) -> None:
        """The run that the fault happened to."""
        if ended.operations:
            _, name, path = ended.operations[-1]
            path = str(Path(path).relative_to(self._world.trial))
            verdict.where, verdict.phase = f"{name} {kind_of_file(path)}", phase_of(path, verdict.trial.command)
        else:
            verdict.where = f"after {fault.seconds:.2f} s" if fault.seconds else ""
        self._judge_message(verdict, ended)
        expected = (-fault.signal, 130) if fault.signal else (2,)
        if ended.code == 0:
            verdict.fired = bool(ended.operations)
        elif ended.code is None:
            verdict.problems["hung"] = ended.output[-900:]
        elif ended.code not in expected:
            verdict.problems.setdefault("unclear", f"{ended.code}: {ended.output[-900:]}")
        elif ended.code == 2:
            verdict.ending = "told"

    def _judge_message(self, verdict: Verdict, ended: Ended) -> None:
        """No traceback; of an error one paragraph."""
        if re.search(r"Traceback|Exception ignored|Fatal Python error|terminate called", ended.output):
            verdict.problems["traceback"] = ended.output[-2500:]
        errors = re.findall(r"^error: .*", ended.output, re.MULTILINE)
        if ended.code == 2 and (len(errors) != 1 or len(ended.output[ended.output.index(errors[0]) :]) > 2000):
            verdict.problems["unclear"] = ended.output[-1500:]

    def _judge_outcome(self, verdict: Verdict, printed: str, ended: Ended, checkpoints: list[int]) -> None:
        trial = verdict.trial
        differing = self._differing(trial.command)
        named = [name for name in differing if Path(name).name in printed and "warning: " in printed]
        if differing and differing == named and set(differing) <= {Path(path).name for path in trial.damaged}:
            verdict.ending = "told"  # a damaged file that nothing depends on is named, and stays damaged
        elif differing:
            verdict.problems["silent" if trial.damaged else "lost"] = f"differ: {differing[:5]}"
        resumed = re.findall(r"resumed at step (\d+)", ended.output)
        if trial.command == "train" and checkpoints and not trial.damaged and resumed != [str(checkpoints[-1])]:
            verdict.problems["lost"] = f"resumed at {resumed} with checkpoints {checkpoints}"
        # What a process could not remove is removed once it has ended; that of trials lives on.
        if left := [path for path in left_over(self._world.trial) if f".{self._worker.process}." not in path]:
            verdict.problems["left over"] = ", ".join(left[:5])

    def _spoil(self, trial: Trial, path: str) -> bytes:
        """Flips a bit of a file, or cuts it off; returns what it was."""
        file = self._world.trial / path
        content = file.read_bytes() if file.is_file() else b""
        if not content:
            return content
        at = self._chance.randrange(len(content))
        if trial.kind == "cut off":
            file.write_bytes(content[:at])
        else:
            spoiled = bytearray(content)
            spoiled[at] ^= 1 << self._chance.randrange(8)
            file.write_bytes(bytes(spoiled))
        return content


def _steps(workdir: Path) -> list[int]:
    folder = workdir / "checkpoints"
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal()) if folder.is_dir() else []


# The command.


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="faults (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of their choice (default: 0)")
    parser.add_argument("--workdir", type=Path, required=True, help="a folder for the runs; it is emptied")
    parser.add_argument("--output", type=Path, help="a JSON file for the counts and all trials")
    parser.add_argument("--untrained", action="store_true", help="only commands that train nothing: a short form")
    options = parser.parse_args()
    options.workdir.mkdir(parents=True, exist_ok=True)
    load_library(options.workdir)
    world = World(options.workdir.resolve())
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(world.trial / "compiled")
    for name in ("api", "apps.embed", "evaluation.geometry", "evaluation.runner"):  # here, so that no worker has to
        importlib.import_module(f"diffcse_jax.{name}")
    worker = Worker(COMMANDS, functools.partial(prepare, world))
    judge = Judge(world, worker, options.seed, untrained=options.untrained)
    for name in ("inputs", "trial", "kept"):
        shutil.rmtree(world.base / name, ignore_errors=True)
    make_inputs(world.inputs)
    observed = judge.observe()
    finished = world.base / "kept" / "finished"
    files = sorted(str(path.relative_to(finished)) for path in finished.rglob("*") if path.is_file())
    if options.untrained:
        files = [path for path in files if path.startswith(("cache", "embedded"))]
    chosen, verdicts = trials(options.count, options.seed, observed, files), []
    begun = time.monotonic()
    for number, trial in enumerate(chosen, 1):
        verdict = judge.try_out(trial)
        verdicts.append(verdict)
        print(f"{number}/{len(chosen)} {time.monotonic() - begun:.0f} s: {shown(verdict)}", flush=True)
        found = document(verdicts, options.seed)
        if options.output:
            options.output.write_text(json.dumps(found, indent=1) + "\n")
    worker.renew()
    print(found["faults"], "faults:", found["ended"], "problems:", found["problems"])
    return 1 if any(verdict.problems for verdict in verdicts) else 0


def shown(verdict: Verdict) -> str:
    """A trial and how it ended."""
    trial = verdict.trial
    where = verdict.where or ", ".join(map(kind_of_file, trial.damaged))
    ending = verdict.ending if verdict.fired else "did not happen"
    problems = (f"\n    {name}: {text}" for name, text in verdict.problems.items())
    return f"{trial.kind}, {verdict.phase} ({trial.state} {trial.command}: {where}): {ending}{''.join(problems)}"


def document(verdicts: Sequence[Verdict], seed: int) -> dict[str, Any]:
    """The counts and all trials, for a JSON file."""
    happened = [verdict for verdict in verdicts if verdict.fired]
    counts = collections.Counter((verdict.phase, verdict.trial.kind, verdict.ending) for verdict in happened)
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "command": f"python tests/faults.py --count {len(verdicts)} --seed {seed}",
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "cpu_seconds": round(sum(each.ru_utime + each.ru_stime for each in usage)),
        "faults": len(happened),
        "ended": dict(collections.Counter(verdict.ending for verdict in happened)),
        "problems": {name: sum(name in verdict.problems for verdict in happened) for name in PROBLEMS},
        "counts": [{"phase": p, "kind": k, "ended": e, "n": n} for (p, k, e), n in sorted(counts.items())],
        "trials": [dataclasses.asdict(verdict) for verdict in verdicts],
    }


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
