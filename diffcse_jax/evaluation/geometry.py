"""The geometry of embeddings on STS-B: alignment, uniformity, similarities by rating, singular values, and search.

Definitions follow SimCSE (section 5) and DiffCSE (section 5 and appendix). Embeddings are normalised except for
singular values.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32

from diffcse_jax.errors import DataError, UserError, require_extra
from diffcse_jax.evaluation import Encoder, Settings, Task
from diffcse_jax.evaluation.retrieval import ranks_among, recalls
from diffcse_jax.evaluation.senteval_data import numbered_lines
from diffcse_jax.evaluation.sts import STSB, ScoredPairs, encode_groups
from diffcse_jax.io import expand_path
from diffcse_jax.models import pooling
from diffcse_jax.models.pooling import normalize

POSITIVE_RATING = 4.0  # alignment is over pairs rated higher
RATING_GROUPS = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))  # without the lower bound, except for 0
BINS = np.linspace(-1, 1, 41)


def score_geometry(encoder: Encoder, content: Mapping[str, ScoredPairs], settings: Settings) -> dict[str, Any]:
    """Return alignment, uniformity, cosine similarities in five rating groups, and singular values over the largest."""
    (pairs,) = content.values()
    gold = np.array(pairs.gold)
    positive = gold > POSITIVE_RATING
    texts = pairs.first + pairs.second
    if not positive.any() or len({*texts}) == 1:
        raise DataError(f"geometry needs pairs of STS-B rated above {POSITIVE_RATING:g}, and different sentences")
    first, second = encode_groups(encoder, [pairs.first, pairs.second])
    distinct = np.concatenate([first, second])[np.unique(texts, return_index=True)[1]]
    cosines = (normalize(first) * normalize(second)).sum(axis=1)
    spectrum = np.linalg.svd(distinct, compute_uv=False)
    return {
        "alignment": float(pooling.alignment(jnp.asarray(first[positive]), jnp.asarray(second[positive])).mean()),
        "uniformity": uniformity(distinct),
        "n": len(pairs.gold),
        "similarity_by_rating": similarity_by_rating(cosines, gold),
        "singular_values": (spectrum / (spectrum[0] or 1)).tolist(),
    }


def score_retrieval(encoder: Encoder, content: Mapping[str, ScoredPairs], settings: Settings) -> dict[str, Any]:
    """Find the other sentence of each pair rated 5.0 among all sentences of the split (DiffCSE, table 10).

    Scores are recall at 1, 5 and 10, x 100. `examples` are the best hits of the user's queries, if there are any.
    """
    (pairs,) = content.values()
    rows = np.flatnonzero(np.array(pairs.gold) == 5.0)
    texts = pairs.first + pairs.second
    if not len(rows):
        raise DataError("retrieval needs pairs of STS-B that are rated 5.0")
    corpus = normalize(np.concatenate(encode_groups(encoder, [pairs.first, pairs.second])))
    scores = corpus[rows] @ corpus.T
    scores[np.arange(len(rows)), rows] = -np.inf  # a query does not find itself
    ranks = ranks_among(scores, targets=len(pairs.gold) + rows)
    found: dict[str, Any] = recalls(ranks) | {"n": len(rows)}
    if settings.queries:
        queries = read_queries(settings.queries)
        similarities = normalize(encoder.encode(queries)) @ corpus.T  # sentences of one kind, with the default prompt
        hits = [best_hits(row, texts, settings.top_k) for row in similarities]
        found["examples"] = [{"query": query, "hits": best} for query, best in zip(queries, hits, strict=True)]
    return found


PROBES = (
    Task("geometry", STSB.splits, STSB.read, score_geometry, one_split=True),
    Task("retrieval", STSB.splits, STSB.read, score_retrieval, one_split=True),
)


def read_queries(file: Path) -> list[str]:
    """Read queries, one per line."""
    queries = [line.strip() for _, line in numbered_lines(expand_path(file))]
    if not queries:
        raise DataError(f"{file} has no queries")
    return queries


def best_hits(scores: Float32[np.ndarray, " sentences"], texts: Sequence[str], top_k: int) -> list[tuple[str, float]]:
    """Return the `top_k` most similar distinct sentences and their similarities."""
    hits: dict[str, float] = {}
    for row in np.argsort(-scores, kind="stable"):
        hits.setdefault(texts[row], float(scores[row]))
        if len(hits) == top_k:
            break
    return list(hits.items())


def uniformity(embeddings: Float32[np.ndarray, "n dim"]) -> float:
    """Return the log of the mean of exp(-2 d^2) over pairs of distinct rows, normalised (Wang and Isola 2020)."""
    return float(pooling.uniformity(jnp.asarray(embeddings)))


def similarity_by_rating(cosines: Float32[np.ndarray, " n"], gold: Float[np.ndarray, " n"]) -> list[dict[str, Any]]:
    """Return number, mean, standard deviation and density (over `BINS`) of the cosines in each rating group."""
    groups = []
    for low, high in RATING_GROUPS:
        group = cosines[(gold > low) & (gold <= high) | ((gold == 0) & (low == 0))]
        inside = np.clip(group, BINS[0], BINS[-1])  # rounding can lift a cosine above 1
        density = np.histogram(inside, BINS, density=True)[0] if len(group) else np.zeros(len(BINS) - 1)
        mean, std = (float(group.mean()), float(group.std())) if len(group) else (None, None)
        found = {"ratings": f"{low}-{high}", "n": len(group), "mean": mean, "std": std, "density": density.tolist()}
        groups.append(found)
    return groups


def draw(models: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw `similarity_by_rating.png` and `singular_values.png` for the results that have the task `geometry`."""
    results = {model["model"]: model["tasks"]["geometry"] for model in models if "geometry" in model["tasks"]}
    if not results:
        return []
    try:
        require_extra("matplotlib", "report")
    except UserError as error:
        print(f"notice: no pictures of the geometry: {error}", file=sys.stderr)
        return []
    from matplotlib.figure import Figure

    densities = Figure(figsize=(5 * len(results), 3.4), layout="constrained")
    spectrum = Figure(figsize=(5, 3.4), layout="constrained")
    panels = densities.subplots(1, len(results), sharey=True, squeeze=False)[0]
    values = spectrum.subplots()
    for axes, (model, geometry) in zip(panels, results.items(), strict=True):
        for group in geometry["similarity_by_rating"]:
            axes.plot((BINS[:-1] + BINS[1:]) / 2, group["density"], label=f"{group['ratings']} ({group['n']} pairs)")
        axes.set(xlabel="cosine similarity", ylabel="density", title=f"STS-B pairs by human rating\n{model}")
        axes.legend(title="rating", fontsize="small")
        values.semilogy(range(1, len(geometry["singular_values"]) + 1), geometry["singular_values"], label=model)
    values.set(xlabel="index", ylabel="singular value / largest", title="Spectrum of STS-B embeddings")
    values.legend(fontsize="small")
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {folder / "similarity_by_rating.png": densities, folder / "singular_values.png": spectrum}
    for path, picture in pictures.items():
        picture.savefig(path, dpi=120)
    return [*pictures]
