"""Semantic textual similarity (STS): how cosine similarities of embeddings correlate with human ratings.

File formats and formulas are those of SimCSE's copy of SentEval. Nothing is trained.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
from jaxtyping import Float, Float32

from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import Embeddings, Encoder, Settings, Task
from diffcse_jax.evaluation.senteval_data import Form, numbered_lines, parse_rows, read_lines

OFFICIAL_SIZES: dict[str, dict[str, int]] = tomllib.loads(
    Path(__file__).with_name("official.toml").read_text(encoding="utf-8")
)
RATINGS = (0.0, 5.0)  # the scale of the ratings in all STS data sets
COEFFICIENTS = ("spearman", "pearson")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")  # float() also accepts 1_0 and nan


class ScoredPairs(NamedTuple):
    """Sentence pairs with human ratings or labels."""

    first: list[str]
    second: list[str]
    gold: list[float]


# Scores


def similarities(
    encoder: Encoder, sets: Mapping[str, ScoredPairs], batch_size: int = 64
) -> dict[str, Float32[np.ndarray, " pairs"]]:
    """Return the cosine similarity of each pair by set. All sets are encoded in one call."""
    embeddings = iter(encode_groups(encoder, [side for p in sets.values() for side in (p.first, p.second)], batch_size))
    return {name: cosine(next(embeddings), next(embeddings)) for name in sets}


def encode_groups(
    encoder: Encoder, groups: Iterable[list[str]], batch_size: int = 64, prompt: str | None = None
) -> list[Float32[np.ndarray, "_ dim"]]:
    """Return the embeddings of each group of sentences, from one call of the encoder."""
    groups = list(groups)
    sentences = [sentence for group in groups for sentence in group]
    embeddings = encoder.encode(sentences, batch_size=batch_size, prompt=prompt)
    return np.split(embeddings, np.cumsum([len(group) for group in groups])[:-1])


def cosine(u: Embeddings, v: Embeddings) -> Float32[np.ndarray, " sentences"]:
    """Return the cosine similarity of each row; 0 if an embedding is zero, as in SentEval."""
    u, v = np.nan_to_num(u), np.nan_to_num(v)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num((u * v).sum(axis=1) / (np.linalg.norm(u, axis=1) * np.linalg.norm(v, axis=1)))


def correlations(system: Float[np.ndarray, " n"], gold: Sequence[float] | Float[np.ndarray, " n"]) -> dict[str, Any]:
    """Return `spearman` (average ranks for ties) and `pearson`, x 100, and the number of pairs `n`.

    Both coefficients are 0 if all similarities or all ratings are equal.
    """
    if np.ptp(system) == 0 or np.ptp(gold) == 0:
        return {"spearman": 0.0, "pearson": 0.0, "n": len(gold)}
    spearman, pearson = scipy.stats.spearmanr(system, gold), scipy.stats.pearsonr(system, gold)
    return {"spearman": 100 * float(spearman.statistic), "pearson": 100 * float(pearson.statistic), "n": len(gold)}


# Files


def read_pairs(path: Path, form: Form, scale: tuple[float, float] = (-1e9, 1e9)) -> ScoredPairs:
    """Read sentence pairs whose ratings are on a scale, from the lowest to the highest."""
    return _scored(numbered_lines(path, form.encoding), form, scale, path)


def read_parallel_pairs(sentences: Path, ratings: Path) -> ScoredPairs:
    """Read a file of tab-separated pairs and a file of their ratings, line by line. Unrated pairs are skipped."""
    pairs, golds = read_lines(sentences), read_lines(ratings)
    if len(pairs) != len(golds):
        raise DataError(f"{sentences} has {len(pairs)} lines, but {ratings} has {len(golds)}. They must match")
    rated = []
    for number, (gold, pair) in enumerate(zip(golds, pairs, strict=True), 1):
        if rating := gold.split("\t")[0].strip():
            if (found := len(pair.strip().split("\t"))) != 2:
                raise DataError(f"{sentences}, line {number}: expected 2 sentences separated by a tab, found {found}")
            rated.append((number, f"{rating}\t{pair}"))
    return _scored(rated, Form(0, (1, 2)), RATINGS, f"{ratings} with {sentences.name}")


def _scored(lines: list[tuple[int, str]], form: Form, scale: tuple[float, float], source: Path | str) -> ScoredPairs:
    low, high = scale

    def is_rating(text: str) -> bool:
        return bool(_NUMBER.fullmatch(text)) and low <= float(text) <= high

    rows = parse_rows(lines, form, is_rating, f"a number from {low:g} to {high:g}", source)
    if not rows:
        raise DataError(f"{source}: no sentences")
    first, second = zip(*(sentences for _, sentences in rows), strict=True)
    return ScoredPairs([*first], [*second], [float(rating) for rating, _ in rows])


def size_problem(task: str, scores: Mapping[str, Any], mode: str) -> str:
    """Say which splits differ in size from the official data, or return an empty string."""
    official = OFFICIAL_SIZES.get(task, {})
    counts = {subset: found["n"] for subset, found in scores.get("subsets", {}).items()}
    if not counts:
        counts = {split: scores[f"n{split}"] for split in ("train", "dev", "test") if f"n{split}" in scores}
        counts |= {"dev" if mode == "dev" else "test": scores["n"]} if "n" in scores else {}
        counts |= {"dev": scores["dev"]["n"]} if "dev" in scores else {}
    return ", ".join(
        f"{split} has {count:,} instead of {official[split]:,} examples"
        for split, count in counts.items()
        if split in official and count != official[split]
    )


# Tasks


def score_pairs(encoder: Encoder, content: Mapping[str, ScoredPairs], settings: Settings) -> dict[str, Any]:
    """Return scores of the test split, if it is read, and of the dev split."""
    systems = similarities(encoder, content)
    scores = {split: correlations(systems[split], pairs.gold) for split, pairs in content.items()}
    return scores.get("test", scores["dev"]) | {"dev": scores["dev"]}


def score_year(encoder: Encoder, content: Mapping[str, ScoredPairs], settings: Settings) -> dict[str, Any]:
    """Return scores of all subsets together, of each subset, and under each aggregation, x 100.

    `all` ranks the pairs of all subsets together (SimCSE, DiffCSE and later papers), `mean` averages the subsets'
    coefficients, and `wmean` weights them by pairs (BERT-flow, whitening).
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
    """Return one of STS12 to STS16: subsets of test data, each with a file of pairs and a file of ratings."""
    stem = f"STS/{name}-en-test/STS"
    subsets = {part: (f"{stem}.input.{part}.txt", f"{stem}.gs.{part}.txt") for part in OFFICIAL_SIZES[name]}
    return Task(name, subsets, read_parallel_pairs, score_year, modes=("test", "fasttest"))


YEARS = tuple(_year(f"STS{year}") for year in range(12, 17))
STSB = Task(
    "STSBenchmark",
    {split: (f"STS/STSBenchmark/sts-{split}.csv",) for split in ("dev", "test")},
    partial(read_pairs, form=Form(4, (5, 6)), scale=RATINGS),
    score_pairs,
)
SICKR = Task(
    "SICKRelatedness",
    {"dev": ("SICK/SICK_trial.txt",), "test": ("SICK/SICK_test_annotated.txt",)},
    partial(read_pairs, form=Form(3, (1, 2), header=True), scale=RATINGS),
    score_pairs,
)
