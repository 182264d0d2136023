"""The text on which a report compares encoders: of a run's dev text, or the package's general sentences.

What is taken of it is decided by positions, evenly spaced, never by an outcome.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from diffcse_jax.config import Config
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.errors import DataError, UserError
from diffcse_jax.evaluation.dev import CorrelationMetric, RetrievalMetric, build_dev_evaluation, general_sentences
from diffcse_jax.evaluation.tasks import is_local
from diffcse_jax.io import expand_path

MOST_PAIRS = 200
RELATED_SHARE = 0.2  # of rated pairs: those rated highest belong together

_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True)
class Sample:
    """Pairs of texts, or texts alone.

    Attributes:
        about: what they are, in words.
        first: of pairs the queries, or all texts.
        second: of pairs the other texts; empty where there are no pairs.
        gold: human ratings of the pairs; None where there are none, and all pairs belong together.
    """

    about: str
    first: Sequence[str]
    second: Sequence[str] = ()
    gold: Sequence[float] | None = None

    @property
    def related(self) -> list[int]:
        """The pairs that belong together."""
        if self.gold is None:
            return list(range(len(self.second)))
        bound = float(np.quantile(self.gold, 1 - RELATED_SHARE))
        return [index for index, rating in enumerate(self.gold) if rating >= bound]

    @property
    def texts(self) -> list[str]:
        """All distinct texts."""
        return list(dict.fromkeys([*self.first, *self.second]))


def sample_of(config: Config) -> Sample:
    """A sample of the dev text of a run; general sentences where that text is not on this machine."""
    try:
        return _dev_text(config)
    except UserError as error:
        reason = str(error).splitlines()[0]
    sentences = general_sentences()
    return Sample(
        f"{len(sentences)} general English sentences of the package, since the run has no dev text here to compare on "
        f"({reason})",
        sentences,
    )


def _dev_text(config: Config) -> Sample:
    """A sample of the dev text.

    Raises:
        UserError: it is not here, or there is none that pairs could be taken of.
    """
    if config.needs("labels"):
        raise DataError("its dev score is of labelled tasks")
    if config.eval.metric in ("stsb_spearman", "average_spearman") and not is_local(config.eval.data_dir):
        raise DataError("no folder of SentEval's data is named by eval.data_dir or $DIFFCSE_DATA_DIR")
    metric = build_dev_evaluation(config, lambda: _training_sentences(config)).chosen
    if isinstance(metric, CorrelationMetric):
        rated = [
            row
            for pairs in metric.counted.values()
            for row in zip(pairs.first, pairs.second, pairs.gold.tolist(), strict=True)
        ]
        first, second, gold = (list(column) for column in zip(*evenly_spaced(rated, MOST_PAIRS), strict=True))
        about = f"{len(first)} of the {len(rated):,} rated pairs that the dev score is measured on"
        return Sample(about, first, second, gold)
    assert isinstance(metric, RetrievalMetric)
    pairs = list(zip(metric.queries, metric.targets, strict=True))
    first, second = (list(column) for column in zip(*evenly_spaced(pairs, MOST_PAIRS), strict=True))
    return Sample(f"{len(first)} of the {len(pairs):,} pairs that the dev score is measured on", first, second)


def _training_sentences(config: Config) -> Iterator[str]:
    """A pass over the training text, which is not fetched for a report."""
    name = config.data.train_file
    if name != "docstrings" and not Path(expand_path(name)).exists():
        raise DataError(f"there is no {name}")
    return (row[0] for row in open_corpus(config.data))


def evenly_spaced(items: Sequence[_Item], count: int) -> list[_Item]:
    """At most `count` of the items, the first one among them, at even distances."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]
