"""The dev evaluation of a training run: what chooses the best checkpoint."""

import dataclasses
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from diffcse_jax.config import Config, EvalConfig
from diffcse_jax.encoder import Encoder
from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import build_task, missing_files, retrieval, sts
from diffcse_jax.evaluation.suite import senteval_folder

SHORT_NAMES = {"STSBenchmark": "stsb_spearman", "SICKRelatedness": "sickr_spearman"}
RETRIEVAL_PAIRS = 1000

Scores = dict[str, float]


@dataclasses.dataclass(frozen=True)
class DevEvaluation:
    """Call it with an encoder for all scores, x 100; `metric` names the one that chooses the best checkpoint."""

    metric: str
    score: Callable[[Encoder], Scores]

    def __call__(self, encoder: Encoder) -> Scores:
        return self.score(encoder)


def build_dev_evaluation(config: Config, training_sentences: Callable[[], Iterable[str]]) -> DevEvaluation:
    """The evaluation that `eval.metric`, `eval.tasks` and `eval.pairs_file` describe.

    Where STS data is asked for and is not there, the two halves of training sentences take its place, with a notice.

    Args:
        config: the run's configuration.
        training_sentences: starts a pass over the training text.

    Raises:
        DataError: a file that cannot be used, or too little text.
    """
    options = config.eval
    metric = options.metric
    if metric in ("stsb_spearman", "average_spearman"):
        problem = _missing_sts_data(options)
        if not problem:
            return DevEvaluation(metric, _sts_scorer(options))
        metric = "halves_retrieval"
        print(
            f"notice: eval.metric={options.metric} is replaced by {metric}, which needs no labels: {problem}",
            file=sys.stderr,
        )
    if metric == "halves_retrieval":
        return DevEvaluation(metric, _halves_scorer(config, training_sentences))
    if metric == "pairs_retrieval":
        return DevEvaluation(metric, _retrieval_scorer(metric, *_unscored_pairs(options), options.batch_size))
    return DevEvaluation(metric, _pairs_scorer(options))


def _missing_sts_data(options: EvalConfig) -> str:
    """What lacks for `eval.tasks`; empty if nothing does."""
    try:
        folder = senteval_folder(options.data_dir)
    except DataError as error:
        return f"{error} (eval.data_dir)"
    missing = [path for task in options.tasks for path in missing_files(build_task(task, folder), "dev")]
    return f"not found: {', '.join(map(str, missing))}" if missing else ""


def _sts_scorer(options: EvalConfig) -> Callable[[Encoder], Scores]:
    folder = senteval_folder(options.data_dir)
    sets = {SHORT_NAMES[task]: build_task(task, folder).load("dev") for task in options.tasks}

    def score(encoder: Encoder) -> Scores:
        by_set = sts.score_pairs(encoder, sets, options.batch_size)
        scores = {name: result["spearman"] for name, result in by_set.items()}
        if options.metric == "average_spearman":
            scores["average_spearman"] = sum(scores.values()) / len(scores)
        return scores

    return score


def _pairs_scorer(options: EvalConfig) -> Callable[[Encoder], Scores]:
    path = Path(options.pairs_file).expanduser()
    pairs = sts.read_pairs(path, columns=(0, 1, 2))
    if np.ptp(pairs.gold) == 0:
        raise DataError(f"{path}: eval.metric=pairs_spearman needs at least two pairs with different scores")
    return lambda encoder: {
        "pairs_spearman": sts.score_pairs(encoder, {"pairs": pairs}, options.batch_size)["pairs"]["spearman"]
    }


def _halves_scorer(config: Config, training_sentences: Callable[[], Iterable[str]]) -> Callable[[Encoder], Scores]:
    for fewest_words in (6, 2):  # halves of short sentences say little: only where there are no others
        first, second = retrieval.halves(training_sentences(), RETRIEVAL_PAIRS, fewest_words)
        if len(first) >= 2:
            return _retrieval_scorer("halves_retrieval", first, second, config.eval.batch_size)
    raise DataError(
        f"data.train_file={config.data.train_file} has too few sentences: the dev metric halves_retrieval needs two "
        "different ones of at least two words"
    )


def _retrieval_scorer(
    metric: str, queries: list[str], targets: list[str], batch_size: int
) -> Callable[[Encoder], Scores]:
    """Scores the mean reciprocal rank as `metric`, and recalls beside it."""

    def score(encoder: Encoder) -> Scores:
        vectors = encoder.encode(queries + targets, batch_size=batch_size)
        scores = retrieval.retrieval_scores(vectors[: len(queries)], vectors[len(queries) :])
        return {metric: scores.pop("mrr")} | {f"{metric}_{name}": value for name, value in scores.items()}

    return score


def _unscored_pairs(options: EvalConfig) -> tuple[list[str], list[str]]:
    """Queries and targets of `eval.pairs_file`."""
    if options.pairs_file == "docstrings":
        from diffcse_jax.data.docstrings import docstring_pairs

        rows = docstring_pairs(RETRIEVAL_PAIRS)
    else:
        rows = _read_unscored_pairs(Path(options.pairs_file).expanduser())
    return [query for query, _ in rows], [target for _, target in rows]


def _read_unscored_pairs(path: Path) -> list[tuple[str, str]]:
    rows = []
    for number, fields in sts.pair_rows(path):
        if len(fields) != 2:
            raise DataError(f"{path}, line {number}: expected two tab-separated sentences, found {len(fields)} columns")
        rows.append((fields[0], fields[1]))
    if len(rows) < 2:
        raise DataError(f"{path}: eval.metric=pairs_retrieval needs at least two sentence pairs")
    return rows
