"""Retrieval: how high each query ranks its own target. Also tasks on the user's own files of pairs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int

from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import Embeddings, Encoder, Settings
from diffcse_jax.evaluation.senteval_data import numbered_lines
from diffcse_jax.evaluation.sts import encode_groups
from diffcse_jax.io import expand_path
from diffcse_jax.models.pooling import normalize

BLOCK = 1024  # queries whose similarities are held in memory at once
CUTOFFS = (1, 5, 10)
DOCSTRINGS = "docstrings"  # instead of a file: the pairs that training on `docstrings` holds out
MOST_DOCSTRINGS = 1000


# Ranks


def retrieval_scores(
    queries: Embeddings, targets: Embeddings, passages: Sequence[int] | None = None
) -> dict[str, float]:
    """Return `mrr` (mean reciprocal rank), `recall@1`, `recall@5` and `recall@10` of target i for query i, x 100."""
    return rank_scores(target_ranks(queries, targets, passages))


def rank_scores(ranks: Float[np.ndarray, " n"]) -> dict[str, float]:
    """Return the scores of `retrieval_scores` of these ranks."""
    return {"mrr": 100 * float(np.mean(1 / ranks))} | recalls(ranks)


def recalls(ranks: Float[np.ndarray, " n"]) -> dict[str, float]:
    """Return the percentage of ranks up to each of `CUTOFFS`."""
    return {f"recall@{k}": 100 * float(np.mean(ranks <= k)) for k in CUTOFFS}


def target_ranks(
    queries: Embeddings, targets: Embeddings, passages: Sequence[int] | None = None
) -> Float[np.ndarray, " sentences"]:
    """Return the rank, from 1, of target i for query i. Ties share their mean rank.

    `passages` are those that the targets are most of. A target competes with the first target of each other passage.
    None: each target is a passage of its own.
    """
    queries, targets = normalize(queries), normalize(targets)
    blocks = ((start, queries[start : start + BLOCK] @ targets.T) for start in range(0, len(queries), BLOCK))
    return np.concatenate([ranks_among(*competing(scores, passages, start)) for start, scores in blocks])


def competing(
    scores: Float32[np.ndarray, "rows n"], passages: Sequence[int] | None = None, start: int = 0
) -> tuple[Float32[np.ndarray, "rows passages"], Int[np.ndarray, " rows"]]:
    """Return the scores of the texts that compete for each query, and the column of its own target.

    `scores` are those of all targets for the queries `start`, `start` + 1, ...; `passages` are as for `target_ranks`.
    """
    of = np.arange(scores.shape[1]) if passages is None else passages
    _, first, columns = np.unique(of, return_index=True, return_inverse=True)
    rows, own = np.arange(len(scores)), columns[start : start + len(scores)]
    found = scores[:, first]
    found[rows, own] = scores[rows, start + rows]
    return found, own


def ranks_among(
    scores: Float32[np.ndarray, "rows columns"], targets: Int[np.ndarray, " rows"]
) -> Float[np.ndarray, " rows"]:
    """Return the rank, from 1, of column `targets[i]` in row i, highest first. Ties share their mean rank."""
    own = scores[np.arange(len(targets)), targets][:, None]
    return (scores > own).sum(axis=1) + ((scores == own).sum(axis=1) + 1) / 2


def encode_pairs(
    encoder: Encoder, queries: Sequence[str], targets: Sequence[str], batch_size: int = 64, *, symmetric: bool = False
) -> tuple[Float32[np.ndarray, "_ dim"], Float32[np.ndarray, "_ dim"]]:
    """Return the embeddings of queries and targets, with the encoder's prompts of queries and documents.

    Texts of one kind (`symmetric`), such as the halves of sentences, have one prompt.
    """
    prompts = encoder.prompts
    query, document = (prompts.symmetric,) * 2 if symmetric else (prompts.query, prompts.document)
    if query == document:
        first, second = encode_groups(encoder, [[*queries], [*targets]], batch_size, query)
        return first, second
    return (
        encoder.encode(queries, batch_size=batch_size, prompt=query),
        encoder.encode(targets, batch_size=batch_size, prompt=document),
    )


# Tasks on the user's own files


def score_pairs(encoder: Encoder, file: str, settings: Settings) -> dict[str, Any]:
    """For the first text of each pair, find the second among the second texts of all pairs."""
    queries, targets = zip(*read_retrieval_pairs(file), strict=True)
    return retrieval_scores(*encode_pairs(encoder, queries, targets)) | {"n": len(queries)}


def read_retrieval_pairs(file: str) -> list[tuple[str, str]]:
    """Read pairs of query and target from a file of two tab-separated texts, or those of held-out docstrings."""
    if file == DOCSTRINGS:
        from diffcse_jax.data.documents import docstring_pairs

        return docstring_pairs(MOST_DOCSTRINGS)
    path, pairs = expand_path(file), []
    for number, line in numbered_lines(path):
        query, *targets = line.strip().split("\t")
        if len(targets) != 1:
            raise DataError(f"{path}, line {number}: expected two tab-separated texts, found {1 + len(targets)}")
        pairs.append((query, targets[0]))
    if len(pairs) < 2:
        raise DataError(f"{path}: pairs_retrieval needs at least two pairs")
    return pairs
