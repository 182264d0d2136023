"""How encoders place a sample of sentences: similarities, singular values, searches."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import scipy.stats
from jaxtyping import Float, Float32

from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import UserError
from diffcse_jax.evaluation import Encoder
from diffcse_jax.evaluation.geometry import RATING_GROUPS, best_hits, singular_values, uniformity
from diffcse_jax.evaluation.retrieval import retrieval_scores
from diffcse_jax.models.pooling import normalize
from diffcse_jax.report.charts import Chart, Line, colour_of, short
from diffcse_jax.report.runs import EXPORT, Run
from diffcse_jax.report.sample import Sample, evenly_spaced

LEAST_SINGULAR_VALUE = 1e-6  # where the axis is cut
LEAST_DENSITY = 1e-3  # that is drawn
GRID = np.linspace(-1, 1, 201)  # of densities
SEARCHES = 4
HITS = 3

Density = Sequence[tuple[float, float]]
Load = Callable[[], Encoder]


@dataclasses.dataclass(frozen=True)
class Model:
    """An encoder of the report, and where it places the sample.

    Attributes:
        label: its name.
        colour: its colour class.
        vectors: of the sample's texts, by text, of length 1.
        raw: the same as a matrix, as the encoder gives them.
    """

    label: str
    colour: str
    vectors: dict[str, np.ndarray]
    raw: Float32[np.ndarray, "texts dimension"]

    def of(self, texts: Sequence[str]) -> Float32[np.ndarray, "texts dimension"]:
        """Unit vectors of texts of the sample."""
        return np.stack([self.vectors[text] for text in texts])


@dataclasses.dataclass(frozen=True)
class Search:
    """A query, the text that belongs to it (empty: unknown), and the best hits of each model."""

    query: str
    wanted: str
    hits: Sequence[tuple[Model, Sequence[tuple[str, float]]]]


def loaders(runs: Sequence[Run]) -> dict[str, tuple[str, Load]]:
    """How the encoders are loaded, by label, with their colours: each distinct start once, then the runs."""
    starts = {(run.config.model.name_or_path, run.baseline.pooler if run.baseline else ""): run for run in runs}
    ends = collections.Counter(_end(name) for name in {name for name, _ in starts})
    found: dict[str, tuple[str, Load]] = {}
    for (name, pooler), run in starts.items():
        named = _end(name) if ends[_end(name)] == 1 else name
        found[f"start ({', '.join(filter(None, (named, pooler)))})"] = "c0", partial(start_of, run)
    return found | {run.label: (colour_of(index), partial(model_of, run)) for index, run in enumerate(runs)}


def _end(name: str) -> str:
    """The last part of the name or path of a checkpoint."""
    return name.rstrip("/").rpartition("/")[2]


def start_of(run: Run) -> SentenceEncoder:
    """The checkpoint that a run starts from, with the pooler that its baseline is measured with.

    Raises:
        CheckpointError: it is not on this machine.
    """
    from diffcse_jax.data.tokenizer import load_tokenizer
    from diffcse_jax.models import hf
    from diffcse_jax.training.networks import StartingCheckpoint, recorded_pooler

    config = run.config
    checkpoint = hf.read(config.model.name_or_path)
    tokenizer = load_tokenizer(checkpoint.folder)
    recorded = recorded_pooler(checkpoint, config.model.pooler)
    return StartingCheckpoint(config.model.name_or_path, checkpoint, tokenizer, recorded).encoder(config)


def model_of(run: Run) -> SentenceEncoder:
    """The export of a run, or its best checkpoint so far.

    Raises:
        CheckpointError: there is none yet.
    """
    export = run.workdir / EXPORT
    return SentenceEncoder.from_pretrained(export if export.is_dir() else run.workdir)


def placed(loads: dict[str, tuple[str, Load]], sample: Sample) -> tuple[list[Model], list[str]]:
    """The models, one loaded after another, and why others could not be."""
    models, problems = [], []
    for label, (colour, load) in loads.items():
        try:
            raw = np.asarray(load().encode(sample.texts), np.float32)
        except UserError as error:
            problems.append(f"{label}: {str(error).splitlines()[0]}")
            continue
        models.append(Model(label, colour, dict(zip(sample.texts, normalize(raw), strict=True)), raw))
    return models, problems


def measures(model: Model, sample: Sample) -> dict[str, float]:
    """Alignment, uniformity and retrieval on the sample."""
    found = {"uniformity": uniformity(model.of(sample.texts))}
    if related := sample.related:
        first, second = (model.of([texts[index] for index in related]) for texts in (sample.first, sample.second))
        found = {"alignment": float(np.square(first - second).sum(axis=1).mean())} | found
        if sample.gold is None:
            scores = retrieval_scores(first, second)
            found |= {"found first, %": scores["recall@1"], "mean reciprocal rank, %": scores["mrr"]}
    if sample.gold is not None:
        similarities = (model.of(sample.first) * model.of(sample.second)).sum(axis=1)
        found |= {"Spearman with ratings, %": 100 * float(scipy.stats.spearmanr(similarities, sample.gold).statistic)}
    return found


def density_charts(models: Sequence[Model], sample: Sample) -> list[Chart]:
    """Densities of cosine similarities: a chart for each model, or one for all where there is one kind of pairs."""
    charts = {model.label: _densities(similarities(model, sample)) for model in models}
    title = "similarity of pairs: {}"
    if not sample.second:
        charts = {"": [Line(model.label, charts[model.label][0].points, model.colour) for model in models]}
        title = "similarity of all pairs of sentences"
    drawn = [(x, y) for lines in charts.values() for line in lines for x, y in line.points if y > LEAST_DENSITY]
    low, high = min(x for x, _ in drawn), max(x for x, _ in drawn)
    return [
        Chart(
            title.format(label),
            "cosine similarity",
            [dataclasses.replace(line, points=[(x, y) for x, y in line.points if low <= x <= high]) for line in lines],
            y_label="density",
            log=False,
            y_range=(0.0, 1.05 * max(y for _, y in drawn)),
            signs_on_top=True,
        )
        for label, lines in charts.items()
    ]


def _densities(groups: Mapping[str, Float[np.ndarray, " pairs"]]) -> list[Line]:
    """A line for each kind of pairs, from faint to strong."""
    colours = [f"g{round(index * 4 / max(len(groups) - 1, 1))}" for index in range(len(groups))]
    return [Line(name, density(group), colour) for (name, group), colour in zip(groups.items(), colours, strict=True)]


def similarities(model: Model, sample: Sample) -> dict[str, Float[np.ndarray, " pairs"]]:
    """Cosine similarities by kind of pair: by rating; related ones and others; or all pairs of sentences."""
    if not sample.second:
        vectors = model.of(sample.first)
        return {"all pairs": (vectors @ vectors.T)[np.triu_indices(len(vectors), k=1)]}
    crossed = model.of(sample.first) @ model.of(sample.second).T
    own = np.diagonal(crossed)
    if sample.gold is None:
        others = crossed[~np.eye(len(crossed), dtype=bool)]
        return {"other pairs": others, "pairs that belong together": own}
    gold = np.asarray(sample.gold)
    unit = (gold.max() - gold.min()) / len(RATING_GROUPS) or 1.0
    steps = np.minimum(((gold - gold.min()) / unit).astype(int), len(RATING_GROUPS) - 1)
    groups = {
        f"rated {gold.min() + step * unit:.3g} to {gold.min() + (step + 1) * unit:.3g}": own[steps == step]
        for step in range(len(RATING_GROUPS))
    }
    return {name: group for name, group in groups.items() if len(group)}


def density(values: Float[np.ndarray, " values"]) -> Density:
    """The density of similarities on a grid, by Gaussian kernels (Scott's rule); a peak where all are the same."""
    values = np.clip(values.astype(np.float64), -1, 1)  # that of equal texts may be rounded to more
    deviation = values.std(ddof=1) if len(values) > 1 else 0.0
    width = max(deviation * len(values) ** -0.2, 0.01)
    counts, edges = np.histogram(values, bins=2000, range=(-1.0, 1.0))  # similarities are many, and a pixel is wide
    centres, seen = (edges[:-1] + edges[1:])[counts > 0] / 2, counts[counts > 0]
    kernels = scipy.stats.norm.pdf(GRID[:, None], centres[None, :], width)
    return list(zip(GRID.tolist(), (kernels @ (seen / max(len(values), 1))).tolist(), strict=True))


def spectrum(models: Sequence[Model]) -> Chart:
    """Singular values of the sample's vectors, the largest scaled to 1; those below the cut are left out."""
    lines = []
    for model in models:
        values = singular_values(model.raw)
        points = [
            (float(index), float(value)) for index, value in enumerate(values, 1) if value >= LEAST_SINGULAR_VALUE
        ]
        if points:
            lines.append(Line(model.label, points, model.colour))
    low = min((value for line in lines for _, value in line.points), default=1.0)
    return Chart(
        "singular values of the sentence vectors",
        "index",
        lines,
        y_label="share of the largest",
        log=True,
        y_range=(max(low / 1.5, LEAST_SINGULAR_VALUE), 1.2),
        note=f"Cut at {short(LEAST_SINGULAR_VALUE)}. A line that falls late uses many directions, an early one few.",
    )


def searches(models: Sequence[Model], sample: Sample) -> list[Search]:
    """Some queries, chosen by their positions in the sample, and what each model finds for them."""
    positions = evenly_spaced(sample.related or list(range(len(sample.first))), SEARCHES)
    found = []
    for position in positions:
        query = sample.first[position]
        texts = [text for text in dict.fromkeys(sample.second or sample.first) if text != query]
        wanted = sample.second[position] if sample.second else ""
        hits = [(model, best_hits(model.of(texts) @ model.vectors[query], texts, HITS)) for model in models]
        found.append(Search(query, wanted, hits))
    return found
