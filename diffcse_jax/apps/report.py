"""The report: an HTML page about a run, with searches before and after training if it helped.

It works offline.
"""

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from diffcse_jax.apps import render
from diffcse_jax.commands import ReportOptions
from diffcse_jax.config import Config, flat
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.documents.find import DOCSTRINGS
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import DataError, UserError, counted
from diffcse_jax.evaluation import Encoder, encode_pairs
from diffcse_jax.evaluation.dev import build_dev_evaluation
from diffcse_jax.evaluation.dev_texts import STS_METRICS
from diffcse_jax.evaluation.metrics import SYMMETRIC_METRICS, RetrievalMetric, general_sentences
from diffcse_jax.evaluation.results import compared, task_title
from diffcse_jax.evaluation.retrieval import best_hits
from diffcse_jax.evaluation.systems import describe_weight
from diffcse_jax.export.card import command_of
from diffcse_jax.hosts import log_line
from diffcse_jax.io import disk_errors, expand_path, write_text
from diffcse_jax.models.pooling import normalize
from diffcse_jax.run_folder.summary import RunSummary, curves, read_summary, readable
from diffcse_jax.training.queries import open_text
from diffcse_jax.version import __version__

SECTIONS = {
    "outcome": "Outcome",
    "curves": "Training curves",
    "searches": "Searches",
    "scores": "Test scores",
    "configuration": "Configuration",
}
MOST_PAIRS = 200
SEARCHES, HITS = 4, 3

Loader = Callable[[], Encoder]


def write_report(options: ReportOptions) -> Path:
    """Write the report of a run, finished or in progress, as one HTML page, and return its path."""
    run = read_summary(options.model)
    path = options.output or run.workdir / "report" / "index.html"
    with disk_errors(path, safe="The run is unchanged.", instead="name another --output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        log_line("searching a sample of text with the starting checkpoint and the run")
        page = render_report(run, compare(encoders_of(run), sample_of(run.config)))
        write_text(path.resolve() if options.output else path, page)
    return path


class Sample(NamedTuple):
    """Text to search: pairs of a query and the text that it should find, or single texts.

    Each single text is there twice.
    """

    about: str  # what the pairs are, in words
    pairs: Sequence[tuple[str, str]]
    symmetric: bool = True  # both are of one kind


class Search(NamedTuple):
    """A query, the text that belongs to it (empty if unknown), and each encoder's best hits.

    Hits have their cosines.
    """

    query: str
    wanted: str
    hits: dict[str, list[tuple[str, float]]]


class Comparison(NamedTuple):
    """What encoders find in a sample of text, and why other encoders are missing."""

    about: str
    searches: Sequence[Search]
    problems: Sequence[str]


def _is_of_run(model: str, workdir: Path) -> bool:
    """Return whether a model is a run or its export, by the name of the run's folder."""
    name = workdir.absolute().name
    parts = Path(model).parts
    return parts[-1:] == (name,) or parts[-2:] in ((name, "export"), ("export",))


def render_report(run: RunSummary, comparison: Comparison) -> str:
    """Return the page on a run, with searches by its encoders."""
    models = list(run.results)
    if len(models) == 1 and _is_of_run(models[0]["model"], run.workdir):
        models = [models[0] | {"model": str(run.workdir)}]
    scores = []
    for columns, rows in compared(models, with_published=True):
        cells = [
            [row.label, *(row.cells.get(column, "\N{EN DASH}") for column in columns)]
            for row in rows
        ]
        scores.append((["model", *map(task_title, columns)], cells))
    return render(
        "report.html.j2",
        sections=SECTIONS,
        run=run,
        readable=readable,
        counted=counted,
        describe_weight=describe_weight,
        curves=curves(run),
        comparison=comparison,
        scores=scores,
        task=suggested_task(run.config),
        command=command_of(run.config),
        settings=flat(run.config.to_dict()),
        now=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        version=__version__,
    )


def suggested_task(config: Config) -> str:
    """Return the task of `diffcse evaluate` that fits the text of a run."""
    if config.data.reads_documents:
        return "documents:FILE"
    return "pairs_retrieval:FILE" if config.eval.metric == "pairs_retrieval" else "sts"


def sample_of(config: Config) -> Sample:
    """Return pairs of a run's dev metric, or general sentences.

    Sentences are returned if the metric has no pairs, or if they are not on this machine.
    """

    def training_sentences() -> Iterator[str]:
        name = config.data.train_file
        if name != DOCSTRINGS and not expand_path(name).exists():  # a report downloads nothing
            raise DataError(f"{name} does not exist here")
        return open_corpus(config.data).first_texts()

    try:
        metric = None
        if not config.needs("labels") and config.eval.metric not in STS_METRICS:
            split = open_text(config)[0] if config.trains_queries else None
            metric = build_dev_evaluation(config, training_sentences, split=split).chosen
        if not isinstance(metric, RetrievalMetric):
            raise DataError("the dev metric has no pairs of query and text")
    except UserError as error:
        sentences = general_sentences()
        reason = str(error).splitlines()[0]
        about = f"{len(sentences)} general English sentences, because {reason}"
        return Sample(about, [(sentence, sentence) for sentence in sentences])
    pairs = list(zip(metric.queries, metric.targets, strict=True))
    chosen = evenly_spaced(pairs, MOST_PAIRS)
    about = f"{len(chosen)} of the {len(pairs):,} pairs of the dev metric"
    return Sample(about, chosen, metric.name in SYMMETRIC_METRICS)


def encoders_of(run: RunSummary) -> dict[str, Loader]:
    """Return a loader of the starting checkpoint and one of the run, by label.

    A run that keeps the starting checkpoint has only one model.
    """
    name = run.config.model.name_or_path
    pooler = run.applied(run.baseline.pooler) if run.baseline else None
    export = run.workdir / "export"
    start = f"{name} ({pooler})" if pooler else name
    if run.keeps_start:
        model = export if export.is_dir() else run.workdir
        return {f"{start}, which the run keeps": partial(SentenceEncoder.from_pretrained, model)}
    before = f"{start} before training"
    return {
        before: partial(SentenceEncoder.from_pretrained, name, pooler=pooler),
        run.label: partial(
            SentenceEncoder.from_pretrained, export if export.is_dir() else run.workdir
        ),
    }


def compare(encoders: Mapping[str, Loader], sample: Sample) -> Comparison:
    """Search the sample with one encoder after another; note those that cannot be loaded.

    Queries are chosen by their position in the sample.
    """
    chosen = evenly_spaced(sample.pairs, SEARCHES)
    searches = [Search(query, text if text != query else "", {}) for query, text in chosen]
    texts = list(dict.fromkeys(text for _, text in sample.pairs))
    problems = []
    for label, load in encoders.items():
        try:
            sides = encode_pairs(
                load(), [each.query for each in searches], texts, symmetric=sample.symmetric
            )
        except UserError as error:
            problems.append(f"{label}: {str(error).splitlines()[0]}")
            continue
        queries, corpus = map(normalize, sides)
        for search, scores in zip(searches, queries @ corpus.T, strict=True):
            hits = best_hits(scores, texts, HITS + 1)
            search.hits[label] = [hit for hit in hits if hit[0] != search.query][:HITS]
    return Comparison(sample.about, searches, problems)


def evenly_spaced(items: Sequence[Any], count: int) -> list[Any]:
    """Return at most `count` of the items at even distances, including the first."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]
