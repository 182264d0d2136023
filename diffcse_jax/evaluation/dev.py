"""The dev evaluation of a training run, one score of which chooses the best checkpoint.

All processes of a run must make the same calls of the encoder, or they wait for one another forever. So the first
process alone decides on the metric and reads the data; the others get both from it and need no files.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from diffcse_jax import hosts
from diffcse_jax.config import Config
from diffcse_jax.data import held_out, pairs
from diffcse_jax.data.corpus import Fault, checked
from diffcse_jax.data.documents import Section
from diffcse_jax.data.sources import open_documents
from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import missing_files, official, retrieval, sts
from diffcse_jax.evaluation.geometry import uniformity
from diffcse_jax.evaluation.guard import Guard, build_guard
from diffcse_jax.evaluation.outcomes import Evidence, Pairs, Queries
from diffcse_jax.evaluation.own_pairs import duplicates_precision, labelled_pairs, retrieval_pairs
from diffcse_jax.evaluation.protocols import Encoder
from diffcse_jax.evaluation.remembering import Remembering
from diffcse_jax.evaluation.suite import senteval_folder
from diffcse_jax.groups import EvalConfig
from diffcse_jax.io import expand_path
from diffcse_jax.search.nearest import normalized
from diffcse_jax.storage.digests import of_json
from diffcse_jax.storage.selection import FEWEST, Measured, Outcomes

STS_TASKS = {task.name: task for task in (sts.STSBenchmark, sts.SICKRelatedness)}
OF_STS = {"stsb_spearman", "average_spearman"}  # metrics
SHORT_NAMES = {"STSBenchmark": "stsb_spearman", "SICKRelatedness": "sickr_spearman"}
RETRIEVAL_PAIRS = 1000
HOLD_PAIRS = 4000  # scored once: more of them, for a fall that 1,000 cannot tell from chance
FEWEST_DOCUMENTS = 0.2  # of those held out: the share that a metric has pairs of, for it to speak for all
FEWEST_WORDS = 6  # of a sentence whose halves are a pair
MOST_WORDS = 64  # of a rest

Scores = dict[str, float]
Scorer = Callable[[Encoder], Scores]
# Of a metric, as JSON: `metric`, and `pairs`, `labelled_pairs` or, by score, `scored_pairs`; of held-out documents
# `documents`, too: the number of those that have a pair, and that of all.
Texts = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class DevEvaluation:
    """Call it with an encoder for all scores; `metric` names the one that chooses the best checkpoint, x 100."""

    metric: str
    text: str  # identifies the text that it is measured on
    score: Scorer
    evidence: Evidence  # of the metric
    beside: Mapping[str, Scorer]  # by the name of the metric that is taken of each
    hold: Mapping[str, Evidence]  # of the metrics of `eval.hold`, which are no scores
    guard: Guard | None = None
    reservation: str = ""  # the reason, in words, why a gain in the metric says little of the text

    @property
    def guard_metric(self) -> str:
        """The score of general quality; empty where the guard is off."""
        return self.guard.name if self.guard else ""

    @property
    def resampled(self) -> str:
        """The units that intervals of the metric are over, as `1,000 queries`."""
        return self.evidence.describe()

    def __call__(self, encoder: Encoder) -> Scores:
        beside = {name: score(encoder)[name] for name, score in self.beside.items()}
        return self.score(encoder) | beside | ({self.guard.name: self.guard(encoder)} if self.guard else {})

    def measure(self, encoder: Encoder) -> Measured:
        """The scores, and what `metric` summarises."""
        encoder = Remembering(encoder)
        return Measured(self(encoder), self.evidence.of(encoder))

    def held(self, encoder: Encoder) -> dict[str, Outcomes]:
        """The outcomes of the metrics of `eval.hold`, by their names."""
        encoder = Remembering(encoder)
        return {name: evidence.of(encoder) for name, evidence in self.hold.items()}

    def falls(self, start: Mapping[str, Outcomes], model: Mapping[str, Outcomes]) -> list[str]:
        """The metrics of `eval.hold` in which a model is below the start by more than chance, in words."""
        told = []
        for name, evidence in self.hold.items():
            low, high = evidence.interval(start[name], model[name])
            if high < 0:
                before, after = (np.mean(outcomes[name]) for outcomes in (start, model))
                told.append(
                    f"{name} {after:.2f} against {before:.2f} (95 % interval {low:+.2f} to {high:+.2f}, bootstrap over "
                    f"{evidence.describe()})"
                )
        return told

    def interval(self, start: Outcomes, model: Outcomes) -> tuple[float, float]:
        """A 95 % interval for the metric of a model less that of the start."""
        return self.evidence.interval(start, model)


def build_dev_evaluation(
    config: Config, training_sentences: Callable[[], Iterable[str]], start: Callable[[], Encoder] | None = None
) -> DevEvaluation:
    """The evaluation that `eval.metric`, `eval.beside` and `eval.tasks` describe, the same on all processes.

    Where STS data is asked for and is not there, the two halves of training sentences take its place, with a notice;
    as a metric of `eval.beside` it is left out, with a notice, too.

    Args:
        config: the run's configuration.
        training_sentences: starts a pass over the training text.
        start: gives the encoder that training starts from, for `eval.guard`; None: without it.

    Raises:
        DataError: a file that cannot be used, or too little text.
    """
    batch_size = config.eval.batch_size
    texts, others, held = hosts.decided_by_first(
        lambda: [*_texts_of_all(config, training_sentences), _texts_to_hold(config, training_sentences)]
    )
    beside = {other["metric"]: _scorer(other, batch_size) for other in others}
    hold = {each["metric"]: _evidence(each, batch_size) for each in held}
    guard = build_guard(config.eval, start) if start and (config.eval.guard or config.eval.max_drop) else None
    text = of_json({name: value for name, value in texts.items() if name != "documents"})
    score, evidence = _scorer(texts, batch_size), _evidence(texts, batch_size)
    return DevEvaluation(texts["metric"], text, score, evidence, beside, hold, guard, _reservation(texts))


def _texts_to_hold(config: Config, training_sentences: Callable[[], Iterable[str]]) -> list[Texts]:
    """Those of `eval.hold`, as far as there are enough to tell a fall from chance."""
    found = []
    for metric in dict.fromkeys(config.eval.hold):
        try:
            texts = _texts(config, metric, training_sentences, HOLD_PAIRS)
            count = len(texts["pairs"][0])
            reason = f"it has {count} pairs, and tells nothing with fewer than {FEWEST}" if count < FEWEST else ""
        except DataError as error:
            reason = str(error)
        if reason:
            print(f"notice: eval.hold: {metric} is left out: {reason}", file=sys.stderr)
        else:
            found.append(texts)
    return found


def _texts_of_all(config: Config, training_sentences: Callable[[], Iterable[str]]) -> tuple[Texts, list[Texts]]:
    """Those of the metric that chooses, and of those beside it."""
    options, metric = config.eval, config.eval.metric
    problem = _missing_sts_data(options) if {metric, *options.beside} & OF_STS else ""
    if problem and metric in OF_STS:
        metric = "halves_retrieval"
        print(
            f"notice: eval.metric={options.metric} is replaced by {metric}, which needs no labels: {problem}",
            file=sys.stderr,
        )
    beside = [name for name in dict.fromkeys(options.beside) if name != metric]
    if problem and (left_out := OF_STS.intersection(beside)):
        print(f"notice: eval.beside: {', '.join(sorted(left_out))} is left out: {problem}", file=sys.stderr)
        beside = [name for name in beside if name not in left_out]
    chosen, *others = [_texts(config, name, training_sentences) for name in (metric, *beside)]
    if reservation := _reservation(chosen):
        kept = "; with eval.keep_start the start is exported" if options.keep_start else ""
        print(
            f"notice: {reservation}{kept}; single sentences are trained on with --config.data.pairs=dropout and some "
            "dropout, see docs/adaptation.md",
            file=sys.stderr,
        )
    return chosen, others


def _reservation(texts: Texts) -> str:
    """The reason why pairs of held-out documents do not speak for all of them; empty if they do."""
    having, documents = texts.get("documents", (1, 1))
    if having >= FEWEST_DOCUMENTS * documents:
        return ""
    return f"{texts['metric']} has pairs of {having:,} of {documents:,} held-out documents, too few to speak for all"


def _texts(
    config: Config, metric: str, training_sentences: Callable[[], Iterable[str]], most_pairs: int = RETRIEVAL_PAIRS
) -> Texts:
    """The text that a metric is computed on; pairs that a document makes, at most so many."""
    options = config.eval
    kind, _, file = metric.partition(":")
    if metric in OF_STS:
        return {"metric": metric, "scored_pairs": _sts_pairs(options)}
    if metric in HELD_OUT_PAIRS and config.data.held_out:
        return {"metric": metric} | _held_out_pairs(config, metric, most_pairs)
    if metric == "halves_retrieval":
        return {"metric": metric, "pairs": _halves(config, training_sentences, most_pairs)}
    if kind == "pairs_retrieval":
        return {"metric": metric, "pairs": list(retrieval_pairs(file or options.pairs_file))}
    if kind == "duplicates":
        return {"metric": metric, "labelled_pairs": _as_json(labelled_pairs(file))}
    return {"metric": metric, "scored_pairs": {metric: _own_scored_pairs(options)}}


def _scorer(texts: Texts, batch_size: int) -> Scorer:
    metric = texts["metric"]
    if "pairs" in texts:
        return _retrieval_scorer(metric, texts["pairs"], batch_size)
    if "labelled_pairs" in texts:
        pairs = _scored_pairs(texts["labelled_pairs"])
        return lambda encoder: {metric: 100 * duplicates_precision(encoder, pairs, batch_size)}
    sets = {name: _scored_pairs(values) for name, values in texts["scored_pairs"].items()}
    return _spearman_scorer(metric, sets, batch_size)


def _evidence(texts: Texts, batch_size: int) -> Evidence:
    """The evidence of the metric that chooses: its interval is computed from it."""
    if "pairs" in texts:
        queries, targets = texts["pairs"]
        return Queries(queries, targets, batch_size)
    metric, sets = texts["metric"], texts["scored_pairs"]
    names = list(sets) if metric == "average_spearman" else [metric]
    return Pairs([_scored_pairs(sets[name]) for name in names], batch_size)


def _missing_sts_data(options: EvalConfig) -> str:
    """The reason for which `eval.tasks` cannot be scored; empty if they can."""
    try:
        folder = senteval_folder(options.data_dir)
    except DataError as error:
        return f"{error} (eval.data_dir)"
    missing = [path for task in options.tasks for path in missing_files(STS_TASKS[task](folder), "dev")]
    return f"not found: {', '.join(map(str, missing))}" if missing else ""


def _sts_pairs(options: EvalConfig) -> dict[str, list[list]]:
    """The dev splits of `eval.tasks`, by the name of their score."""
    folder = senteval_folder(options.data_dir)
    sets = {task: STS_TASKS[task](folder).load("dev") for task in options.tasks}
    for task, scored in sets.items():
        if reason := official.deviation(task, {"n": len(scored.gold)}, "dev"):
            print(f"notice: {task} in {folder} is not the official data: {reason}", file=sys.stderr)
    return {SHORT_NAMES[task]: _as_json(pairs) for task, pairs in sets.items()}


def _own_scored_pairs(options: EvalConfig) -> list[list]:
    """The pairs of `eval.pairs_file`."""
    path = expand_path(options.pairs_file)
    pairs = sts.read_pairs(path, columns=(0, 1, 2))
    if np.ptp(pairs.gold) == 0:
        raise DataError(f"{path}: eval.metric=pairs_spearman needs at least two pairs with different scores")
    return _as_json(pairs)


def _as_json(pairs: sts.ScoredPairs) -> list[list]:
    """First sentences, second sentences and scores: the arguments of `ScoredPairs`."""
    return [pairs.first, pairs.second, pairs.gold.tolist()]


def _halves(config: Config, training_sentences: Callable[[], Iterable[str]], most: int) -> list[list[str]]:
    """First and second halves of training sentences."""
    for fewest_words in (FEWEST_WORDS, 2):  # halves of short sentences say little: only where there are no others
        first, second = retrieval.halves(training_sentences(), most, fewest_words)
        if len(first) >= 2:
            return [first, second]
    raise DataError(
        f"data.train_file={config.data.train_file} has too few sentences: the dev metric halves_retrieval needs two "
        "different ones of at least two words"
    )


def _held_out_pairs(config: Config, metric: str, most: int) -> Texts:
    """Queries and targets of the documents that are held out, and the numbers of those."""
    data = config.data
    having = documents = 0

    def usable_pairs() -> Iterator[tuple[str, str]]:
        nonlocal having, documents
        for document in held_out.held_out(open_documents(data), data.held_out):
            made = [pair for section in document for pair in HELD_OUT_PAIRS[metric](section)]
            usable = [pair for pair in made if not isinstance(checked(pair), Fault)]
            having, documents = having + bool(usable), documents + 1
            yield from usable

    chosen = retrieval.chosen_pairs(usable_pairs(), most, held_out.digest)
    if len(chosen) < 2:
        raise DataError(
            f"data.held_out={data.held_out} of data.train_file={data.train_file} leaves {len(chosen)} pairs for "
            f"{metric}, which needs two different ones; hold out more, or choose another metric"
        )
    return {"pairs": [list(texts) for texts in zip(*chosen, strict=True)], "documents": [having, documents]}


def _leads(section: Section) -> Iterator[tuple[str, str]]:
    if pair := pairs.lead_and_rest(pairs.texts_of(section)):
        yield pair[0], " ".join(pair[1].split()[:MOST_WORDS])


def _neighbours(section: Section) -> Iterator[tuple[str, str]]:
    """Sentences and the next ones; none twice, for a sentence that is a query and a target would find itself."""
    sentences = section.sentences()
    for pair in zip(sentences[::2], sentences[1::2], strict=False):
        if min(map(len, pair)) >= pairs.FEWEST_CHARACTERS:
            yield pair


def _halves_of_sentences(section: Section) -> Iterator[tuple[str, str]]:
    sentences = section.sentences()
    return (retrieval.halved(sentence) for sentence in sentences if len(sentence.split()) >= FEWEST_WORDS)


HELD_OUT_PAIRS = {
    "lead_retrieval": _leads,
    "neighbours_retrieval": _neighbours,
    "halves_retrieval": _halves_of_sentences,
}


def _scored_pairs(values: list[list]) -> sts.ScoredPairs:
    """Those that `_as_json` gave."""
    first, second, gold = values
    return sts.ScoredPairs(first, second, np.array(gold))


def _spearman_scorer(metric: str, sets: dict[str, sts.ScoredPairs], batch_size: int) -> Scorer:
    def score(encoder: Encoder) -> Scores:
        by_set = sts.score_pairs(encoder, sets, batch_size)
        scores = {name: result["spearman"] for name, result in by_set.items()}
        if metric == "average_spearman":
            scores[metric] = sum(scores.values()) / len(scores)
        return scores

    return score


def _retrieval_scorer(metric: str, pairs: list[list[str]], batch_size: int) -> Scorer:
    """Scores the mean reciprocal rank as `metric`; beside it recalls and, not x 100, the uniformity of the texts."""
    queries, targets = pairs

    def score(encoder: Encoder) -> Scores:
        vectors = encoder.encode(queries + targets, batch_size=batch_size)
        scores = retrieval.retrieval_scores(vectors[: len(queries)], vectors[len(queries) :])
        beside = {f"{metric}_{name}": value for name, value in scores.items() if name != "mrr"}
        return {metric: scores["mrr"]} | beside | {"uniformity": uniformity(normalized(vectors))}

    return score
