"""The geometry of an embedding space on STS-B: alignment, uniformity, similarities by rating, singular values, search.

Definitions of SimCSE (Section 5) and DiffCSE (Section 5, appendix); vectors are normalised except for the spectrum.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Float32
from matplotlib.figure import Figure

from diffcse_jax.errors import DataError
from diffcse_jax.evaluation.protocols import Encoder
from diffcse_jax.evaluation.retrieval import ranks_among
from diffcse_jax.evaluation.sts import ScoredPairs, STSBenchmark
from diffcse_jax.search.nearest import normalized

POSITIVE_RATING = 4.0  # pairs above it are positives of the alignment
RATING_GROUPS = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))  # lower bound excluded, but for 0
BINS = np.linspace(-1, 1, 41)
BLOCK = 1024  # rows whose distances are held at once


@dataclasses.dataclass(frozen=True)
class StsbProbe:
    """A task on the pairs of one split of STS-B.

    Attributes:
        folder: SentEval's `downstream` folder.
    """

    folder: Path

    name: ClassVar[str]
    modes: ClassVar = ("test", "fasttest", "dev")

    def files(self, mode: str) -> list[Path]:
        """The file that `run` reads in this mode."""
        return [self.folder / STSBenchmark.splits[_split_of(mode)]]

    def encoded(self, encoder: Encoder, mode: str, batch_size: int) -> tuple[ScoredPairs, np.ndarray, np.ndarray]:
        """The split's pairs, and the vectors of their first and second sentences."""
        pairs = STSBenchmark(self.folder).load(_split_of(mode))
        vectors = encoder.encode(pairs.first + pairs.second, batch_size=batch_size)
        first, second = np.split(vectors, 2)
        return pairs, first, second


class Geometry(StsbProbe):
    """Alignment, uniformity, cosine similarities in five rating groups, singular values."""

    name = "geometry"

    def run(self, encoder: Encoder, mode: str, batch_size: int = 64) -> dict[str, Any]:
        """The numbers of one split.

        Raises:
            DataError: no pair is rated above 4, which alignment needs, or there is one sentence alone.
        """
        pairs, first, second = self.encoded(encoder, mode, batch_size)
        unit_first, unit_second = normalized(first), normalized(second)
        positive = pairs.gold > POSITIVE_RATING
        if not positive.any():
            raise DataError(
                f"{self.files(mode)[0]}: no pair is rated above {POSITIVE_RATING:g}, so there is no alignment to tell"
            )
        if len({*pairs.first, *pairs.second}) == 1:
            raise DataError(f"{self.files(mode)[0]}: all sentences are the same, so they have no geometry")
        sentences = np.concatenate([first, second])[np.unique(pairs.first + pairs.second, return_index=True)[1]]
        return {
            "alignment": float(np.square(unit_first - unit_second)[positive].sum(axis=1).mean()),
            "uniformity": uniformity(normalized(sentences)),
            "n": len(pairs.gold),
            "similarity_by_rating": similarity_by_rating((unit_first * unit_second).sum(axis=1), pairs.gold),
            "singular_values": singular_values(sentences).tolist(),
        }


@dataclasses.dataclass(frozen=True)
class Retrieval(StsbProbe):
    """Finding the other sentence of each pair rated 5.0 among all sentences of the split (DiffCSE Table 10).

    Attributes:
        folder: SentEval's `downstream` folder.
        queries: sentences whose best hits are told; empty: those of the first pairs.
        top_k: how many hits.
    """

    queries: tuple[str, ...] = ()
    top_k: int = 3

    name = "retrieval"
    shown = 5  # of the pairs' queries

    def run(self, encoder: Encoder, mode: str, batch_size: int = 64) -> dict[str, Any]:
        """Recall at 1, 5 and 10, x 100, and the best hits of some queries.

        Raises:
            DataError: no pair is rated 5.0.
        """
        pairs, first, second = self.encoded(encoder, mode, batch_size)
        queries = np.flatnonzero(pairs.gold == 5.0)
        if not len(queries):
            raise DataError(f"{self.files(mode)[0]}: no pair is rated 5.0, so there is nothing to retrieve")
        sentences = normalized(np.concatenate([first, second]))
        similarities = normalized(first[queries]) @ sentences.T
        similarities[np.arange(len(queries)), queries] = -np.inf  # not itself
        ranks = ranks_among(similarities, targets=len(pairs.gold) + queries)
        recalls = {f"recall@{k}": 100 * float(np.mean(ranks <= k)) for k in (1, 5, 10)}
        told = [pairs.first[query] for query in queries[: self.shown]]
        if self.queries:
            told = list(self.queries)
            similarities = normalized(encoder.encode(told, batch_size=batch_size)) @ sentences.T
        hits = [
            {"query": query, "hits": best_hits(row, pairs.first + pairs.second, self.top_k)}
            for query, row in zip(told, similarities, strict=False)
        ]
        return recalls | {"n": len(queries), "examples": hits}


