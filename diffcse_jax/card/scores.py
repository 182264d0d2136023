"""The scores of a card: as tables, and as results in its metadata, which name the data they were measured on."""

from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

from huggingface_hub import EvalResult

from diffcse_jax.config import Config
from diffcse_jax.errors import ConfigError
from diffcse_jax.evaluation.results import Results, Row, format_scores, scores_by_column
from diffcse_jax.io import expand_path, find_run, read_json_object
from diffcse_jax.run_folder.records import SELECTION
from diffcse_jax.run_folder.saved_encoder import SavedEncoder

HUB_DATA = {  # ids on the hub of what eval.py reads from SentEval's folders
    **{f"STS{year}": f"mteb/sts{year}-sts" for year in (12, 13, 14, 15, 16)},
    "STSBenchmark": "mteb/stsbenchmark-sts",
    "SICKRelatedness": "mteb/sickr-sts",
}
UNKNOWN = "unknown"  # in metadata: data that has no id on the hub
SCORES = {"spearman": "spearman", "accuracy": "acc"}  # kinds of results, and their keys in `results.json`
RECORDED = ("results.json", "evaluation.json")  # in a workdir: by `eval.py --output`, by a study

_PAIRS = {
    "halves_retrieval": "halves of sentences",
    "lead_retrieval": "titles or first sentences, and the rests",
    "neighbours_retrieval": "sentences and the next ones",
}


class Recorded(NamedTuple):
    """Test results of the exported model and, where they are known, of its start."""

    model: Results
    start: Results | None


def recorded_results(source: Path, saved: SavedEncoder, truncate_dim: int | None, files: Sequence[Path]) -> Recorded:
    """Results that eval.py has written of the model that is exported; empty ones where there are none.

    Args:
        source: the workdir or checkpoint that is exported.
        saved: its encoder.
        truncate_dim: the cut of its vectors.
        files: `results.json` files to look in; none: those in the workdir.

    Raises:
        ConfigError: the files that are named have no results of this model.
    """
    workdir = find_run(source) or source
    rows = [row for path in files or _recorded_in(workdir) for row in _rows(path)]
    model = next((row for row in rows if _is_of(row, source, workdir, saved, truncate_dim)), None)
    if model is None:
        if files:
            raise ConfigError(
                f"--results: no test results of {source} with the pooler {saved.pooler}, as it is exported, in "
                f"{', '.join(map(str, files))}; eval.py --model {source} --output FILE writes them"
            )
        return Recorded({}, None)
    return Recorded(model, next((row for row in rows if _is_of_start(row, saved)), None))


def _recorded_in(workdir: Path) -> list[Path]:
    """The files of results in a workdir that are of its present choice of a model, which is then the older one."""
    chosen = workdir / SELECTION
    since = chosen.stat().st_mtime if chosen.is_file() else 0.0
    return [path for name in RECORDED if (path := workdir / name).is_file() and path.stat().st_mtime >= since]


def _rows(path: Path) -> list[Results]:
    """The results in a file, by model; none in one of another kind, such as a study's."""
    content = read_json_object(path)
    rows = content.get("models", [content])
    return [row for row in rows if isinstance(row, dict) and {"model", "pooler", "tasks"} <= row.keys()]


def _is_of(row: Results, source: Path, workdir: Path, saved: SavedEncoder, truncate_dim: int | None) -> bool:
    """True if the row is of the model and of nothing else: not of another pooler, cut, split or transformation."""
    ours = {source.resolve()} | ({(workdir / "export").resolve()} if source == workdir else set())
    is_same = row["pooler"] == saved.pooler and row.get("truncate_dim") == truncate_dim
    return is_same and expand_path(row["model"]).resolve() in ours and _is_comparable(row)


def _is_of_start(row: Results, saved: SavedEncoder) -> bool:
    of_start = row["model"] == saved.config.model.name_or_path and _is_comparable(row)
    return of_start and (saved.baseline is None or row["pooler"] == saved.baseline.pooler)


def _is_comparable(row: Results) -> bool:
    """True for test scores in the form of published tables."""
    asked = {"mode": "test", "similarity": "cosine", "aggregation": "all", "post": None}
    return all(row.get(key) == value for key, value in asked.items())


def rows_of(recorded: Recorded, start: str, model: str) -> list[Row]:
    """Table rows of test results; none where there are none."""
    both = {start: recorded.start, model: recorded.model}
    return [Row(label, format_scores(scores_by_column(results))) for label, results in both.items() if results]


def dev_results(saved: SavedEncoder) -> list[EvalResult]:
    """The dev scores as results of metadata, on the scale that sentence-transformers has: 1, not 100."""
    results: dict[tuple, EvalResult] = {}  # the guard's score may be the dev metric, too
    for metric, score in saved.dev.items():
        name, _, k = metric.partition("_recall@")
        if data := _dev_data(name, saved.config):
            kind = "spearman" if name.endswith("spearman") else f"recall@{k}" if k else "mrr"
            results.setdefault((kind, *data), _result(kind, score, *data))
    return list(results.values())


def results_of_test(results: Results) -> list[EvalResult]:
    """Test scores as results of metadata."""
    unlike = results.get("not_official", {})
    found = []
    for task, scores in results.get("tasks", {}).items():
        official = task not in unlike
        data = HUB_DATA.get(task, UNKNOWN) if official else UNKNOWN
        name = f"SentEval {task}" + ("" if official else f", not the official data: {unlike[task]}")
        found += [_result(kind, scores[key], data, name, "test") for kind, key in SCORES.items() if key in scores]
    return found


def _dev_data(metric: str, config: Config) -> tuple[str, str, str] | None:
    """Hub id, name and split of the data of a dev metric; None for one that is no score of a data set."""
    text = PurePath(config.data.train_file).name
    if metric in ("stsb_spearman", "guard_stsb_spearman"):
        return HUB_DATA["STSBenchmark"], "STS-B, dev", "validation"
    if metric == "sickr_spearman":
        return UNKNOWN, "SICK-R, dev (trial)", "validation"
    if metric in ("pairs_spearman", "pairs_retrieval"):
        own = f"pairs of {PurePath(config.eval.pairs_file).name}"
        ours = "first sentences of docstrings, and their rests, of held-out functions"
        return UNKNOWN, ours if config.eval.pairs_file == "docstrings" else own, "validation"
    if metric in _PAIRS:
        whose = "held-out documents of" if config.data.held_out else "the training text"
        return UNKNOWN, f"{_PAIRS[metric]}, of {whose} {text}", "validation"
    return None


def _result(kind: str, score: float, data: str, name: str, split: str) -> EvalResult:
    """A result; `kind` is `spearman`, `mrr`, `recall@K` or `accuracy`."""
    shown = "MRR" if kind == "mrr" else kind.capitalize()
    task, task_name, metric, metric_name = {
        "spearman": ("semantic-similarity", "Semantic Similarity", "spearman_cosine", "Spearman Cosine"),
        "accuracy": ("text-classification", "Classification of frozen vectors", "accuracy", "Accuracy"),
    }.get(kind, ("information-retrieval", "Information Retrieval", f"cosine_{kind}", f"Cosine {shown}"))
    return EvalResult(
        task_type=task,
        task_name=task_name,
        dataset_type=data,
        dataset_name=name,
        dataset_split=split,
        metric_type=metric,
        metric_name=metric_name,
        metric_value=round(score / 100, 6),
    )
