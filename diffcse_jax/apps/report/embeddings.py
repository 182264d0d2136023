"""Compares encoders on a sample of text: similarities and searches, before and after training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import scipy.stats
from jaxtyping import Float, Float32

from diffcse_jax.config import Config
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import DataError, UserError
from diffcse_jax.evaluation import Encoder
from diffcse_jax.evaluation.dev import SYMMETRIC_METRICS, CorrelationMetric, build_dev_evaluation, general_sentences
from diffcse_jax.evaluation.geometry import best_hits, uniformity
from diffcse_jax.evaluation.retrieval import encode_pairs, retrieval_scores
from diffcse_jax.evaluation.senteval_data import is_local
from diffcse_jax.io import expand_path
from diffcse_jax.models.pooling import normalize
from diffcse_jax.run_folder.summary import Run
from diffcse_jax.training.curves import BASELINE, Chart, Line, colour_of

MOST_PAIRS = 200
RELATED_FRACTION = 0.2  # of rated pairs: the pairs rated highest belong together
GRID = np.linspace(-1, 1, 201)  # of densities
SEARCHES, HITS = 4, 3

_Item = TypeVar("_Item")
Loader = Callable[[], SentenceEncoder]


class Sample(NamedTuple):
    """Pairs of texts that belong together, or single texts."""

    about: str  # what they are, in words
    first: Sequence[str]  # the queries of the pairs, or all texts
    second: Sequence[str] = ()  # the other texts of the pairs; empty for single texts
    symmetric: bool = True  # both texts of a pair are of one kind

    @property
    def texts(self) -> list[str]:
        return list(dict.fromkeys([*self.first, *self.second]))


class Model(NamedTuple):
    """An encoder's embeddings of the sample."""

    label: str
    colour: str
    embeddings: Mapping[str, np.ndarray]  # normalised, by text

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


def _dev_sample(config: Config) -> Sample:
    if config.needs("labels"):
        raise DataError("labelled tasks have a metric of their own")
    if config.eval.metric in ("stsb_spearman", "average_spearman") and not is_local(config.eval.data_dir):
        raise DataError("neither eval.data_dir nor $DIFFCSE_DATA_DIR names SentEval's data")

    def training_sentences() -> Iterator[str]:
        name = config.data.train_file
        if name != "docstrings" and not expand_path(name).exists():  # a report downloads nothing
            raise DataError(f"{name} does not exist here")
        return (row[0] for row in open_corpus(config.data))

    metric = build_dev_evaluation(config, training_sentences).chosen
    if isinstance(metric, CorrelationMetric):
        sets = [(each.first, each.second, each.gold) for each in metric.counted.values()]
        rated = [row for columns in sets for row in zip(*columns, strict=True)]
        bound = np.quantile([gold for *_, gold in rated], 1 - RELATED_FRACTION)
        pairs, kind = [(a, b) for a, b, gold in rated if gold >= bound], "pairs rated highest"
    else:
        pairs, kind = list(zip(metric.queries, metric.targets, strict=True)), "pairs"
    first, second = zip(*evenly_spaced(pairs, MOST_PAIRS), strict=True)
    about = f"{len(first)} of the {len(pairs):,} {kind} of the dev metric"
    symmetric = isinstance(metric, CorrelationMetric) or metric.name in SYMMETRIC_METRICS
    return Sample(about, first, second, symmetric)


def encoders_of(runs: Sequence[Run]) -> dict[str, tuple[str, Loader]]:
    """Return the colour and a loader of each encoder by label: the distinct starting checkpoints, then the runs."""
    found: dict[str, tuple[str, Loader]] = {}
    for run in runs:
        name, pooler = run.config.model.name_or_path, run.baseline.pooler if run.baseline else None
        label = f"{name}{f' ({pooler})' if pooler else ''} before training"
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
            models.append(Model(label, colour, _encode(load(), sample)))
        except UserError as error:
            problems.append(f"{label}: {str(error).splitlines()[0]}")
    return Comparison(sample, models, problems)


def _encode(encoder: Encoder, sample: Sample) -> dict[str, np.ndarray]:
    """Return the embeddings of the sample's texts, with the encoder's prompts of queries and documents."""
    if not sample.second:
        return dict(zip(sample.first, normalize(encoder.encode(sample.first)), strict=True))
    sides = encode_pairs(encoder, sample.first, sample.second, symmetric=sample.symmetric)
    return dict(zip([*sample.first, *sample.second], normalize(np.concatenate(sides)), strict=True))


def measures(model: Model, sample: Sample) -> dict[str, float]:
    """Return uniformity and, of pairs, alignment and retrieval scores."""
    found = {"uniformity": uniformity(model.of(sample.texts))}
    if sample.second:
        first, second = model.of(sample.first), model.of(sample.second)
        scores = retrieval_scores(first, second)
        found = {"alignment": float(np.square(first - second).sum(axis=1).mean())} | found
        found |= {"recall@1, %": scores["recall@1"], "mean reciprocal rank, %": scores["mrr"]}
    return found


def embedding_charts(comparison: Comparison) -> list[Chart]:
    """Return charts of similarities."""
    models, sample = comparison.models, comparison.sample
    if not models:
        return []
    if sample.second:
        charts = {
            f"similarities, {model.label}": [
                Line(kind, density(values), colour_of(index))
                for index, (kind, values) in enumerate(similarities(model, sample).items())
            ]
            for model in models
        }
    else:
        lines = [Line(each.label, density(similarities(each, sample)["all pairs"]), each.colour) for each in models]
        charts = {"similarities of all pairs": lines}
    return [Chart(title, "cosine similarity", lines, "density", log=False) for title, lines in charts.items()]


def similarities(model: Model, sample: Sample) -> dict[str, Float[np.ndarray, " pairs"]]:
    """Return cosine similarities by kind of pair."""
    if not sample.second:
        embeddings = model.of(sample.first)
        return {"all pairs": (embeddings @ embeddings.T)[np.triu_indices(len(embeddings), k=1)]}
    crossed = model.of(sample.first) @ model.of(sample.second).T
    others = crossed[~np.eye(len(crossed), dtype=bool)]
    return {"other pairs": others, "pairs that belong together": np.diagonal(crossed)}


def density(values: Float[np.ndarray, " values"]) -> list[tuple[float, float]]:
    """Return a Gaussian kernel density on a grid (Scott's rule); a peak if all values are equal."""
    values = values.astype(np.float64)
    deviation = values.std(ddof=1) if len(values) > 1 else 0.0
    width = max(deviation * len(values) ** -0.2, 0.01)
    return [(float(x), float(scipy.stats.norm.pdf(x, values, width).mean())) for x in GRID]


def searches(comparison: Comparison) -> list[Search]:
    """Return queries, chosen by their position in the sample, and what each model finds for them."""
    sample, found = comparison.sample, []
    for position in evenly_spaced(range(len(sample.first)), SEARCHES) if comparison.models else ():
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
