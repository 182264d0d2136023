"""Compares encoders on a sample of text: similarities, singular values and searches, before and after training."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import scipy.stats
from jaxtyping import Float, Float32

from diffcse_jax.config import Config
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import DataError, UserError
from diffcse_jax.evaluation import Encoder
from diffcse_jax.evaluation.dev import SYMMETRIC_METRICS, CorrelationMetric, build_dev_evaluation, general_sentences
from diffcse_jax.evaluation.geometry import best_hits, singular_values, uniformity
from diffcse_jax.evaluation.retrieval import encode_pairs, retrieval_scores
from diffcse_jax.evaluation.senteval_data import is_local
from diffcse_jax.io import expand_path
from diffcse_jax.models.pooling import normalize
from diffcse_jax.run_folder.summary import Run
from diffcse_jax.training.curves import BASELINE, Chart, Line, colour_of

MOST_PAIRS = 200
RELATED_FRACTION = 0.2  # of rated pairs: the pairs rated highest belong together
RATING_GROUPS = 5
LEAST_SINGULAR_VALUE = 1e-6  # smaller ones are not drawn
GRID = np.linspace(-1, 1, 201)  # of densities
LEAST_DENSITY = 1e-3
SEARCHES, HITS = 4, 3

_Item = TypeVar("_Item")
Loader = Callable[[], SentenceEncoder]


@dataclasses.dataclass(frozen=True)
class Sample:
    """Pairs of texts, or single texts."""

    about: str  # what they are, in words
    first: Sequence[str]  # the queries of the pairs, or all texts
    second: Sequence[str] = ()  # the other texts of the pairs; empty for single texts
    gold: Sequence[float] | None = None  # human ratings of the pairs; None if every pair belongs together
    metric: str = ""  # the dev metric of the pairs

    @property
    def related(self) -> list[int]:
        """Positions of the pairs that belong together."""
        if self.gold is None:
            return list(range(len(self.second)))
        bound = float(np.quantile(self.gold, 1 - RELATED_FRACTION))
        return [index for index, rating in enumerate(self.gold) if rating >= bound]

    @property
    def texts(self) -> list[str]:
        return list(dict.fromkeys([*self.first, *self.second]))


@dataclasses.dataclass(frozen=True)
class Model:
    """An encoder's embeddings of the sample."""

    label: str
    colour: str
    embeddings: Mapping[str, np.ndarray]  # normalised, by text
    raw: Float32[np.ndarray, "texts dim"]  # as the encoder returns them

    def of(self, texts: Sequence[str]) -> Float32[np.ndarray, "texts dim"]:
        return np.stack([self.embeddings[text] for text in texts])


class Comparison(NamedTuple):
    """The starting checkpoints and the runs' models on a sample of text, and why other models are missing."""

    sample: Sample
    models: Sequence[Model]
    problems: Sequence[str] = ()


class Search(NamedTuple):
    """A query, the text that belongs to it (empty if unknown), and the best hits by model."""

    query: str
    wanted: str
    hits: Mapping[str, Sequence[tuple[str, float]]]


def sample_of(config: Config) -> Sample:
    """Return a sample of a run's dev text, or general sentences if that text is not on this machine."""
    try:
        return _dev_sample(config)
    except UserError as error:
        reason = str(error).splitlines()[0]
    sentences = general_sentences()
    return Sample(f"{len(sentences)} general English sentences, because the dev text is missing ({reason})", sentences)


def encoders_of(runs: Sequence[Run]) -> dict[str, tuple[str, Loader]]:
    """Return the colour and a loader of each encoder by label: the distinct starting checkpoints, then the runs."""
    starts = {(run.config.model.name_or_path, run.baseline.pooler if run.baseline else None): run for run in runs}
    last = {name: name.rstrip("/").rpartition("/")[2] for name, _ in starts}
    uses = collections.Counter(last.values())
    found: dict[str, tuple[str, Loader]] = {}
    for name, pooler in starts:
        shown = last[name] if uses[last[name]] == 1 else name
        label = f"{shown}{f' ({pooler})' if pooler else ''} before training"
        found[label] = BASELINE, partial(SentenceEncoder.from_pretrained, name, pooler=pooler)
    for index, run in enumerate(runs):
        export = run.workdir / "export"
        model = export if export.is_dir() else run.workdir
        found[run.label] = colour_of(index), partial(SentenceEncoder.from_pretrained, model)
    return found


