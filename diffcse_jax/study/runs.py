"""The runs of a study, one after another or several at a time. The state of a run is what lies in its folder.

    run.json         the run: row, seed, whole configuration       log.txt     what its commands printed
    results.json     its scores: the run is done                   failure.txt the reason why it ended before that
    evaluation.json  the same in detail, as eval.py writes it      study.lock  held while a study works on the run

beside what training writes (`storage/workdir.py`).
"""

import collections
import contextlib
import dataclasses
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

from diffcse_jax.config import Config, flat, machine_keys
from diffcse_jax.errors import ConfigError, InUseError
from diffcse_jax.io import CHECKPOINTS, disk_errors, lock, read_json, write_json, write_text
from diffcse_jax.run_folder.folder import HEADS
from diffcse_jax.study.plan import Plan, Run

RUN = "run.json"
RESULTS = "results.json"
EVALUATION = "evaluation.json"
LOG = "log.txt"
FAILURE = "failure.txt"
LOCK = "study.lock"

NOT_BEGUN = "not begun"
SAFE = "What the runs have saved stays as it is."

Environment = Mapping[str, str]  # variables for the processes of a worker
Work = Callable[[Run, Environment, TextIO], None]  # does a run; its lock file is kept open by what it starts


class RunFailed(Exception):
    """A command of a run ended with an error; the message is its reason."""


class NotTrained(Exception):
    """The encoder that a fine-tuning begins with is not there yet."""


class Stopped(Exception):
    """The study was asked to stop."""


def is_trained(run: Run) -> bool:
    """True if its encoder is there: training ends with the export."""
    return run.seed is None or (run.workdir / "export").is_dir()


def results_of(run: Run) -> dict[str, Any] | None:
    """The content of its `results.json`; None unless the run is done, with these tasks."""
    path = run.folder / RESULTS
    if not path.is_file():
        return None
    results = read_json(path)
    return results if results["asked"] == list(run.tasks) else None


def state_of(run: Run) -> str:
    """The state of a run that is not done, for people."""
    try:
        if (run.folder / LOCK).is_file():
            lock(run.folder / LOCK).close()
    except InUseError as error:
        return f"in progress: {error}"
    failure = run.folder / FAILURE
    if failure.is_file():
        return f"failed: {failure.read_text(encoding='utf-8').strip()} (see {run.folder / LOG})"
    return "begun" if (run.folder / RUN).is_file() else NOT_BEGUN


def has_failed(run: Run) -> bool:
    """True if its last attempt ended with an error."""
    return results_of(run) is None and (run.folder / FAILURE).is_file()


def check_same(runs: Sequence[Run]) -> None:
    """Refuses folders that hold results or checkpoints of other configurations.

    Raises:
        ConfigError: naming the first such run, and the keys.
    """
    for run in runs:
        changed = _changes(run)
        if changed and _holds_work(run.folder):
            raise ConfigError(
                f"{run.folder} holds {run.label} with another configuration; give another --workdir, or the same "
                "overrides:\n  " + "\n  ".join(changed)
            )


def _changes(run: Run) -> list[str]:
    """What its folder's `run.json` has otherwise, of the keys that results depend on."""
    path = run.folder / RUN
    if not path.is_file():
        return []
    record = read_json(path)
    then, now = flat(Config.from_dict(record["config"]).to_dict()), flat(run.config.to_dict())
    then["pooler"], now["pooler"] = record["pooler"], run.pooler
    free: frozenset[str] | set[str] = machine_keys()
    if run.start:
        then["start"], now["start"] = record.get("start"), run.start.label
        free = {*free, "model.name_or_path"} if run.start.seed is not None else free  # a folder, which may be moved
    changed = [key for key in now if then.get(key) != now[key] and key not in free]
    return [f"{key}: {then.get(key)!r} then, {now[key]!r} now" for key in changed]


def check_earlier(runs: Sequence[Run]) -> None:
    """Refuses an earlier study that has not trained what these runs need, or has with another configuration.

    Raises:
        ConfigError: naming the first such run.
    """
    for run in (run.start or run for run in runs):
        if run.workdir != run.folder:
            if not is_trained(run) or not (run.workdir / RUN).is_file():
                raise ConfigError(f"--encoders: no study has trained {run.label} in {run.workdir}")
            check_same([dataclasses.replace(run, folder=run.workdir)])


def _holds_work(folder: Path) -> bool:
    stages = (folder, folder / HEADS)
    return (folder / RESULTS).is_file() or any(any((stage / CHECKPOINTS).glob("[0-9]*")) for stage in stages)


def work_through(
    runs: Sequence[Run],
    environments: Sequence[Environment],
    work: Work,
    stopped: Callable[[], bool],
) -> None:
    """Does all runs that are not done and that nobody else works on. A failure ends its run alone.

    Args:
        runs: in the order to begin them.
        environments: one for each worker; as many runs are done at a time.
        work: does one run.
        stopped: true once no further run shall begin.
    """
    left_out = _pass(runs, environments, work, stopped)
    _pass(left_out, environments, work, stopped)  # who worked on them may be done since, or killed


