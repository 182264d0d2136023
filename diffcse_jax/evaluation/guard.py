"""A guard against forgetting: a score of general quality beside the dev metric, which is that of the domain."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import scipy.stats
from jaxtyping import Float

from diffcse_jax import hosts
from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import missing_files, sts
from diffcse_jax.evaluation.protocols import Encoder
from diffcse_jax.evaluation.suite import is_local, senteval_folder
from diffcse_jax.groups import EvalConfig
from diffcse_jax.search.nearest import normalized

GENERAL_SENTENCES = Path(__file__).with_name("general_sentences.txt")
STSB, AGREEMENT = "guard_stsb_spearman", "guard_agreement"


@dataclasses.dataclass(frozen=True)
class Guard:
    """Call it with an encoder for the score that `name` names, x 100."""

    name: str
    score: Callable[[Encoder], float]

    def __call__(self, encoder: Encoder) -> float:
        return self.score(encoder)


def build_guard(options: EvalConfig, start: Callable[[], Encoder]) -> Guard:
    """Spearman on STS-B dev; where that is not found, agreement with the start. The same on all processes."""
    pairs = hosts.decided_by_first(lambda: _stsb_dev(options.data_dir))
    if pairs is None:
        return Guard(AGREEMENT, _Agreement(general_sentences(), start(), options.batch_size))
    first, second, gold = pairs
    sets = {STSB: sts.ScoredPairs(first, second, np.array(gold))}
    return Guard(STSB, lambda encoder: sts.score_pairs(encoder, sets, options.batch_size)[STSB]["spearman"])


def general_sentences() -> list[str]:
    """Plain English sentences on everyday subjects, shipped with the package."""
    return GENERAL_SENTENCES.read_text(encoding="utf-8").split("\n")[:-1]


class _Agreement:
    """Spearman's correlation, over all pairs of sentences, of an encoder's cosines with the start's."""

    def __init__(self, sentences: list[str], start: Encoder, batch_size: int):
        self._sentences, self._batch_size = sentences, batch_size
        self._of_start = self._cosines(start)

    def __call__(self, encoder: Encoder) -> float:
        return 100 * float(scipy.stats.spearmanr(self._of_start, self._cosines(encoder)).statistic)

    def _cosines(self, encoder: Encoder) -> Float[np.ndarray, " pairs"]:
        vectors = normalized(encoder.encode(self._sentences, batch_size=self._batch_size))
        return (vectors @ vectors.T)[np.triu_indices(len(vectors), k=1)]


def _stsb_dev(data_dir: str) -> list[list] | None:
    """First sentences, second sentences and scores; None where they are not found: a guard fetches nothing."""
    if not is_local(data_dir):
        return None
    try:
        task = sts.STSBenchmark(senteval_folder(data_dir))
    except DataError:
        return None
    if missing_files(task, "dev"):
        return None
    pairs = task.load("dev")
    return [pairs.first, pairs.second, pairs.gold.tolist()]
