"""An evaluation: tasks on one model or several, and the results that `results.json` holds."""

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import tqdm

from diffcse_jax.errors import ConfigError, DataError, warn_user
from diffcse_jax.evaluation import CachedEncoder, Encoder, Task, TaskOptions, geometry, results
from diffcse_jax.evaluation.backends import load_encoder, post_process
from diffcse_jax.evaluation.results import Results
from diffcse_jax.evaluation.retrieval import PairsRetrieval
from diffcse_jax.evaluation.search_collections import SearchTask
from diffcse_jax.evaluation.senteval import REGRESSION_TASKS
from diffcse_jax.evaluation.senteval_data import missing_files, senteval_folder
from diffcse_jax.evaluation.sts import read_lines, size_problem
from diffcse_jax.evaluation.systems import OwnDocuments
from diffcse_jax.evaluation.tasks import expand_groups, find_task, own_task
from diffcse_jax.io import expand_path

RECORDED = ("backend", "mode", "aggregation", "similarity", "post", "post_dimension")  # settings kept with results


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that all models of a comparison share: the options of `eval.py`, by their names."""

    tasks: str = "sts"
    data_dir: str = ""
    mode: str = "test"
    aggregation: str = "all"
    similarity: str = "cosine"
    pooler: str | None = None
    truncate_dim: int | None = None
    backend: str = "jax"
    post: str | None = None
    post_dimension: int | None = None
    queries: Path | None = None
    top_k: int = 3
    regression: bool = False
    runs: Path | None = None
    against: Path | None = None


def run(
    models: Sequence[str], settings: Settings, *, output: Path, with_published: bool, style: str, allow_missing: bool
) -> int:
    """Evaluate models, write `results.json` and pictures, and print tables, as `diffcse evaluate` does.

    Returns:
        The exit code: 0, or 3 if data of a task is missing and may not be.
    """
    if with_published and settings.mode == "dev":
        raise ConfigError("--published scores are scores of test splits. Leave out --mode dev")
    results.write_results(None, output)  # before hours are spent on them
    done = evaluate(models, settings, lambda so_far: results.write_results(results.document(so_far), output))
    parts = [results.describe(each) for each in done] if style == "text" else []
    if len(done) > 1 or with_published or style != "text":
        parts.append(results.compare(done, with_published=with_published, style=style))
    print("\n\n".join(parts))
    if pictures := geometry.draw(done, output.parent / "report"):
        print("pictures:", *pictures, file=sys.stderr)
    return 3 if any(each["missing"] for each in done) and not allow_missing else 0


def evaluate(models: Sequence[str], settings: Settings, keep: Callable[[list[Results]], None]) -> list[Results]:
    """Run all tasks on one model after another. `keep` gets the results so far after each task: the next may fail."""
    done: list[Results] = []
    for model in dict.fromkeys(models):
        done.append(evaluate_model(model, settings, lambda results: keep([*done, results])))
    return done


def evaluate_model(model: str, settings: Settings, keep: Callable[[Results], None] = lambda _: None) -> Results:
    """Run the tasks on a model. `keep` gets the results before the first task and after each task.

    Each sentence is encoded once, however many tasks contain it.
    """
    tasks, folder, options = _plan(settings)
    name = "-".join(Path(model).parts[-2:]).strip("/.").replace(" ", "_")
    options = dataclasses.replace(options, model_name=name)
    missing = {
        name: f"not found: {paths[0]}" + (f" and {len(paths) - 1} more of its files" if paths[1:] else "")
        for name, task in tasks.items()
        if (paths := missing_files(task, folder, settings.mode))
    }
    scores: dict[str, dict] = {}
    with _recorded_warnings() as notes:
        encoder = CachedEncoder(load(model, settings))
        has_prompt = encoder.prompts.default or all(
            isinstance(task, PairsRetrieval | OwnDocuments | SearchTask) for task in tasks.values()
        )
        if not has_prompt and (warning := encoder.prompts.warning(model)):
            warn_user(warning)

        def found() -> Results:
            problems = {name: size_problem(name, each, settings.mode) for name, each in scores.items()}
            return {
                "model": model,
                "pooler": encoder.pooler,
                "truncate_dim": encoder.truncate_dim,
                "prompts": dict(encoder.prompts.by_name),
                **{name: getattr(settings, name) for name in RECORDED},
                "tasks": dict(scores),
                "averages": results.averages(scores, settings.mode),
                "not_official": {name: problem for name, problem in problems.items() if problem},
                "missing": missing,
                "warnings": list(notes),
            }

        keep(found())
        for name in tqdm.tqdm([name for name in tasks if name not in missing], desc=model, unit="task", disable=None):
            each = tasks[name].run(encoder, folder, settings.mode, options)
            scores[name] = each | each.get("aggregations", {}).get(settings.aggregation, {})
            keep(found())
        return found()


def load(model: str, settings: Settings) -> Encoder:
    """Load a model on the backend, and post-process its embeddings if the settings say so."""
    encoder = load_encoder(model, backend=settings.backend, pooler=settings.pooler, truncate_dim=settings.truncate_dim)
    return post_process(encoder, settings.post, settings.post_dimension) if settings.post is not None else encoder


def _plan(settings: Settings) -> tuple[dict[str, Task], Path, TaskOptions]:
    """Check the settings. Return the tasks by name, SentEval's folder and the options of tasks."""
    if settings.post_dimension is not None and settings.post is None:
        raise ConfigError("--post_dimension needs --post whitening:FILE")
    if settings.top_k < 1:
        raise ConfigError(f"--top_k: expected at least 1, got {settings.top_k}")
    names = expand_groups(settings.tasks.split(","), settings.mode)
    if settings.regression:
        names += [task.name for task in REGRESSION_TASKS if task.name not in names]
    if settings.queries and "retrieval" not in names:
        raise ConfigError("--queries are searched by the task retrieval. Add it to --tasks")
    if (settings.runs or settings.against) and not any(isinstance(own_task(name), SearchTask) for name in names):
        raise ConfigError("--runs and --against belong to the task retrieval:FOLDER. Add it to --tasks")
    folder = Path() if all(map(own_task, names)) else senteval_folder(settings.data_dir)
    queries: tuple[str, ...] = ()
    if settings.queries:
        try:
            lines = read_lines(expand_path(settings.queries), "utf-8-sig")
        except DataError as error:
            raise DataError(f"--queries: {error}") from error
        queries = tuple(line.strip() for line in lines if line.strip())
        if not queries:
            raise DataError(f"--queries: {settings.queries} has no queries")
    options = TaskOptions(settings.similarity, queries, settings.top_k, settings.runs, settings.against)
    return {name: find_task(name) for name in names}, folder, options


@contextlib.contextmanager
def _recorded_warnings() -> Iterator[dict[str, None]]:
    """Print each warning for the user once, and record it."""
    notes: dict[str, None] = {}

    def note(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in notes:
            print(f"warning: {message}", file=sys.stderr)
        notes[str(message)] = None

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = note
        yield notes
