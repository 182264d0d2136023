"""An evaluation: tasks on one model or several, and the results that `results.json` holds."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import tqdm

from diffcse_jax.errors import ConfigError, DataError, warn_user
from diffcse_jax.evaluation import CachedEncoder, Settings, Task, geometry, search_collections
from diffcse_jax.evaluation.backends import load_encoder
from diffcse_jax.evaluation.results import RECORDED, Results, averages, compare, details, write_results
from diffcse_jax.evaluation.senteval_data import senteval_folder
from diffcse_jax.evaluation.sts import size_problem
from diffcse_jax.evaluation.tasks import expand_groups, find_task, own_kind


def run(
    models: Sequence[str], settings: Settings, *, output: Path, with_published: bool, style: str, allow_missing: bool
) -> int:
    """Evaluate models, write `results.json` and pictures, and print tables, as `diffcse evaluate` does.

    Returns:
        The exit code: 0, or 3 if data of a task is missing and may not be.
    """
    if with_published and settings.mode == "dev":
        raise ConfigError("--published scores are scores of test splits. Leave out --mode dev")

    done: list[Results] = []

    def keep(found: Results) -> None:  # after each task, because the next may fail
        so_far = [*done, found]
        write_results(so_far[0] if len(so_far) == 1 else {"models": so_far}, output)

    for model in dict.fromkeys(models):
        done.append(evaluate_model(model, settings, keep))
    parts = [*map(details, done)] if style == "text" else []
    parts.append(compare(done, with_published=with_published, style=style))
    print("\n\n".join(filter(None, parts)))
    if pictures := geometry.draw(done, output.parent / "report"):
        print("pictures:", *pictures, file=sys.stderr)
    return 3 if any(each["missing"] for each in done) and not allow_missing else 0


def evaluate_model(model: str, settings: Settings, keep: Callable[[Results], None] = lambda _: None) -> Results:
    """Run the tasks on a model. `keep` gets the results before the first task and after each task.

    Each sentence is encoded once, however many tasks contain it.
    """
    tasks, mode = _plan(settings), settings.mode
    folder = Path() if all(map(own_kind, tasks)) else senteval_folder(settings.data_dir)
    settings = dataclasses.replace(settings, model="-".join(Path(model).parts[-2:]).strip("/.").replace(" ", "_"))
    missing = {
        name: f"not found: {paths[0]}" + (f" and {len(paths) - 1} more of its files" if paths[1:] else "")
        for name, task in tasks.items()
        if (paths := task.missing(folder, mode))
    }
    encoder = CachedEncoder(load_encoder(model, settings))
    has_prompt = encoder.prompts.default or all(map(own_kind, tasks))  # those of queries and documents
    if not has_prompt and (warning := encoder.prompts.warning(model)):
        warn_user(warning)
    found: Results = {
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
    keep(found)
    for name in tqdm.tqdm([name for name in tasks if name not in missing], desc=model, unit="task", disable=None):
        scores = tasks[name].run(encoder, folder, settings)
        found["tasks"][name] = scores | scores.get("aggregations", {}).get(settings.aggregation, {})
        found["averages"] = averages(found["tasks"], mode)
        if problem := size_problem(name, scores, mode):
            found["not_official"][name] = problem
        keep(found)
    return found


def _plan(settings: Settings) -> dict[str, Task]:
    """Check the settings before hours are spent on them, and return the tasks by name."""
    names = expand_groups(settings.tasks.split(","), settings.mode)
    if settings.queries:
        if "retrieval" not in names:
            raise ConfigError("--queries are searched by the task retrieval. Add it to --tasks")
        try:
            geometry.read_queries(settings.queries)
        except DataError as error:
            raise DataError(f"--queries: {error}") from error
    if (settings.runs or settings.against) and search_collections.KIND not in map(own_kind, names):
        raise ConfigError("--runs and --against belong to the task retrieval:FOLDER. Add it to --tasks")
    return {name: find_task(name) for name in names}
