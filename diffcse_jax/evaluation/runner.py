"""An evaluation: the tasks by name, their scores of one model or several, and `results.json`."""

import dataclasses
import difflib
import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import tqdm

from diffcse_jax.commands import EvaluateOptions
from diffcse_jax.documents.find import NOT_PATHS, is_pattern
from diffcse_jax.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NotDownloadedError,
    printable,
    warn_user,
)
from diffcse_jax.evaluation import (
    CachedEncoder,
    Encoder,
    EvaluationSettings,
    Task,
    retrieval,
    search_collections,
    sts,
)
from diffcse_jax.evaluation.backends import load_encoder
from diffcse_jax.evaluation.queries import queries_of_documents
from diffcse_jax.evaluation.results import GROUPS, RECORDED, Results, compare, details
from diffcse_jax.evaluation.senteval import TRANSFER_TASKS
from diffcse_jax.evaluation.senteval_data import senteval_folder, size_problem
from diffcse_jax.evaluation.systems import (
    BM25,
    HYBRID,
    compare_systems,
    made_weight,
    words_find_as_much,
)
from diffcse_jax.evaluation.trec_runs import check_run_files
from diffcse_jax.hosts import log_line
from diffcse_jax.io import disk_errors, expand_path, read_json_object, write_json
from diffcse_jax.models.unread import added_up
from diffcse_jax.options import names_in


def score_documents(encoder: Encoder, file: str, settings: EvaluationSettings) -> dict[str, Any]:
    """Compare BM25, the encoder, and both together, without any labels.

    Queries are made of the user's documents.
    """
    metric = queries_of_documents(file, strict=settings.strict)
    weight = made_weight(words_find_as_much("the encoder", encoder, metric))
    systems = compare_systems({"encoder": encoder}, metric, weight)
    bm25, dense, hybrid = systems
    scores = {"mrr": dense.score, HYBRID: hybrid.score, BM25: bm25.score, "n": len(metric.queries)}
    return scores | {"systems": [system.summary() for system in systems]}


TASKS = {
    task.name: task
    for task in (*sts.STS_TASKS, *TRANSFER_TASKS, sts.GEOMETRY, retrieval.STSB_RETRIEVAL)
}
# The tasks on the user's own files, which are named KIND:FILE.
OWN: dict[str, Callable[[Encoder, str, EvaluationSettings], dict[str, Any]]] = {
    search_collections.COLLECTION: retrieval.score_collection,
    "documents": score_documents,
    "pairs_retrieval": retrieval.score_pairs,
}
# Names of several tasks.
NAMES = GROUPS | {"full": GROUPS["sts"] + GROUPS["transfer"]}
# Other names, without case and punctuation.
ALIASES = {
    "stsb": "STSBenchmark",
    "stsbench": "STSBenchmark",
    "sickr": "SICKRelatedness",
    "all": "full",
}


def own_kind(name: str) -> str:
    """Return `KIND` of a name like `KIND:FILE`, or an empty string for other names."""
    kind, _, file = name.partition(":")
    return kind if file and kind in OWN else ""


def find_task(name: str) -> Task:
    """Return the task with this exact name, or for `KIND:FILE` the task on that file."""
    kind, _, file = name.partition(":")
    if not file:
        return TASKS[name]
    # The scoring function reads the file, so the task has no splits.
    return Task(
        name, {}, read=tuple, score=lambda encoder, _, settings: OWN[kind](encoder, file, settings)
    )


def expand_groups(names: Iterable[str], mode: str) -> list[str]:
    """Return the names of tasks, each once.

    A group stands for its tasks that have data for the mode. Case and punctuation of names do not
    matter.
    """
    tasks: list[str] = []
    for name in map(_full_name, names):
        if name in NAMES:
            tasks += [task for task in NAMES[name] if mode in TASKS[task].modes]
        elif mode in find_task(name).modes:
            tasks.append(name)
        else:
            raise ConfigError(f"{name} has no {mode} split")
    return list(dict.fromkeys(tasks))


