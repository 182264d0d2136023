"""The command `diffcse study`: do the runs of a study, one or several at a time, and write its tables."""

import collections
import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from diffcse_jax.apps.study import table
from diffcse_jax.apps.study.plan import (
    EVALUATION,
    FAILURE,
    LOCK,
    LOG,
    RESULTS,
    RUN,
    Plan,
    Run,
    make_plan,
    read_record,
    read_study,
)
from diffcse_jax.apps.study.table import SAFE, log_line
from diffcse_jax.config import OWN_POOLER, Config
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.errors import CheckpointError, ConfigError, InUseError, counted, handled, reported_to_user
from diffcse_jax.evaluation import Settings, results, runner
from diffcse_jax.evaluation.backends import load_encoder
from diffcse_jax.evaluation.dev import build_dev_evaluation
from diffcse_jax.hosts import keep_compiled
from diffcse_jax.io import disk_errors, expand_path, lock, write_text
from diffcse_jax.losses.finetune import score_name
from diffcse_jax.models import hf, pooling_modules
from diffcse_jax.run_folder.records import origin, write_checked
from diffcse_jax.run_folder.saved_encoder import read_encoder
from diffcse_jax.training.networks import with_own_pooler

VISIBLE = "CUDA_VISIBLE_DEVICES"

Environment = Mapping[str, str]  # variables for the processes of a worker
Work = Callable[[Run, Environment], str]  # does a run; returns why it failed, or an empty string


def run_study(
    config: str,
    workdir: str | None = None,
    *,
    workers: int = 1,
    variants: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    tasks: str | None = None,
    start: bool = False,
    report: bool = False,
    format: str = "text",
    overrides: Sequence[str] = (),
) -> int:
    """Do the runs of a study that are not done, write its tables and print one: the command, with its options.

    Returns:
        The exit code: 0; 1 if a run failed; 3 if runs are not done for another reason; 130 if the study was stopped.
    """
    name, study = read_study(config)
    if start and OWN_POOLER not in study.start:
        study = dataclasses.replace(study, start=(OWN_POOLER, *study.start))
    if tasks is not None:
        study = dataclasses.replace(study, tasks=tuple(filter(None, tasks.split(","))))
    folder = expand_path(workdir or Path("runs") / "studies" / name)
    tunings = [argument for argument in overrides if argument.lstrip("-").startswith("finetune.")]
    trainings = [argument for argument in overrides if argument not in tunings]
    plan = make_plan(name, study, trainings, folder, tunings)
    chosen = plan.selected(variants or [], seeds or [])
    commands = Commands()
    if not report:
        of_workers = environments(workers)
        check_same(plan.runs)
        stops = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        with handled(stops, commands.stop):
            work_through(chosen, of_workers, train_and_score(plan, commands), lambda: commands.stopped)
    summary = table.write(plan, folder)
    print(table.show(summary, format), end="")
    if commands.stopped:
        return 130
    if any(run.has_failed for run in chosen):
        return 1
    return 3 if any(run.label in summary["open"] for run in chosen) else 0


def check_same(runs: Sequence[Run]) -> None:
    """Refuse folders with results or checkpoints of other configurations."""
    for run in runs:
        with contextlib.suppress(CheckpointError):  # a damaged record fails its run alone
            if changed := run.changes():
                raise ConfigError(
                    f"{run.folder} holds {run.label} with another configuration. Give another --workdir, or the same "
                    "overrides:\n  " + "\n  ".join(changed)
                )


