"""The runs of a study, one or several at a time. A run's folder holds its state.

run.json         the run: row, seed, configuration      log.txt      what its commands printed
results.json     its scores: the run is done            failure.txt  why the last attempt failed
evaluation.json  the scores in detail                   study.lock   held while a study works on the run
"""

import collections
import contextlib
import dataclasses
import itertools
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from diffcse_jax.apps.study.plan import Plan, Run
from diffcse_jax.config import Config, flat, machine_keys
from diffcse_jax.errors import CheckpointError, ConfigError, InUseError, UserError
from diffcse_jax.io import CHECKPOINTS, disk_errors, lock, read_json_object, write_json, write_text
from diffcse_jax.run_folder.folder import HEADS

RUN, RESULTS, EVALUATION = "run.json", "results.json", "evaluation.json"
LOG, FAILURE, LOCK = "log.txt", "failure.txt", "study.lock"
NOT_STARTED = "not started"
SAFE = "What the runs have saved is not affected."
VISIBLE = "CUDA_VISIBLE_DEVICES"

_RUN_TYPES = {"row": str, "seed": int | None, "pooler": str | None, "workdir": str, "config": dict, "overrides": dict}
_RESULTS_TYPES = {"asked": list, "pooler": str, "metric": str, "dev_text": str, "scores": dict, "missing": dict}

Environment = Mapping[str, str]  # variables for the processes of a worker
Work = Callable[[Run, Environment, TextIO], None]  # does a run; its processes keep the lock file open


class RunFailed(Exception):
    """A run failed. The message is the reason."""


class NotTrained(Exception):
    """The encoder of a fine-tuning is not trained yet."""


class Stopped(Exception):
    """The study was asked to stop."""


# The state of a run


def is_trained(run: Run) -> bool:
    """Tell whether the run's encoder is there. Training ends with the export."""
    return run.seed is None or (run.workdir / "export").is_dir()


