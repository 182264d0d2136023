"""The dev evaluation of a training run, whose main score chooses the best checkpoint.

All processes of a run must make the same calls of the encoder, or they wait for one another forever. So the first
process alone decides on the metric and reads the data; the others get both from it and need no files.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from diffcse_jax.config import Config
from diffcse_jax.data.lines import expanded
from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import missing_files, official, retrieval, sts
from diffcse_jax.evaluation.protocols import Encoder
from diffcse_jax.evaluation.suite import senteval_folder
from diffcse_jax.groups import EvalConfig
from diffcse_jax.runtime import hosts

STS_TASKS = {task.name: task for task in (sts.STSBenchmark, sts.SICKRelatedness)}
SHORT_NAMES = {"STSBenchmark": "stsb_spearman", "SICKRelatedness": "sickr_spearman"}
RETRIEVAL_PAIRS = 1000

Scores = dict[str, float]
Choice = dict[str, Any]  # as JSON: `metric`, and either `scored_pairs` by the name of their score, or `pairs`


@dataclasses.dataclass(frozen=True)
class DevEvaluation:
    """Call it with an encoder for all scores, x 100; `metric` names the one that chooses the best checkpoint."""

    metric: str
    score: Callable[[Encoder], Scores]

    def __call__(self, encoder: Encoder) -> Scores:
        return self.score(encoder)


def build_dev_evaluation(config: Config, training_sentences: Callable[[], Iterable[str]]) -> DevEvaluation:
    """The evaluation that `eval.metric`, `eval.tasks` and `eval.pairs_file` describe, the same on all processes.

    Where STS data is asked for and is not there, the two halves of training sentences take its place, with a notice.

    Args:
        config: the run's configuration.
        training_sentences: starts a pass over the training text.

    Raises:
        DataError: a file that cannot be used, or too little text.
    """
    choice = hosts.decided_by_first(lambda: _choice(config, training_sentences))
    metric, batch_size = choice["metric"], config.eval.batch_size
    if "pairs" in choice:
        return DevEvaluation(metric, _retrieval_scorer(metric, choice["pairs"], batch_size))
    return DevEvaluation(metric, _spearman_scorer(metric, choice["scored_pairs"], batch_size))


def _choice(config: Config, training_sentences: Callable[[], Iterable[str]]) -> Choice:
    """The metric, and the text that it is computed on."""
    options = config.eval
    metric = options.metric
    if metric in ("stsb_spearman", "average_spearman"):
        problem = _missing_sts_data(options)
        if not problem:
            return {"metric": metric, "scored_pairs": _sts_pairs(options)}
        metric = "halves_retrieval"
        print(
            f"notice: eval.metric={options.metric} is replaced by {metric}, which needs no labels: {problem}",
            file=sys.stderr,
        )
    if metric == "halves_retrieval":
        return {"metric": metric, "pairs": _halves(config, training_sentences)}
    if metric == "pairs_retrieval":
        return {"metric": metric, "pairs": _unscored_pairs(options)}
    return {"metric": metric, "scored_pairs": {metric: _own_scored_pairs(options)}}


def _missing_sts_data(options: EvalConfig) -> str:
    """The reason for which `eval.tasks` cannot be scored; empty if they can."""
    try:
        folder = senteval_folder(options.data_dir)
    except DataError as error:
        return f"{error} (eval.data_dir)"
    missing = [path for task in options.tasks for path in missing_files(STS_TASKS[task](folder), "dev")]
    return f"not found: {', '.join(map(str, missing))}" if missing else ""


def _sts_pairs(options: EvalConfig) -> dict[str, list[list]]:
    """The dev splits of `eval.tasks`, by the name of their score."""
    folder = senteval_folder(options.data_dir)
    sets = {task: STS_TASKS[task](folder).load("dev") for task in options.tasks}
    for task, pairs in sets.items():
        if reason := official.deviation(task, {"n": len(pairs.gold)}, "dev"):
            print(f"notice: {task} in {folder} is not the official data: {reason}", file=sys.stderr)
    return {SHORT_NAMES[task]: _as_json(pairs) for task, pairs in sets.items()}


def _own_scored_pairs(options: EvalConfig) -> list[list]:
    """The pairs of `eval.pairs_file`."""
    path = expanded(options.pairs_file)
    pairs = sts.read_pairs(path, columns=(0, 1, 2))
    if np.ptp(pairs.gold) == 0:
        raise DataError(f"{path}: eval.metric=pairs_spearman needs at least two pairs with different scores")
    return _as_json(pairs)


def _as_json(pairs: sts.ScoredPairs) -> list[list]:
    """First sentences, second sentences and scores: the arguments of `ScoredPairs`."""
    return [pairs.first, pairs.second, pairs.gold.tolist()]


def _halves(config: Config, training_sentences: Callable[[], Iterable[str]]) -> list[list[str]]:
    """First and second halves of training sentences."""
    for fewest_words in (6, 2):  # halves of short sentences say little: only where there are no others
        first, second = retrieval.halves(training_sentences(), RETRIEVAL_PAIRS, fewest_words)
        if len(first) >= 2:
            return [first, second]
    raise DataError(
        f"data.train_file={config.data.train_file} has too few sentences: the dev metric halves_retrieval needs two "
        "different ones of at least two words"
    )


def _unscored_pairs(options: EvalConfig) -> list[list[str]]:
    """Queries and targets of `eval.pairs_file`."""
    if options.pairs_file == "docstrings":
        from diffcse_jax.data.docstrings import docstring_pairs

        rows = docstring_pairs(RETRIEVAL_PAIRS)
    else:
        rows = _read_unscored_pairs(expanded(options.pairs_file))
    return [[query for query, _ in rows], [target for _, target in rows]]


def _read_unscored_pairs(path: Path) -> list[tuple[str, str]]:
    rows = []
    for number, fields in sts.pair_rows(path):
        if len(fields) != 2:
            raise DataError(f"{path}, line {number}: expected two tab-separated sentences, found {len(fields)} columns")
        rows.append((fields[0], fields[1]))
    if len(rows) < 2:
        raise DataError(f"{path}: eval.metric=pairs_retrieval needs at least two sentence pairs")
    return rows


def _spearman_scorer(metric: str, scored_pairs: dict[str, list[list]], batch_size: int) -> Callable[[Encoder], Scores]:
    sets = {
        name: sts.ScoredPairs(first, second, np.array(gold)) for name, (first, second, gold) in scored_pairs.items()
    }

    def score(encoder: Encoder) -> Scores:
        by_set = sts.score_pairs(encoder, sets, batch_size)
        scores = {name: result["spearman"] for name, result in by_set.items()}
        if metric == "average_spearman":
            scores[metric] = sum(scores.values()) / len(scores)
        return scores

    return score


def _retrieval_scorer(metric: str, pairs: list[list[str]], batch_size: int) -> Callable[[Encoder], Scores]:
    """Scores the mean reciprocal rank as `metric`, and recalls beside it."""
    queries, targets = pairs

    def score(encoder: Encoder) -> Scores:
        vectors = encoder.encode(queries + targets, batch_size=batch_size)
        scores = retrieval.retrieval_scores(vectors[: len(queries)], vectors[len(queries) :])
        return {metric: scores.pop("mrr")} | {f"{metric}_{name}": value for name, value in scores.items()}

    return score