def work_through(
    runs: Sequence[Run], environments: Sequence[Environment], work: Work, stopped: Callable[[], bool]
) -> None:
    """Do all runs that are not done and that no other process works on, in this order, until `stopped` returns True.

    There is a worker for each environment. A failed run does not stop the others.
    """
    names = {run.label: f"run {number} of {len(runs)}: {run.label}" for number, run in enumerate(runs, 1)}
    waiting = [run for run in runs if run.results() is None]
    if len(waiting) < len(runs):
        log_line(f"done already: {len(runs) - len(waiting)} of {counted(len(runs), 'run{s}')}")
    idle = collections.deque(environments)

    def attempt(run: Run) -> bool:
        """Do a run, and return whether it has to wait."""
        if stopped():
            return False
        environment = idle.popleft()
        why = _attempt(run, names[run.label], partial(work, run, environment), stopped)
        idle.append(environment)
        if why:
            log_line(f"{names[run.label]}: skipped: {why}")
        return bool(why)

    for _ in range(2):  # the second time for runs that others worked on, in case those were killed
        with ThreadPoolExecutor(len(environments)) as pool:
            waiting = [run for run, waits in zip(waiting, pool.map(attempt, waiting), strict=True) if waits]


def _attempt(run: Run, name: str, work: Callable[[], str], stopped: Callable[[], bool]) -> str:
    """Do one run, unless another process has done it meanwhile. Return why it has to wait, or an empty string."""
    if run.start and not run.start.is_trained:
        return f"{run.start.label} is not trained"
    try:
        held = lock(run.folder / LOCK)
    except InUseError as error:
        return str(error)
    with held, disk_errors(run.folder, safe=SAFE):
        if run.results() is not None:
            return ""
        (run.folder / FAILURE).unlink(missing_ok=True)
        log_line(f"{name}: started in {run.folder}")
        try:
            run.changes()  # raises an error if the record is damaged
            write_checked(run.folder / RUN, run.record)
            failure = work()
        except CheckpointError as error:
            failure = str(error)
        if failure and not stopped():
            write_text(run.folder / FAILURE, f"{failure}\n")
            log_line(f"{name}: failed: {failure}")
        else:
            log_line(f"{name}: {'stopped' if failure else 'done'}")
    return ""