def encode_sample(encoders: Mapping[str, tuple[str, Loader]], sample: Sample) -> Comparison:
    """Load one encoder after another and encode the sample; note those that cannot be loaded."""
    models, problems = [], []
    for label, (colour, load) in encoders.items():
        try:
            raw = _encode(load(), sample)
        except UserError as error:
            problems.append(f"{label}: {str(error).splitlines()[0]}")
            continue
        rows = np.asarray(normalize(raw))
        models.append(Model(label, colour, dict(zip(sample.texts, rows, strict=True)), raw))
    return Comparison(sample, models, problems)


def _encode(encoder: Encoder, sample: Sample) -> Float32[np.ndarray, "texts dim"]:
    """Return the embeddings of the sample's texts, with the encoder's prompts of queries and documents."""
    if sample.gold is not None or not sample.second:
        return encoder.encode(sample.texts)
    symmetric = sample.metric in SYMMETRIC_METRICS
    sides = encode_pairs(encoder, sample.first, sample.second, symmetric=symmetric)
    embeddings = dict(zip([*sample.first, *sample.second], np.concatenate(sides), strict=True))
    return np.stack([embeddings[text] for text in sample.texts])


def measures(model: Model, sample: Sample) -> dict[str, float]:
    """Return alignment, uniformity and retrieval or correlation scores on the sample."""
    found = {"uniformity": uniformity(model.of(sample.texts))}
    if related := sample.related:
        first, second = (model.of([texts[index] for index in related]) for texts in (sample.first, sample.second))
        found = {"alignment": float(np.square(first - second).sum(axis=1).mean())} | found
        if sample.gold is None:
            scores = retrieval_scores(first, second)
            found |= {"recall@1, %": scores["recall@1"], "mean reciprocal rank, %": scores["mrr"]}
    if sample.gold is not None:
        similarities = (model.of(sample.first) * model.of(sample.second)).sum(axis=1)
        found |= {"Spearman with ratings, %": 100 * float(scipy.stats.spearmanr(similarities, sample.gold).statistic)}
    return found


def embedding_charts(comparison: Comparison) -> list[Chart]:
    """Return charts of similarities and of singular values."""
    models, sample = comparison.models, comparison.sample
    if not models:
        return []
    charts = {
        f"similarities, {model.label}": [
            Line(name, density(values), colour_of(index))
            for index, (name, values) in enumerate(similarities(model, sample).items())
        ]
        for model in models
    }
    if not sample.second:  # one kind of pairs: all models in one chart
        pairs = zip(models, charts.values(), strict=True)
        lines = [Line(model.label, line.points, model.colour) for model, (line,) in pairs]
        charts = {"similarities of all pairs": lines}
    drawn = [x for lines in charts.values() for line in lines for x, y in line.points if y > LEAST_DENSITY]
    low, high = min(drawn), max(drawn)
    found = []
    for title, lines in charts.items():
        cut = [line._replace(points=[point for point in line.points if low <= point[0] <= high]) for line in lines]
        found.append(Chart(title, "cosine similarity", cut, "density", log=False))
    spectra = [Line(model.label, _spectrum(model), model.colour) for model in models]
    lines = [line for line in spectra if line.points]
    note = "A line that falls late uses many directions; one that falls early uses few."
    title = "singular values of the embeddings"
    return [*found, Chart(title, "index", lines, "relative to the largest", note=note, log=True)]