def best_hits(
    similarities: Float32[np.ndarray, " sentences"], texts: Sequence[str], top_k: int
) -> list[tuple[str, float]]:
    """The most similar different sentences, with their similarities."""
    hits: dict[str, float] = {}
    for row in np.argsort(-similarities, kind="stable"):
        if len(hits) == top_k:
            break
        hits.setdefault(texts[row], float(similarities[row]))
    return list(hits.items())


def _split_of(mode: str) -> str:
    return "dev" if mode == "dev" else "test"


def uniformity(vectors: Float32[np.ndarray, "n dimension"]) -> float:
    """Log of the mean of exp(-2 d^2) over all ordered pairs of distinct rows (Wang and Isola 2020)."""
    total = 0.0
    for start in range(0, len(vectors), BLOCK):
        squared_distances = 2 - 2 * (vectors[start : start + BLOCK] @ vectors.T).astype(np.float64)
        total += np.exp(-2 * squared_distances).sum()
    return float(np.log((total - len(vectors)) / (len(vectors) * (len(vectors) - 1))))


def similarity_by_rating(
    similarities: Float32[np.ndarray, " pairs"], gold: Float[np.ndarray, " pairs"]
) -> list[dict[str, Any]]:
    """Number, mean, deviation and density (over `BINS`) of the similarities in each rating group."""
    groups = []
    for low, high in RATING_GROUPS:
        group = similarities[(gold > low) & (gold <= high) | ((gold == 0) & (low == 0))]
        within = np.clip(group, BINS[0], BINS[-1])  # that of equal sentences may be rounded to more than 1
        density = np.histogram(within, BINS, density=True)[0] if len(group) else np.zeros(len(BINS) - 1)
        mean, deviation = (float(group.mean()), float(group.std())) if len(group) else (None, None)
        groups.append(
            {"ratings": f"{low}-{high}", "n": len(group), "mean": mean, "std": deviation, "density": density.tolist()}
        )
    return groups


def singular_values(vectors: Float32[np.ndarray, "n dimension"]) -> Float[np.ndarray, " rank"]:
    """Singular values of the sentence matrix, the largest scaled to 1; zeros where all vectors are zero."""
    values = np.linalg.svd(vectors, compute_uv=False)
    return values / (values[0] or 1)


def draw(models: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draws `similarity_by_rating.png` and `singular_values.png` of all models whose results have `geometry`."""
    results = {model["model"]: model["tasks"]["geometry"] for model in models if "geometry" in model["tasks"]}
    if not results:
        return []
    densities = Figure(figsize=(5 * len(results), 3.4), layout="constrained")
    centres = (BINS[:-1] + BINS[1:]) / 2
    panels = densities.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for axes, (model, geometry) in zip(panels, results.items(), strict=True):
        for group in geometry["similarity_by_rating"]:
            axes.plot(centres, group["density"], label=f"{group['ratings']} ({group['n']} pairs)")
        axes.set(xlabel="cosine similarity", title=f"STS-B pairs by human rating\n{model}")
        axes.legend(title="rating", fontsize="small")
    panels[0].set_ylabel("density")

    spectrum = Figure(figsize=(5, 3.4), layout="constrained")
    axes = spectrum.subplots()
    for model, geometry in results.items():
        axes.semilogy(np.arange(1, len(geometry["singular_values"]) + 1), geometry["singular_values"], label=model)
    axes.set(xlabel="index", ylabel="singular value / largest", title="Spectrum of STS-B sentence vectors")
    axes.legend(fontsize="small")

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "similarity_by_rating.png", folder / "singular_values.png"]
    for figure, path in zip((densities, spectrum), paths, strict=True):
        figure.savefig(path, dpi=120)
    return paths