def _pass(
    runs: Sequence[Run],
    environments: Sequence[Environment],
    work: Work,
    stopped: Callable[[], bool],
) -> list[Run]:
    """Goes once through the runs and returns those that others work on, or whose start is not trained yet."""
    pending = collections.deque(run for run in runs if results_of(run) is None)
    left_out: list[Run] = []

    def worker(environment: Environment) -> None:
        while pending and not stopped():
            try:
                run = pending.popleft()
            except IndexError:  # another worker was faster
                return
            try:
                _attempt(run, environment, work)
            except (InUseError, NotTrained) as error:
                report(f"{run.label}: left out, since {error}")
                left_out.append(run)

    with ThreadPoolExecutor(len(environments)) as pool:
        for finished in [pool.submit(worker, environment) for environment in environments]:
            finished.result()
    return left_out


def _attempt(run: Run, environment: Environment, work: Work) -> None:
    """One run, unless it is done meanwhile.

    Raises:
        InUseError: another process works on it.
        NotTrained: it is a fine-tuning, and its start is not done.
        DiskError: its folder cannot be written.
    """
    if run.start and not is_trained(run.start):
        raise NotTrained(f"{run.start.label} is not trained" + _where_trained(run))
    with lock(run.folder / LOCK) as held:
        if results_of(run) is not None:
            return
        with disk_errors(run.folder, safe=SAFE):
            if _changes(run) and not _holds_work(run.folder):
                _clear(run.folder)
            write_json(run.folder / RUN, run.record)
            (run.folder / FAILURE).unlink(missing_ok=True)
        report(f"{run.label}: in {run.folder}")
        try:
            work(run, environment, held)
        except RunFailed as error:
            with disk_errors(run.folder, safe=SAFE):
                write_text(run.folder / FAILURE, f"{error}\n")
            report(f"{run.label}: failed: {error}")
        except Stopped:
            report(f"{run.label}: stopped")
        else:
            report(f"{run.label}: done")


def _where_trained(run: Run) -> str:
    """A hint for those who left `--encoders` out: the folder that a fine-tuning's encoder was in when it began."""
    path = run.folder / RUN
    then = Path(read_json(path)["config"]["model"]["name_or_path"]) if path.is_file() else None
    return f"; its encoder was in {then}: give --encoders again" if then and (then / "export").is_dir() else ""


def _clear(folder: Path) -> None:
    """Removes what an attempt left that came to nothing, since training would refuse to go on with other settings."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


class Commands:
    """Processes of a study: each writes to a log, and all of them end when the study is asked to stop."""

    def __init__(self) -> None:
        self.stopped = False
        self._running: set[subprocess.Popen] = set()
        self._guard = threading.RLock()  # one that the main thread may hold when a signal comes

    def call(self, command: Sequence[str], log: Path, environment: Environment, held: TextIO) -> None:
        """Runs a command to its end.

        The lock file `held` stays locked as long as the command lives, even if the study is killed.

        Raises:
            RunFailed: with the last line that it printed.
            Stopped: the study is to stop.
        """
        with disk_errors(log, safe=SAFE):
            file = log.open("ab")
            file.write(f"$ {shlex.join(command)}\n".encode())
            file.flush()
        with file:
            before = file.tell()
            with self._guard:
                if self.stopped:
                    raise Stopped
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches the study alone, which passes it on once
                    pass_fds=() if sys.platform == "win32" else (held.fileno(),),
                )
                self._running.add(process)
            code = process.wait()
            with self._guard:
                self._running.discard(process)
        if code == 0:
            return
        if self.stopped:
            raise Stopped
        ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        raise RunFailed(f"{last_line(log, before)} ({ended})")

    def stop(self, number: int, frame: FrameType | None = None) -> None:
        """A signal handler: passes the signal on. Training saves first on those that are passed."""
        with self._guard:
            self.stopped = True
            for process in self._running:
                process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    @contextlib.contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """Inside the block, SIGINT, SIGTERM and SIGHUP stop what runs; a run saves its state first."""
        names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        previous = {name: signal.signal(getattr(signal, name), self.stop) for name in names}
        try:
            yield
        finally:
            for name, handler in previous.items():
                signal.signal(getattr(signal, name), handler)


def train_and_score(plan: Plan, commands: Commands) -> Work:
    """The work of a run: `diffcse train` or `diffcse finetune` with its folder as workdir, then the scores."""

    def work(run: Run, environment: Environment, held: TextIO) -> None:
        python = [sys.executable, "-m"]
        # A fine-tuning is called until it has ended well: it writes predictions after the export.
        if run.start or not is_trained(run):
            command = "finetune" if run.start else "train"
            train = [*python, "diffcse_jax", command, *plan.command_settings(run), "--workdir", str(run.folder)]
            commands.call(train, run.folder / LOG, environment, held)
        score = [*python, "diffcse_jax.study.score", str(run.folder), *run.tasks]
        commands.call(score, run.folder / LOG, environment, held)

    return work


def last_line(log: Path, start: int) -> str:
    """The line of the log, from a byte on, that says best why a command failed: its last error, else its last line."""
    with log.open("rb") as file:
        file.seek(start)
        text = file.read().decode("utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"error: |[\w.]*(Error|Exception|Exit|Interrupt)\b", line)]
    return (errors or lines or ["it printed nothing"])[-1]


def report(message: str) -> None:
    """A line for the person at the terminal."""
    print(message, file=sys.stderr, flush=True)