def _full_name(name: str) -> str:
    if own_kind(name):
        return name
    known = {_plain(each): each for each in (*NAMES, *TASKS)} | ALIASES
    if full_name := known.get(_plain(name)):
        return full_name
    near = difflib.get_close_matches(_plain(name), known, n=1)
    hint = f"Did you mean {known[near[0]]}? " if near else ""
    of_files = (f"{kind}:FILE" for kind in OWN if kind != search_collections.COLLECTION)
    own = [*of_files, f"{search_collections.COLLECTION}:FOLDER"]
    names = ", ".join([*NAMES, *TASKS, *own])
    raise ConfigError(f"unknown task {name!r}. {hint}Known tasks: {names}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def require_own_files(tasks: Iterable[str]) -> None:
    """Raise `DataError` if what a task `KIND:FILE` is named after does not exist."""
    for name in filter(own_kind, tasks):
        file = name.partition(":")[2]
        path = expand_path(file)
        if not (file in NOT_PATHS or is_pattern(file) or path.exists()):
            raise DataError(f"{name}: no such file or folder: {path}")


def run(options: EvaluateOptions) -> int:
    """Evaluate models, write `results.json` and pictures, and print tables.

    This is the work of `diffcse evaluate`.

    Returns:
        The exit code: 0, or 3 if data of a task is missing, unless `allow_missing` is set.
    """
    if options.with_published and options.mode == "dev":
        raise ConfigError("--published scores are scores of test splits. Leave out --mode dev")

    done: list[Results] = []

    output = options.output.resolve()
    settings = dataclasses.replace(options, compared=tuple(dict.fromkeys(options.models)))

    def keep(results: Results) -> None:  # after each task, because the next may fail
        if not done and not results["tasks"]:
            set_aside(output, settings, results)
        so_far = [*done, results]
        content = so_far[0] if len(so_far) == 1 else {"models": so_far}
        write_results(content, output)

    for model in settings.compared:
        done.append(evaluate_model(model, settings, keep))
    parts = [*map(details, done)] if options.style == "text" else []
    parts.append(compare(done, with_published=options.with_published, style=options.style))
    print("\n\n".join(filter(None, parts)))
    if pictures := sts.draw(done, options.output.parent / "report"):
        print("pictures:", *pictures, file=sys.stderr)
    return 3 if any(each["missing"] for each in done) and not options.allow_missing else 0


def evaluate_model(
    model: str, settings: EvaluationSettings, keep: Callable[[Results], None] = lambda _: None
) -> Results:
    """Run the tasks on a model. `keep` gets the results before the first task and after each task.

    Each sentence is encoded once, however many tasks contain it.
    """
    settings = dataclasses.replace(settings, model=model)
    tasks = _plan(settings)
    mode = settings.mode
    folder, missing = _find_data(tasks, settings)
    encoder = CachedEncoder(load_encoder(model, settings))
    # Tasks on the user's own files use the prompts of queries and documents, and other tasks the
    # default prompt.
    are_own = all(map(own_kind, tasks))
    has_none = encoder.prompts.are_unused if are_own else not encoder.prompts.default
    if has_none and (warning := encoder.prompts.warning(model)):
        warn_user(warning)
    results: Results = {
        "model": model,
        "pooler": encoder.pooler,
        "truncate_dim": encoder.truncate_dim,
        "prompts": dict(encoder.prompts.by_name),
        **{name: getattr(settings, name) for name in RECORDED},
        "tasks": {},
        "averages": averages({}, mode),
        "not_official": {},
        "missing": missing,
    }
    keep(results)
    available = [name for name in tasks if name not in missing]
    with added_up():
        for name in tqdm.tqdm(available, desc=printable(model), unit="task", disable=None):
            scores = tasks[name].run(encoder, folder, settings)
            of_aggregation = scores.get("aggregations", {}).get(settings.aggregation, {})
            results["tasks"][name] = scores | of_aggregation
            results["averages"] = averages(results["tasks"], mode)
            if problem := size_problem(name, scores, mode):
                results["not_official"][name] = problem
            keep(results)
    return results


def _find_data(
    tasks: Mapping[str, Task], settings: EvaluationSettings
) -> tuple[Path, dict[str, str]]:
    """Return SentEval's folder, and why data of tasks is missing, by task."""
    official = [name for name in tasks if not own_kind(name)]
    folder = Path()
    if official:
        try:
            folder = senteval_folder(settings.data_dir or "")
        except NotDownloadedError as error:
            return folder, dict.fromkeys(official, str(error))
    missing = {}
    for name, task in tasks.items():
        if paths := task.missing(folder, settings.mode):
            more = f" and {len(paths) - 1} more of its files" if len(paths) > 1 else ""
            missing[name] = f"not found: {paths[0]}{more}"
    return folder, missing


def _plan(settings: EvaluationSettings) -> dict[str, Task]:
    """Check the settings before hours are spent on them, and return the tasks by name."""
    names = expand_groups(names_in(settings.tasks), settings.mode)
    if not names:
        raise ConfigError("--tasks is empty. Name a task, such as sts")
    if settings.queries_file:
        if "retrieval" not in names:
            raise ConfigError("--queries are searched by the task retrieval. Add it to --tasks")
        try:
            retrieval.read_queries(settings.queries_file)
        except DataError as error:
            raise DataError(f"--queries: {error}") from error
    kinds = {own_kind(name) for name in names}
    if (settings.runs or settings.against) and search_collections.COLLECTION not in kinds:
        raise ConfigError(
            "--runs and --against belong to the task retrieval:FOLDER. Add it to --tasks"
        )
    if settings.runs:
        check_run_files(settings)
    require_own_files(names)
    return {name: find_task(name) for name in names}


def averages(tasks: Mapping[str, Mapping[str, Any]], mode: str) -> dict[str, float | None]:
    """Return the mean score of each group; None unless all its tasks are scored.

    Scores are rounded to two decimals first, as in published tables.
    """
    means: dict[str, float | None] = {}
    for group, score in (("sts", "spearman"), ("transfer", "devacc" if mode == "dev" else "acc")):
        names = expand_groups([group], mode)
        means[group] = None
        if all(name in tasks for name in names):
            means[group] = round(
                statistics.fmean(round(tasks[name][score], 2) for name in names), 2
            )
    return means


def set_aside(path: Path, settings: EvaluationSettings, first: Results) -> None:
    """Rename a results file that holds more than this evaluation replaces, and say so.

    `first` has the settings of the first model, before its first task.
    """
    if not path.is_file():
        return
    tasks = expand_groups(names_in(settings.tasks), settings.mode)

    def is_replaced(earlier: Results) -> bool:
        names = {*RECORDED}
        if earlier["model"] == first["model"]:  # what others apply is not known yet
            names |= {"pooler", "truncate_dim"}
        same = all(earlier.get(name) == first[name] for name in names)
        return same and earlier["model"] in settings.compared and {*earlier["tasks"]} <= {*tasks}

    try:
        content = read_json_object(path)
        models = content.get("models", [content])
        others = [each for each in models if each["tasks"] and not is_replaced(each)]
        held = "; ".join(f"{each['model']}: {', '.join(each['tasks'])}" for each in others)
    except (CheckpointError, KeyError, TypeError):
        held = "not of an evaluation"
    if not held:
        return
    free = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
    kept = next(each for each in free if not each.exists())
    with disk_errors(kept, safe="The file is unchanged.", instead="give another --output"):
        path.rename(kept)
    log_line(f"notice: {path} held other results ({held}). They are now in {kept.name}.")


def write_results(content: Results, path: Path) -> None:
    """Write `results.json` atomically, with numbers rounded to four decimals."""
    rounded = json.loads(json.dumps(content), parse_float=lambda number: round(float(number), 4))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, rounded)
    except (OSError, CheckpointError) as error:
        raise ConfigError(f"--output: cannot write {path}: {error}") from error