def _spectrum(model: Model) -> list[tuple[float, float]]:
    values = enumerate(singular_values(model.raw).tolist(), 1)
    return [(float(index), value) for index, value in values if value >= LEAST_SINGULAR_VALUE]


def similarities(model: Model, sample: Sample) -> dict[str, Float[np.ndarray, " pairs"]]:
    """Return cosine similarities by kind of pair: by rating, related and unrelated, or all pairs."""
    if not sample.second:
        embeddings = model.of(sample.first)
        return {"all pairs": (embeddings @ embeddings.T)[np.triu_indices(len(embeddings), k=1)]}
    crossed = model.of(sample.first) @ model.of(sample.second).T
    own = np.diagonal(crossed)
    if sample.gold is None:
        return {"other pairs": crossed[~np.eye(len(crossed), dtype=bool)], "pairs that belong together": own}
    gold = np.asarray(sample.gold)
    width = (gold.max() - gold.min()) / RATING_GROUPS or 1.0
    group = np.minimum(((gold - gold.min()) / width).astype(int), RATING_GROUPS - 1)
    bounds = [(gold.min() + index * width, gold.min() + (index + 1) * width) for index in range(RATING_GROUPS)]
    groups = {f"rated {low:.3g} to {high:.3g}": own[group == index] for index, (low, high) in enumerate(bounds)}
    return {name: values for name, values in groups.items() if len(values)}


def density(values: Float[np.ndarray, " values"]) -> list[tuple[float, float]]:
    """Return a Gaussian kernel density on a grid (Scott's rule); a peak if all values are equal."""
    values = values.astype(np.float64)
    deviation = values.std(ddof=1) if len(values) > 1 else 0.0
    width = max(deviation * len(values) ** -0.2, 0.01)
    return [(float(x), float(scipy.stats.norm.pdf(x, values, width).mean())) for x in GRID]


def searches(comparison: Comparison) -> list[Search]:
    """Return queries, chosen by their position in the sample, and what each model finds for them."""
    sample, found = comparison.sample, []
    if not comparison.models:
        return []
    for position in evenly_spaced(sample.related or list(range(len(sample.first))), SEARCHES):
        query = sample.first[position]
        texts = [text for text in dict.fromkeys(sample.second or sample.first) if text != query]
        wanted = sample.second[position] if sample.second else ""
        hits = {
            model.label: best_hits(model.of(texts) @ model.embeddings[query], texts, HITS)
            for model in comparison.models
        }
        found.append(Search(query, wanted, hits))
    return found


def evenly_spaced(items: Sequence[_Item], count: int) -> list[_Item]:
    """Return at most `count` of the items at even distances, including the first."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def _dev_sample(config: Config) -> Sample:
    if config.needs("labels"):
        raise DataError("the dev metric is that of labelled tasks")
    if config.eval.metric in ("stsb_spearman", "average_spearman") and not is_local(config.eval.data_dir):
        raise DataError("neither eval.data_dir nor $DIFFCSE_DATA_DIR names SentEval's data")

    def training_sentences() -> Iterator[str]:
        name = config.data.train_file
        if name != "docstrings" and not expand_path(name).exists():  # a report downloads nothing
            raise DataError(f"{name} does not exist here")
        return (row[0] for row in open_corpus(config.data))

    metric = build_dev_evaluation(config, training_sentences).chosen
    rows: list[tuple[Any, ...]]
    if isinstance(metric, CorrelationMetric):
        sets = [(each.first, each.second, each.gold.tolist()) for each in metric.counted.values()]
        rows = [row for columns in sets for row in zip(*columns, strict=True)]
    else:
        rows = list(zip(metric.queries, metric.targets, strict=True))
    kind = "rated pairs" if isinstance(metric, CorrelationMetric) else "pairs"
    columns: list[Any] = [list(column) for column in zip(*evenly_spaced(rows, MOST_PAIRS), strict=True)]
    about = f"{len(columns[0])} of the {len(rows):,} {kind} of the dev metric"
    return dataclasses.replace(Sample(about, *columns), metric=config.eval.metric)
