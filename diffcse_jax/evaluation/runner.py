"""An evaluation: one model, some tasks, and the results that `results.json` holds."""

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import tqdm

from diffcse_jax.data.lines import text_lines
from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.evaluation import (
    REGRESSION_TASKS,
    build_task,
    expand_groups,
    missing_files,
    needs_folder,
    official,
    report,
)
from diffcse_jax.evaluation.backends import load_encoder
from diffcse_jax.evaluation.postprocessing import post_process
from diffcse_jax.evaluation.protocols import Encoder, Task
from diffcse_jax.evaluation.report import Results
from diffcse_jax.evaluation.suite import senteval_folder
from diffcse_jax.io import expand_path


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that all models of a comparison share: the options of eval.py by their names."""

    tasks: str
    data_dir: str
    mode: str
    aggregation: str
    similarity: str
    pooler: str | None
    truncate_dim: int | None
    backend: str
    post: str | None
    post_dimension: int | None
    queries: Path | None
    top_k: int
    regression: bool


def build_tasks(settings: Settings) -> dict[str, Task]:
    """The tasks that the settings name, on their data.

    Raises:
        ConfigError: an unknown task, or options that contradict one another.
        DataError: no data folder, or a file of queries that cannot be read.
    """
    if settings.post_dimension is not None and settings.post is None:
        raise ConfigError("--post_dimension needs --post whitening:FILE")
    if settings.top_k < 1:
        raise ConfigError(f"--top_k: expected at least 1, got {settings.top_k}")
    names = expand_groups(settings.tasks.split(","), settings.mode)
    if settings.regression:
        names += [task.name for task in REGRESSION_TASKS if task.name not in names]
    if settings.queries and "retrieval" not in names:
        raise ConfigError("--queries are searched by the task retrieval: add it to --tasks")
    folder = senteval_folder(settings.data_dir) if needs_folder(names) else Path()
    queries = _read_queries(settings.queries) if settings.queries else ()
    return {
        name: build_task(name, folder, similarity=settings.similarity, queries=queries, top_k=settings.top_k)
        for name in names
    }


def evaluate(models: Sequence[str], settings: Settings, keep: Callable[[Sequence[Results]], None]) -> list[Results]:
    """Runs all tasks on one model after another.

    Args:
        models: each as `load_encoder` takes it.
        settings: the options.
        keep: called with the results so far after each task, since the next one may fail.

    Returns:
        Results by model.

    Raises:
        UserError: an option, a model, its pooler or a file that cannot be used.
    """
    tasks = build_tasks(settings)
    done: list[Results] = []
    for model in dict.fromkeys(models):
        done.append(evaluate_model(model, tasks, settings, lambda results: keep([*done, results])))
    return done


def evaluate_model(model: str, tasks: dict[str, Task], settings: Settings, keep: Callable[[Results], None]) -> Results:
    """Runs the tasks on a model; `keep` gets the results before the first task and after each."""
    scores: dict[str, dict] = {}
    missing = {name: missing_files(task, settings.mode) for name, task in tasks.items()}
    present = [name for name in tasks if not missing[name]]
    with _noted_warnings() as notes:
        encoder = load(model, settings)
        keep(results := results_of(model, encoder, scores, missing, notes, settings))
        for name in tqdm.tqdm(present, desc=model, unit="task", disable=None):
            scores[name] = tasks[name].run(encoder, settings.mode)
            keep(results := results_of(model, encoder, scores, missing, notes, settings))
    return results


def load(model: str, settings: Settings) -> Encoder:
    """The model's encoder on the backend, post-processed if the settings say so."""
    encoder = load_encoder(model, backend=settings.backend, pooler=settings.pooler, truncate_dim=settings.truncate_dim)
    return post_process(encoder, settings.post, settings.post_dimension) if settings.post is not None else encoder


def results_of(
    model: str,
    encoder: Encoder,
    scores: dict[str, dict],
    missing: dict[str, list[Path]],
    notes: list[str],
    settings: Settings,
) -> Results:
    """The content of `results.json`."""
    tasks = report.with_aggregation(scores, settings.aggregation)
    return {
        "model": model,
        "pooler": encoder.pooler,
        "truncate_dim": encoder.truncate_dim,
        "backend": settings.backend,
        "mode": settings.mode,
        "aggregation": settings.aggregation,
        "similarity": settings.similarity,
        "post": settings.post,
        "post_dimension": settings.post_dimension,
        "tasks": tasks,
        "averages": report.averages(tasks, settings.mode),
        "not_official": {
            name: reason for name, each in tasks.items() if (reason := official.deviation(name, each, settings.mode))
        },
        "missing": {name: report.missing_reason(paths) for name, paths in missing.items() if paths},
        "warnings": list(dict.fromkeys(notes)),
    }


@contextlib.contextmanager
def _noted_warnings() -> Iterator[list[str]]:
    """Warnings for the user are printed as they come, each once, and kept."""
    notes = []

    def note(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in notes:
            print(f"warning: {message}", file=sys.stderr)
        notes.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = note
        yield notes


def _read_queries(path: Path) -> tuple[str, ...]:
    try:
        queries = tuple(line.strip() for _, line in text_lines(expand_path(path), "utf-8-sig") if line.strip())
    except DataError as error:
        raise DataError(f"--queries: {error}") from error
    if not queries:
        raise DataError(f"--queries: {path} holds no query")
    return queries
