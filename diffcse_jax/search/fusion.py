"""Hybrid search: BM25 scores and cosine similarities in one ranking."""

import numpy as np
from jaxtyping import Float

CANDIDATES = 100  # best rows of each half, whose scores are combined


def combine(
    dense: Float[np.ndarray, " candidates"],
    lexical: Float[np.ndarray, " candidates"],
    weight: float,
    all_dense: Float[np.ndarray, " sample"],
    all_lexical: Float[np.ndarray, " rows"],
) -> Float[np.ndarray, " candidates"]:
    """Return the weighted mean of two z-scores: `weight` for BM25, the rest for the embeddings.

    Args:
        dense: Cosine similarities of a query's candidates.
        lexical: BM25 scores of the same candidates.
        weight: From 0 (embeddings only) to 1 (BM25 only).
        all_dense: Cosine similarities of all rows, or of a sample, which standardise.
        all_lexical: BM25 scores of all rows, which standardise.
    """
    by_dense = _standardised(dense, all_dense)
    by_lexical = _standardised(lexical, all_lexical)
    return (1 - weight) * by_dense + weight * by_lexical


def _standardised(
    scores: Float[np.ndarray, " candidates"], of: Float[np.ndarray, " rows"]
) -> Float[np.ndarray, " candidates"]:
    scale = of.std() if len(of) else 0
    return (scores - of.mean()) / scale if scale > 1e-9 else np.zeros_like(scores)
