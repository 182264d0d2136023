"""The text of dev metrics, which the first process of a run reads for all.

It consists of JSON values, because the other processes get it from there.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple, Required, TypedDict

import numpy as np

from diffcse_jax.config import Config, EvalConfig
from diffcse_jax.config.groups import MASKED_ACCURACY
from diffcse_jax.data.pairs import short_passages
from diffcse_jax.data.sources import open_split, shown_name
from diffcse_jax.data.split import Split
from diffcse_jax.documents.document import digest
from diffcse_jax.errors import DataError, counted
from diffcse_jax.evaluation import retrieval, search_collections
from diffcse_jax.evaluation.graded_pairs import read_graded_pairs
from diffcse_jax.evaluation.masked_lm import TrainingTokens
from diffcse_jax.evaluation.metrics import SYMMETRIC_METRICS
from diffcse_jax.evaluation.queries import (
    HELD_OUT_PAIRS,
    MIXED,
    MOST_PAIRS,
    TrainingTexts,
    held_out_queries,
    queries_of_all,
    training_halves,
)
from diffcse_jax.evaluation.senteval_data import senteval_folder, size_problem
from diffcse_jax.evaluation.sts import SICKR, STSB, ScoredPairs
from diffcse_jax.hosts import log_line
from diffcse_jax.io import expand_path
from diffcse_jax.run_folder.records import FEWEST

STS_METRICS = {"stsb_spearman", "average_spearman"}
STS_TASKS = {"STSBenchmark": (STSB, "stsb_spearman"), "SICKRelatedness": (SICKR, "sickr_spearman")}
# Pairs of `eval.hold` are scored only once, and find losses that 1,000 cannot tell from chance.
MOST_HOLD_PAIRS = 4000


class Texts(TypedDict, total=False):
    """The text of one metric, of one kind."""

    name: Required[str]  # of the metric
    queries: Sequence[tuple[str, str] | tuple[str, str, int, int]]  # see `queries.Query`
    collection: search_collections.Collection
    sets: dict[str, ScoredPairs]  # of rated pairs, by the name of their score
    token_ids: list[list[int]]
    judges: list[bool]  # which queries judge, if they are divided


class AllTexts(NamedTuple):
    """The text of the metric that chooses, and of those of `eval.beside` and `eval.hold`.

    `of_all` has queries of all documents, if the chosen ones are made of the held-out documents.
    They compare searches that need no training.
    """

    chosen: Texts
    also: list[Texts]
    hold: list[Texts]
    of_all: Texts | None


def read_texts(
    config: Config, training: TrainingTexts, split: Split | None, tokens: TrainingTokens | None
) -> AllTexts:
    """Read the text of all metrics that `eval` names.

    If STS data is needed and missing, `halves_retrieval` replaces the metric that chooses, and
    other metrics that need the data are left out.
    """
    options = config.eval
    metric = config.eval.metric
    also = [name for name in dict.fromkeys(options.beside) if name != metric]
    needs_sts = STS_METRICS.intersection([metric, *also])
    if problem := missing_sts_data(options.data_dir, options.tasks) if needs_sts else "":
        if metric in STS_METRICS:
            metric = "halves_retrieval"
            log_line(
                f"warning: eval.metric={options.metric} is replaced by {metric}, which needs no "
                f"labels: {problem}"
            )
        if left_out := STS_METRICS.intersection(also):
            log_line(f"warning: eval.beside: {', '.join(sorted(left_out))} is left out: {problem}")
        also = [name for name in also if name not in {*STS_METRICS, metric}]
    if split is None and config.data.held_out:
        split = open_split(config.data)

    def texts_of_metric(name: str) -> Texts:
        if name == MASKED_ACCURACY:
            return {"name": name, "token_ids": masked_texts(config, split, tokens)}
        return _texts(config, name, training, split)

    chosen, *others = [texts_of_metric(name) for name in (metric, *also)]
    hold = []
    for name in dict.fromkeys(options.hold):
        try:
            texts = _texts(config, name, training, split, most=MOST_HOLD_PAIRS)
            if (count := len(texts["queries"])) < FEWEST:
                raise DataError(f"it has {counted(count, 'pair{s}')} and needs at least {FEWEST}")
            hold.append(texts)
        except DataError as error:
            log_line(f"warning: eval.hold: {name} is left out: {error}")
    return AllTexts(chosen, others, hold, _texts_of_all(metric, split))


def _texts_of_all(metric: str, split: Split | None) -> Texts | None:
    """Return queries of all documents, if the metric that chooses has some of held-out ones."""
    is_made = split and split.share and metric in HELD_OUT_PAIRS
    if split is None or not is_made or metric in SYMMETRIC_METRICS:
        return None
    queries = queries_of_all(split)
    return {"name": MIXED, "queries": queries} if queries else None


def _texts(
    config: Config,
    metric: str,
    training: TrainingTexts,
    split: Split | None,
    *,
    most: int = MOST_PAIRS,
) -> Texts:
    """Return a metric and its text.

    If pairs are made from documents or sentences, there are at most `most`.
    """
    options = config.eval
    kind, _, file = metric.partition(":")
    is_strict = config.data.on_bad_line == "error"
    texts: Texts = {"name": metric}
    if metric in STS_METRICS:
        return texts | {"sets": _sts_pairs(options)}
    if metric in HELD_OUT_PAIRS and split and split.share:
        return texts | {"queries": held_out_queries(split, config.data.max_length, metric, most)}
    if metric == "halves_retrieval":
        if len(halves := training_halves(training, most)) < 2:
            raise DataError(
                f"{shown_name(config.data.train_file)}: too few sentences. The dev metric "
                "halves_retrieval needs two different sentences of at least two words"
            )
        return texts | {"queries": halves}
    if kind == "pairs_retrieval":
        return texts | {
            "queries": retrieval.read_retrieval_pairs(file or options.pairs_file, strict=is_strict)
        }
    if kind == search_collections.COLLECTION:
        return texts | {
            "collection": search_collections.read_collection(expand_path(file), strict=is_strict)
        }
    path = expand_path(options.pairs_file)  # the metric is pairs_spearman
    pairs = read_graded_pairs(path, strict=is_strict)
    if np.ptp(pairs.gold) == 0:
        raise DataError(
            f"{path}: eval.metric=pairs_spearman needs at least two pairs with different scores"
        )
    return texts | {"sets": {metric: pairs}}


def masked_texts(
    config: Config, split: Split | None, tokens: TrainingTokens | None
) -> list[list[int]]:
    """Return the tokens of passages of the held-out documents.

    There are at most `MOST_PAIRS`, chosen by a hash.
    """
    if split is None or tokens is None:
        raise DataError(f"{MASKED_ACCURACY} is measured only while a masked LM is trained")
    length = config.data.max_length
    sections = (section for _, document in split.held_out() for section in document.sections)
    passages = {
        text for section in sections for text in short_passages(section.sentences(), length)
    }
    chosen = heapq.nsmallest(MOST_PAIRS, passages, key=digest)
    if not chosen:
        raise DataError(
            f"data.held_out={split.share} of data.train_file={split.name} leaves no passage for "
            f"{MASKED_ACCURACY}. Hold out more documents or choose another eval.metric"
        )
    return tokens.of(chosen, length)


def missing_sts_data(data_dir: str, tasks: Sequence[str]) -> str:
    """Say why these tasks cannot be scored, or return an empty string."""
    try:
        folder = senteval_folder(data_dir)
    except DataError as error:
        return f"{error} (eval.data_dir)"
    missing = [path for task in tasks for path in STS_TASKS[task][0].missing(folder, "dev")]
    return f"not found: {', '.join(map(str, missing))}" if missing else ""


def _sts_pairs(options: EvalConfig) -> dict[str, ScoredPairs]:
    """Read the dev splits of `eval.tasks`, by the name of their score."""
    folder = senteval_folder(options.data_dir)
    sets = {}
    for name in options.tasks:
        task, score = STS_TASKS[name]
        sets[score] = task.load(folder, "dev")
        if problem := size_problem(name, {"n": len(sets[score].gold)}, "dev"):
            log_line(f"notice: {name} in {folder} is not the official data: {problem}")
    return sets