def read_record(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `run.json`.

    Raises:
        CheckpointError: The file is damaged. The message says what to do.
    """
    try:
        record = read_json_object(folder / RUN)
        _require(record, _RUN_TYPES)
        Config.from_dict(record["config"])
    except (UserError, ValueError) as error:
        raise CheckpointError(
            f"{folder / RUN} is damaged ({error}). Restore it, or delete {folder} to train the run again"
        ) from error
    return record


def _read_results(folder: Path) -> dict[str, Any]:
    try:
        results = read_json_object(folder / RESULTS)
        _require(results, _RESULTS_TYPES)
        for name, score in {"dev": results.get("dev"), **results["scores"]}.items():
            if type(score) not in (int, float) or not math.isfinite(score):
                raise ValueError(f"the score {name} is not a finite number: {score!r}")
    except (UserError, ValueError) as error:
        raise CheckpointError(
            f"{folder / RESULTS} is damaged ({error}). Run the study without --report to score the run again"
        ) from error
    return results


def _require(content: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    for key, expected in types.items():
        if not isinstance(content.get(key, ...), expected):
            raise ValueError(f"{key!r} is missing or has the wrong type")


def results_of(run: Run) -> dict[str, Any] | None:
    """Return the content of the run's `results.json`, or None unless the run is done with the study's tasks."""
    if not (run.folder / RESULTS).is_file():
        return None
    try:
        read_record(run.folder)
        results = _read_results(run.folder)
    except CheckpointError:
        return None
    return results if results["asked"] == list(run.tasks) else None


def state_of(run: Run) -> str:
    """Describe the state of a run that is not done."""
    try:
        if (run.folder / LOCK).is_file():
            lock(run.folder / LOCK).close()
        for name, read in ((RUN, read_record), (RESULTS, _read_results)):
            if (run.folder / name).is_file():
                read(run.folder)
    except InUseError as error:
        return f"in progress: {error}"
    except CheckpointError as error:
        return str(error)
    failure = run.folder / FAILURE
    if failure.is_file():
        reason = failure.read_text(encoding="utf-8", errors="replace").strip()
        return f"failed: {reason} (see {run.folder / LOG})"
    return "started" if (run.folder / RUN).is_file() else NOT_STARTED


def has_failed(run: Run) -> bool:
    """Tell whether the run's last attempt failed."""
    return results_of(run) is None and (run.folder / FAILURE).is_file()


def check_same(runs: Sequence[Run]) -> None:
    """Refuse folders with results or checkpoints of other configurations.

    Raises:
        ConfigError: The message names the first such run and its keys.
    """
    for run in runs:
        with contextlib.suppress(CheckpointError):  # a damaged record fails its run alone
            changed = _changes(run)
            if changed and _holds_work(run.folder):
                raise ConfigError(
                    f"{run.folder} holds {run.label} with another configuration. Give another --workdir, or the same "
                    "overrides:\n  " + "\n  ".join(changed)
                )


def check_earlier(runs: Sequence[Run]) -> None:
    """Refuse an earlier study that has not trained what these runs need, or has with another configuration.

    Raises:
        ConfigError: The message names the first such run.
    """
    for run in (run.start or run for run in runs):
        if run.workdir != run.folder:
            if not is_trained(run) or not (run.workdir / RUN).is_file():
                raise ConfigError(f"--encoders: no study has trained {run.label} in {run.workdir}")
            read_record(run.workdir)
            check_same([dataclasses.replace(run, folder=run.workdir)])


def _changes(run: Run) -> list[str]:
    """Return the keys that results depend on and that differ in the folder's `run.json`."""
    if not (run.folder / RUN).is_file():
        return []
    record = read_record(run.folder)
    then, now = flat(Config.from_dict(record["config"]).to_dict()), flat(run.config.to_dict())
    then["pooler"], now["pooler"] = record["pooler"], run.pooler
    ignored = set(machine_keys())
    if run.start:
        then["start"], now["start"] = record.get("start"), run.start.label
        ignored |= {"model.name_or_path"} if run.start.seed is not None else set()  # a folder, which may be moved
    changed = [key for key in now if then.get(key) != now[key] and key not in ignored]
    return [f"{key}: {then.get(key)!r} then, {now[key]!r} now" for key in changed]


def _holds_work(folder: Path) -> bool:
    stages = (folder, folder / HEADS)
    return (folder / RESULTS).is_file() or any(any((stage / CHECKPOINTS).glob("[0-9]*")) for stage in stages)


# Doing the runs


def log_line(message: str) -> None:
    """Print a line for the user. It does not ask JAX for its devices, which belong to the runs."""
    print(message, file=sys.stderr, flush=True)


def work_through(
    runs: Sequence[Run], environments: Sequence[Environment], work: Work, stopped: Callable[[], bool]
) -> None:
    """Do all runs that are not done and that no other process works on. A failed run does not stop the others.

    Args:
        runs: The runs, in the order to start them.
        environments: One for each worker. Workers do runs at the same time.
        work: Does one run.
        stopped: Returns True once no further run may start.
    """
    names = {run.label: f"run {number} of {len(runs)}: {run.label}" for number, run in enumerate(runs, 1)}
    pending = [run for run in runs if results_of(run) is None]
    if len(pending) < len(runs):
        log_line(f"{len(runs) - len(pending)} of {len(runs)} runs are done already")
    for _ in range(2):  # the second time for runs that others worked on, in case those were killed
        queue, pending = collections.deque(pending), []

        def worker(
            environment: Environment, queue: collections.deque[Run] = queue, skipped: list[Run] = pending
        ) -> None:
            while not stopped():
                try:
                    run = queue.popleft()
                except IndexError:
                    return
                try:
                    _attempt(run, names[run.label], environment, work)
                except (InUseError, NotTrained) as error:
                    log_line(f"{names[run.label]}: skipped: {error}")
                    skipped.append(run)

        with ThreadPoolExecutor(len(environments)) as pool:
            for finished in [pool.submit(worker, environment) for environment in environments]:
                finished.result()


def _attempt(run: Run, name: str, environment: Environment, work: Work) -> None:
    """Do one run, unless another process has done it meanwhile.

    Raises:
        InUseError: Another process works on the run.
        NotTrained: The run is a fine-tuning whose encoder is not there.
        DiskError: The folder cannot be written.
    """
    if run.start and not is_trained(run.start):
        raise NotTrained(f"{run.start.label} is not trained. If another study trained it, give --encoders")
    with lock(run.folder / LOCK) as held:
        if results_of(run) is not None:
            return
        with disk_errors(run.folder, safe=SAFE):
            (run.folder / FAILURE).unlink(missing_ok=True)
        log_line(f"{name}: started in {run.folder}")
        try:
            try:
                changed = _changes(run)
            except CheckpointError as error:
                raise RunFailed(str(error)) from error
            with disk_errors(run.folder, safe=SAFE):
                if changed and not _holds_work(run.folder):  # training would refuse to resume with other settings
                    for path in {*run.folder.iterdir()} - {run.folder / LOCK}:
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
                write_json(run.folder / RUN, run.record)
            work(run, environment, held)
        except RunFailed as error:
            with disk_errors(run.folder, safe=SAFE):
                write_text(run.folder / FAILURE, f"{error}\n")
            log_line(f"{name}: failed: {error}")
        except Stopped:
            log_line(f"{name}: stopped")
        else:
            log_line(f"{name}: done")


class Commands:
    """The processes of a study. Each writes to its run's log. A signal to the study stops all of them."""

    def __init__(self) -> None:
        self.stopped = False
        self._running: set[subprocess.Popen] = set()
        self._guard = threading.RLock()  # the main thread may hold it when a signal arrives

    def call(self, command: Sequence[str], log: Path, environment: Environment, held: TextIO, name: str = "") -> None:
        """Run a command to its end and print its lines.

        The command writes to the log directly and holds the lock file, so that it survives the end of the study.

        Args:
            command: The command.
            log: The file that the command's output is appended to.
            environment: The command's environment variables.
            held: The locked file.
            name: What to print before each line.

        Raises:
            RunFailed: The command failed. The message is its last error.
            Stopped: The study was asked to stop.
        """
        with disk_errors(log, safe=SAFE):
            file = log.open("ab")
            file.write(f"$ {shlex.join(command)}\n".encode())
            file.flush()
        with file:
            start = file.tell()
            with self._guard:
                if self.stopped:
                    raise Stopped
                process = subprocess.Popen(
                    command,
                    env={**environment, "PYTHONUNBUFFERED": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches only the study, which passes it on once
                    pass_fds=() if sys.platform == "win32" else (held.fileno(),),
                )
                self._running.add(process)
            code = _follow(process, log, start, name)
            with self._guard:
                self._running.discard(process)
        if code == 0:
            return
        if self.stopped:
            raise Stopped
        ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        raise RunFailed(f"{last_error(log, start)} ({ended})")

    def stop(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal: pass it on, so that training saves and stops."""
        with self._guard:
            self.stopped = True
            for process in self._running:
                process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    @contextlib.contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """Stop all processes at SIGINT, SIGTERM and SIGHUP inside the block."""
        names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        previous = {name: signal.signal(getattr(signal, name), self.stop) for name in names}
        try:
            yield
        finally:
            for name, handler in previous.items():
                signal.signal(getattr(signal, name), handler)


def _follow(process: subprocess.Popen, log: Path, start: int, name: str) -> int:
    """Print the new lines of a log until the process ends, and return its exit code."""
    rest = b""
    with log.open("rb") as file:
        file.seek(start)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.5)
            *lines, rest = (rest + file.read()).split(b"\n")
            if process.returncode is not None and rest:
                lines.append(rest)
            for line in lines:
                log_line(f"{name}{line.decode(errors='replace').rpartition(chr(13))[2]}")
            if process.returncode is not None:
                return process.returncode


def last_error(log: Path, start: int) -> str:
    """Return why a command failed: its last error after this byte of the log, or else its last line."""
    with log.open("rb") as file:
        file.seek(start)
        text = file.read().decode("utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"error: |[\w.]*(Error|Exception|Exit|Interrupt)\b", line)]
    return (errors or lines or ["it printed nothing"])[-1]


def train_and_score(plan: Plan, commands: Commands) -> Work:
    """Return the work of a run: `diffcse train` or `diffcse finetune` in its folder, then its scores."""

    def work(run: Run, environment: Environment, held: TextIO) -> None:
        python, folder, name = [sys.executable, "-m"], str(run.folder), f"[{run.label}] "
        if run.start or not is_trained(run):  # a fine-tuning writes predictions after the export
            settings = [*plan.command_settings(run), "--workdir", folder]
            train = [*python, "diffcse_jax.cli", "finetune" if run.start else "train", *settings]
            commands.call(train, run.folder / LOG, environment, held, name)
        score = [*python, "diffcse_jax.apps.study.score", folder, *run.tasks]
        commands.call(score, run.folder / LOG, environment, held, name)

    return work


def environments(workers: int) -> list[dict[str, str]]:
    """Return the environment variables of each worker's processes.

    Several workers share the NVIDIA GPUs of the host; each gets its own. Other devices are visible to all workers.

    Raises:
        ConfigError: There is less than one worker, or there are fewer GPUs than workers.
    """
    if workers < 1:
        raise ConfigError(f"--workers: expected at least 1, got {workers}")
    own = dict(os.environ)
    gpus = _visible_gpus(own) if workers > 1 else []
    if not gpus:
        return [own] * workers
    if len(gpus) < workers:
        raise ConfigError(f"--workers {workers}: each worker needs its own GPU, and there are {len(gpus)}")
    bounds = [worker * len(gpus) // workers for worker in range(workers + 1)]
    return [own | {VISIBLE: ",".join(gpus[start:end])} for start, end in itertools.pairwise(bounds)]


def _visible_gpus(environment: Environment) -> list[str]:
    if "cpu" in environment.get("JAX_PLATFORMS", "").split(",")[:1]:
        return []
    if VISIBLE in environment:
        return [gpu.strip() for gpu in environment[VISIBLE].split(",") if gpu.strip() not in ("", "-1")]
    if not (command := shutil.which("nvidia-smi")):
        return []
    query = [command, "--query-gpu=index", "--format=csv,noheader"]
    listing = subprocess.run(query, capture_output=True, text=True, check=False)
    return listing.stdout.split() if listing.returncode == 0 else []
