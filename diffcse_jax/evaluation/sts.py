"""Semantic textual similarity (STS): cosine similarities and human ratings of pairs.

The score is how they correlate. File formats and formulas are those of SimCSE's copy of SentEval.
Nothing is trained. The geometry of the embeddings of STS-B follows SimCSE (section 5) and DiffCSE
(section 5 and appendix).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy.stats
from jaxtyping import Float, Float32

from diffcse_jax.errors import DataError, UserError, require_extra
from diffcse_jax.evaluation import Embeddings, Encoder, EvaluationSettings, Task, encode_groups
from diffcse_jax.evaluation.senteval_data import (
    OFFICIAL_SIZES,
    LabelledColumns,
    numbered_lines,
    parse_rows,
    read_lines,
)
from diffcse_jax.hosts import log_line
from diffcse_jax.io import disk_errors, replace_file
from diffcse_jax.models.pooling import alignment, normalize, uniformity

RATINGS = (0.0, 5.0)  # the scale of the ratings in all STS data sets
COEFFICIENTS = ("spearman", "pearson")
POSITIVE_RATING = 4.0  # alignment is over pairs rated higher
# Groups exclude their lower bound, except for 0.
RATING_GROUPS = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))
BINS = np.linspace(-1, 1, 41)


class ScoredPairs(NamedTuple):
    """Sentence pairs with human ratings or labels."""

    first: list[str]
    second: list[str]
    gold: list[float]


def similarities(
    encoder: Encoder, sets: Mapping[str, ScoredPairs], batch_size: int = 64
) -> dict[str, Float32[np.ndarray, " pairs"]]:
    """Return the cosine similarity of each pair by set. All sets are encoded in one call."""
    embeddings = iter(
        encode_groups(
            encoder, [side for p in sets.values() for side in (p.first, p.second)], batch_size
        )
    )
    return {name: cosine(next(embeddings), next(embeddings)) for name in sets}


def cosine(u: Embeddings, v: Embeddings) -> Float32[np.ndarray, " sentences"]:
    """Return the cosine similarity of each row; 0 if an embedding is zero, as in SentEval."""
    u, v = np.nan_to_num(u), np.nan_to_num(v)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(
            (u * v).sum(axis=1) / (np.linalg.norm(u, axis=1) * np.linalg.norm(v, axis=1))
        )


def correlations(
    system: Float[np.ndarray, " n"], gold: Sequence[float] | Float[np.ndarray, " n"]
) -> dict[str, Any]:
    """Return `spearman` (average ranks for ties) and `pearson`, x 100, and the number of pairs `n`.

    Both coefficients are 0 if all similarities or all ratings are equal.
    """
    if np.ptp(system) == 0 or np.ptp(gold) == 0:
        return {"spearman": 0.0, "pearson": 0.0, "n": len(gold)}
    spearman, pearson = scipy.stats.spearmanr(system, gold), scipy.stats.pearsonr(system, gold)
    return {
        "spearman": 100 * float(spearman.statistic),
        "pearson": 100 * float(pearson.statistic),
        "n": len(gold),
    }


def read_pairs(path: Path, columns: LabelledColumns) -> ScoredPairs:
    """Read sentence pairs with ratings."""
    return _scored(parse_rows(numbered_lines(path), columns, path))


def read_parallel_pairs(sentences: Path, ratings: Path) -> ScoredPairs:
    """Read a file of tab-separated pairs and a file of their ratings, line by line.

    Unrated pairs are skipped.
    """
    pairs, golds = read_lines(sentences), read_lines(ratings)
    if len(pairs) != len(golds):
        raise DataError(
            f"{sentences} has {len(pairs)} lines, but {ratings} has {len(golds)}. They must match"
        )
    rated = []
    for number, (gold, pair) in enumerate(zip(golds, pairs, strict=True), 1):
        if rating := gold.split("\t")[0].strip():
            if (count := len(pair.strip().split("\t"))) != 2:
                raise DataError(
                    f"{sentences}, line {number}: expected 2 sentences separated by a tab, found "
                    f"{count}"
                )
            rated.append((number, f"{rating}\t{pair}"))
    return _scored(
        parse_rows(rated, LabelledColumns(0, (1, 2), RATINGS), f"{ratings} with {sentences.name}")
    )


def _scored(rows: Sequence[tuple[float, tuple[str, ...]]]) -> ScoredPairs:
    first, second = zip(*(sentences for _, sentences in rows), strict=True)
    return ScoredPairs([*first], [*second], [rating for rating, _ in rows])


def score_pairs(
    encoder: Encoder, content: Mapping[str, ScoredPairs], settings: EvaluationSettings
) -> dict[str, Any]:
    """Return scores of the test split, if it is read, and of the dev split."""
    systems = similarities(encoder, content)
    scores = {split: correlations(systems[split], pairs.gold) for split, pairs in content.items()}
    return scores.get("test", scores["dev"]) | {"dev": scores["dev"]}


def score_year(
    encoder: Encoder, content: Mapping[str, ScoredPairs], settings: EvaluationSettings
) -> dict[str, Any]:
    """Return scores of all subsets together, of each subset, and under each aggregation, x 100.

    `all` ranks the pairs of all subsets together (SimCSE, DiffCSE and later papers), `mean`
    averages the subsets' coefficients, and `wmean` weights them by pairs (BERT-flow, whitening).
    """
    systems = similarities(encoder, content)
    golds = {subset: pairs.gold for subset, pairs in content.items()}
    subsets = {subset: correlations(systems[subset], golds[subset]) for subset in content}
    together = correlations(np.concatenate([*systems.values()]), np.concatenate([*golds.values()]))
    aggregations = {"all": {name: together[name] for name in COEFFICIENTS}}
    for aggregation, weights in (("mean", None), ("wmean", [*map(len, golds.values())])):
        aggregations[aggregation] = {
            name: float(np.average([scores[name] for scores in subsets.values()], weights=weights))
            for name in COEFFICIENTS
        }
    return together | {"subsets": subsets, "aggregations": aggregations}


def _year(name: str) -> Task:
    """Return one of STS12 to STS16.

    It has subsets of test data, each with a file of pairs and a file of ratings.
    """
    stem = f"STS/{name}-en-test/STS"
    subsets = {
        part: (f"{stem}.input.{part}.txt", f"{stem}.gs.{part}.txt") for part in OFFICIAL_SIZES[name]
    }
    return Task(name, subsets, read_parallel_pairs, score_year, modes=("test", "fasttest"))


YEARS = tuple(_year(f"STS{year}") for year in range(12, 17))
STSB = Task(
    "STSBenchmark",
    {split: (f"STS/STSBenchmark/sts-{split}.csv",) for split in ("dev", "test")},
    partial(read_pairs, columns=LabelledColumns(4, (5, 6), RATINGS)),
    score_pairs,
)
SICKR = Task(
    "SICKRelatedness",
    {"dev": ("SICK/SICK_trial.txt",), "test": ("SICK/SICK_test_annotated.txt",)},
    partial(read_pairs, columns=LabelledColumns(3, (1, 2), RATINGS, header=True)),
    score_pairs,
)
STS_TASKS = (*YEARS, STSB, SICKR)


def score_geometry(
    encoder: Encoder, content: Mapping[str, ScoredPairs], settings: EvaluationSettings
) -> dict[str, Any]:
    """Return alignment, uniformity, cosines in five rating groups, and singular values.

    Singular values are divided by the largest. Embeddings are normalised except for singular
    values.
    """
    (pairs,) = content.values()
    gold = np.array(pairs.gold)
    positive = gold > POSITIVE_RATING
    texts = pairs.first + pairs.second
    if not positive.any() or len({*texts}) == 1:
        raise DataError(
            f"geometry needs pairs of STS-B rated above {POSITIVE_RATING:g}, and different "
            "sentences"
        )
    first, second = encode_groups(encoder, [pairs.first, pairs.second])
    distinct = np.concatenate([first, second])[np.unique(texts, return_index=True)[1]]
    cosines = (normalize(first) * normalize(second)).sum(axis=1)
    spectrum = np.linalg.svd(distinct, compute_uv=False)
    return {
        "alignment": float(
            alignment(jnp.asarray(first[positive]), jnp.asarray(second[positive])).mean()
        ),
        "uniformity": float(uniformity(jnp.asarray(distinct))),
        "n": len(pairs.gold),
        "similarity_by_rating": similarity_by_rating(cosines, gold),
        "singular_values": (spectrum / (spectrum[0] or 1)).tolist(),
    }


def similarity_by_rating(
    cosines: Float32[np.ndarray, " n"], gold: Float[np.ndarray, " n"]
) -> list[dict[str, Any]]:
    """Return statistics of the cosines in each rating group.

    These are the number, the mean, the standard deviation and the density (over `BINS`).
    """
    groups = []
    for low, high in RATING_GROUPS:
        group = cosines[(gold > low) & (gold <= high) | ((gold == 0) & (low == 0))]
        inside = np.clip(group, BINS[0], BINS[-1])  # rounding can lift a cosine above 1
        density = (
            np.histogram(inside, BINS, density=True)[0] if len(group) else np.zeros(len(BINS) - 1)
        )
        mean, std = (float(group.mean()), float(group.std())) if len(group) else (None, None)
        summary = {
            "ratings": f"{low}-{high}",
            "n": len(group),
            "mean": mean,
            "std": std,
            "density": density.tolist(),
        }
        groups.append(summary)
    return groups


def draw(models: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw `similarity_by_rating.png` and `singular_values.png`.

    They show the results that have the task `geometry`.
    """
    measured = [model for model in models if "geometry" in model["tasks"]]
    results = {model["model"]: model["tasks"]["geometry"] for model in measured}
    if not results:
        return []
    try:
        require_extra("matplotlib", "report")
    except UserError as error:
        log_line(f"notice: no pictures of the geometry: {error}")
        return []
    from matplotlib.figure import Figure

    densities = Figure(figsize=(5 * len(results), 3.4), layout="constrained")
    spectrum = Figure(figsize=(5, 3.4), layout="constrained")
    panels = densities.subplots(1, len(results), sharey=True, squeeze=False)[0]
    values = spectrum.subplots()
    for axes, (model, geometry) in zip(panels, results.items(), strict=True):
        for group in geometry["similarity_by_rating"]:
            axes.plot(
                (BINS[:-1] + BINS[1:]) / 2,
                group["density"],
                label=f"{group['ratings']} ({group['n']} pairs)",
            )
        axes.set(
            xlabel="cosine similarity",
            ylabel="density",
            title=f"STS-B pairs by human rating\n{model}",
        )
        axes.legend(title="rating", fontsize="small")
        values.semilogy(
            range(1, len(geometry["singular_values"]) + 1), geometry["singular_values"], label=model
        )
    values.set(
        xlabel="index", ylabel="singular value / largest", title="Spectrum of STS-B embeddings"
    )
    values.legend(fontsize="small")
    pictures = {
        folder / "similarity_by_rating.png": densities,
        folder / "singular_values.png": spectrum,
    }
    with disk_errors(folder, safe="The results are complete."):
        folder.mkdir(parents=True, exist_ok=True)
        for path, picture in pictures.items():
            with replace_file(path) as file:
                picture.savefig(file, dpi=120)
    return [*pictures]


GEOMETRY = Task("geometry", STSB.splits, STSB.read, score_geometry, one_split=True)