class Commands:
    """The processes of a study. A signal to the study stops all of them."""

    def __init__(self) -> None:
        self.stopped = False
        self._running: set[subprocess.Popen] = set()
        self._guard = threading.RLock()  # the main thread may hold it when a signal arrives

    def call(self, command: Sequence[str], log: Path, environment: Environment, name: str = "") -> str:
        """Run a command to its end. Append its lines to a log, and print them after `name`.

        Returns:
            Why it failed: its last error, or else its last line. Empty if it did not fail.
        """
        with self._guard:
            if self.stopped:
                return "stopped"
            process = subprocess.Popen(
                command,
                env={**environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches only the study, which passes it on once
            )
            self._running.add(process)
        last, last_error = "it printed nothing", ""
        with log.open("a", buffering=1, encoding="utf-8") as file, process:
            file.write(f"$ {shlex.join(command)}\n")
            for line in process.stdout or ():
                file.write(line)
                log_line(f"{name}{line.rstrip()}")
                last = line.strip() or last
                last_error = last if re.match(r"error: |[\w.]*(Error|Exception|Exit|Interrupt)\b", last) else last_error
        with self._guard:
            self._running.discard(process)
        code = process.returncode
        ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"{last_error or last} ({ended})" if code else ""

    def stop(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal: pass it on, so that training saves and stops."""
        with self._guard:
            self.stopped = True
            for process in self._running:
                process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)


def train_and_score(plan: Plan, commands: Commands) -> Work:
    """Return the work of a run: `diffcse train` or `diffcse finetune` in its folder, then its scores."""

    def work(run: Run, environment: Environment) -> str:
        modules = [["diffcse_jax.apps.study.runs", str(run.folder), *run.tasks]]
        if run.start or not run.is_trained:  # a fine-tuning writes predictions after the export
            settings = [*plan.command_settings(run), "--workdir", str(run.folder)]
            modules.insert(0, ["diffcse_jax.cli", "finetune" if run.start else "train", *settings])
        for module in modules:
            command = [sys.executable, "-m", *module]
            if failure := commands.call(command, run.folder / LOG, environment, f"[{run.label}] "):
                return failure
        return ""

    return work


def environments(workers: int) -> list[dict[str, str]]:
    """Return the environment variables of each worker's processes.

    Several workers share the NVIDIA GPUs of the host; each gets its own. Other devices are visible to all workers.
    """
    if workers < 1:
        raise ConfigError(f"--workers: expected at least 1, got {workers}")
    own, gpus = dict(os.environ), []
    if workers > 1 and own.get("JAX_PLATFORMS", "").split(",")[0] != "cpu":
        if VISIBLE in own:
            gpus = [gpu for gpu in own[VISIBLE].split(",") if gpu.strip()]
        elif command := shutil.which("nvidia-smi"):
            query = [command, "--query-gpu=index", "--format=csv,noheader"]
            gpus = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    if not gpus:
        return [own] * workers
    if len(gpus) < workers:
        raise ConfigError(f"--workers {workers}: each worker needs its own GPU, and there are {len(gpus)}")
    return [own | {VISIBLE: ",".join(share)} for share in np.array_split(gpus, workers)]


# The process that scores a run: python -m diffcse_jax.apps.study.runs FOLDER [TASK ...]


def score(folder: Path, tasks: list[str]) -> None:
    """Score the run in a folder, and write its `evaluation.json` and, last, its `results.json`.

    That is `{"asked": tasks, "pooler", "metric": the dev metric, "dev": its score, "dev_text": identifies the text of
    the dev metric, "scores": {column: score}, "missing": {task: reason}}`, and `"origin"` if the run selected no
    checkpoint but the starting checkpoint, or weights between the two. The metric of a fine-tuning is the average over
    its labelled tasks, and the scores are those of the tasks.
    """
    record = read_record(folder)
    config, is_start = Config.from_dict(record["config"]), record["seed"] is None
    model = config.model.name_or_path if is_start else str(folder)
    settings = Settings(tasks=",".join(tasks), data_dir=config.eval.data_dir)
    found: dict[str, Any] = {"asked": tasks}
    labelled: dict[str, float] = {}
    if is_start:
        settings = dataclasses.replace(settings, pooler=pooler_of_start(record["pooler"], config))
        corpus = open_corpus(config.data)
        dev = build_dev_evaluation(config, lambda: (row[0] for row in corpus))
        scores = dev.measure(load_encoder(model, settings)).scores
        found |= {"pooler": settings.pooler, "metric": dev.metric, "dev": scores[dev.metric], "dev_text": dev.text}
    else:
        saved = read_encoder(folder)
        found |= {"pooler": saved.pooler, "metric": saved.dev_metric, "dev": saved.dev[saved.dev_metric]}
        found |= {"dev_text": saved.dev_text}
        found |= {"origin": origin(saved.interpolation, saved.step)} if saved.interpolation != 1 else {}
        names = [score_name(name, task) for name, task in config.finetune.tasks.items()]
        labelled = {name: saved.dev[name] for name in names if name in saved.dev}
    evaluation: dict[str, Any] = {"tasks": {}, "averages": {}, "missing": {}, "not_official": {}}
    if tasks:
        evaluation = runner.evaluate_model(model, settings)
        print(results.describe(evaluation))
    found |= {name: evaluation[name] for name in ("missing", "not_official")}
    with disk_errors(folder, safe=SAFE):
        if tasks:
            results.write_results(evaluation, folder / EVALUATION)
        write_checked(folder / RESULTS, found | {"scores": results.scores_by_column(evaluation) | labelled})


def pooler_of_start(pooler: str, config: Config) -> str:
    """Return the pooler; for `own` the one that the starting checkpoint records, or else the one of its training."""
    if pooler != OWN_POOLER:
        return pooler
    recorded = pooling_modules.recorded(hf.read(config.model.name_or_path))
    return recorded.pooler or with_own_pooler(config, recorded).encoding_pooler


if __name__ == "__main__":
    with reported_to_user():
        keep_compiled()
        score(Path(sys.argv[1]), sys.argv[2:])
