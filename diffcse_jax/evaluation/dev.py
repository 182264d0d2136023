"""The dev evaluation of a training run: its metrics and their text.

One of the metrics chooses the best checkpoint.

All processes of a run must call the encoder in the same way, because otherwise they wait for one
another forever. Therefore the first process decides on the metrics and reads their text. The others
get both from it and need no files.
"""

import collections
import dataclasses
import heapq
import itertools
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from diffcse_jax.config import Config, DataConfig, EvalConfig
from diffcse_jax.config.groups import MASKED_ACCURACY
from diffcse_jax.data.pairs import FEWEST_CHARACTERS, lead_and_rest, short_passages
from diffcse_jax.data.sampling import WINDOW
from diffcse_jax.data.sources import open_split
from diffcse_jax.data.split import Split, texts_of
from diffcse_jax.documents.document import Section, digest
from diffcse_jax.documents.ledger import Ledger, Place, usable
from diffcse_jax.documents.sentences import join, some_words, split_sentences, width, words
from diffcse_jax.errors import DataError, counted
from diffcse_jax.evaluation import CachedEncoder, Encoder, metrics, retrieval, search_collections
from diffcse_jax.evaluation.masked_lm import MaskedAccuracy, TrainingTokens
from diffcse_jax.evaluation.metrics import Metric, QueryMetric, RetrievalMetric
from diffcse_jax.evaluation.senteval_data import Form, is_local, senteval_folder, size_problem
from diffcse_jax.evaluation.sts import SICKR, STSB, ScoredPairs, read_pairs
from diffcse_jax.evaluation.user_files import report
from diffcse_jax.hosts import decided_by_first, log_line
from diffcse_jax.io import expand_path, json_digest
from diffcse_jax.run_folder.records import FEWEST, Measured, Outcomes

STS_METRICS = {"stsb_spearman", "average_spearman"}
STS_TASKS = {"STSBenchmark": (STSB, "stsb_spearman"), "SICKRelatedness": (SICKR, "sickr_spearman")}
DRIFT_STSB, DRIFT_AGREEMENT = "guard_stsb_spearman", "guard_agreement"  # scores of general quality
MOST_PAIRS = 1000
# they are scored only once, and find losses that 1,000 pairs cannot tell from chance
MOST_HOLD_PAIRS = 4000
FEWEST_WORDS = 6  # in a sentence that is halved
MOST_WORDS = 64  # in the rest of a document after its lead
MOST_TOKENS = 128  # in a passage that is searched
WINDOWS = 2  # for each passage
KEYWORDS = 5  # for each passage

TrainingTexts = Callable[[], Iterable[str]]
# A metric's `name`, and its text: `queries`, a `collection` or `sets` of rated pairs. `judges` says
# which queries judge, if they are divided.
Texts = dict[str, Any]
Pairs = list[tuple[str, str]]  # queries, and the texts that they should find
Query = tuple[str, str, int, int]  # a pair, and the numbers of its passage and document


@dataclasses.dataclass(frozen=True)
class DevEvaluation:
    """The dev evaluation of a run."""

    # the metric that chooses the best checkpoint; in fine-tuning it measures another kind of model
    chosen: Any
    text: str  # identifies the text of that metric
    also: Sequence[Metric] = ()  # the metrics of `eval.beside`, which are only reported
    # the metrics of `eval.hold`, which the exported model may not lower
    hold: Sequence[RetrievalMetric] = ()
    # measures general quality, which training on a narrow domain may lower
    drift_check: Metric | None = None

    @property
    def metric(self) -> str:
        return self.chosen.name

    @property
    def drift_metric(self) -> str:
        """The score of general quality, for `eval.max_drop`; empty if it is not measured."""
        return self.drift_check.name if self.drift_check else ""

    def measure(self, encoder: Any) -> Measured:
        """Return the scores of an encoder, and what the chosen metric summarises."""
        encoder = CachedEncoder(encoder)
        chosen = self.chosen.measure(encoder)
        also = {metric.name: metric.measure(encoder).scores[metric.name] for metric in self.also}
        drift = self.drift_check.measure(encoder).scores if self.drift_check else {}
        return Measured(chosen.scores | also | drift, chosen.outcomes)

    def held(self, encoder: Encoder) -> dict[str, Outcomes]:
        """Return the outcomes of the metrics of `eval.hold`, by name."""
        encoder = CachedEncoder(encoder)
        return {metric.name: metric.measure(encoder).outcomes for metric in self.hold}

    def regressions(
        self, start: Mapping[str, Outcomes], model: Mapping[str, Outcomes]
    ) -> list[str]:
        """Return the metrics of `eval.hold` in which the model is significantly worse, as text."""
        found = []
        for metric in self.hold:
            name = metric.name
            low, high = metric.interval(start[name], model[name])
            if high < 0:
                interval = f"95% interval {low:+.2f} to {high:+.2f} over {metric.units}"
                found.append(
                    f"{name} {np.mean(model[name]):.2f}, was {np.mean(start[name]):.2f} "
                    f"({interval})"
                )
        return found


def build_dev_evaluation(
    config: Config,
    training: TrainingTexts,
    start: Callable[[], Encoder] | None = None,
    split: Split | None = None,
    tokens: TrainingTokens | None = None,
) -> DevEvaluation:
    """Build the evaluation that `eval` describes, the same on all processes.

    If STS data is needed and missing, `halves_retrieval` on training sentences replaces the metric
    that chooses, and other metrics that need the data are left out, with a warning on standard
    error.

    Args:
        config: The run's configuration.
        training: Starts a pass over the sentences of the training text.
        start: Returns the encoder of the starting checkpoint, for the drift check. None: no drift
            check.
        split: The documents of the text, if they are open already. They are not read again.
        tokens: The tokens of the training text, for `masked_accuracy`.
    """
    options = config.eval
    chosen, also, hold = decided_by_first(lambda: _all_texts(config, training, split, tokens))
    return DevEvaluation(
        chosen=_metric_of(chosen, options.batch_size, tokens),
        text=json_digest(chosen),
        also=[_metric_of(texts, options.batch_size, tokens) for texts in also],
        hold=[_metric_of(texts, options.batch_size) for texts in hold],
        drift_check=build_drift_check(options, start)
        if start and (options.guard or options.max_drop)
        else None,
    )


def build_drift_check(options: EvalConfig, start: Callable[[], Encoder]) -> Metric:
    """Use Spearman on STS-B dev or, if that is not found, agreement with the start.

    Agreement compares similarities with those of the starting checkpoint.
    """

    def stsb_dev() -> ScoredPairs | None:  # nothing is downloaded
        if not is_local(options.data_dir) or _missing_sts_data(options.data_dir, ["STSBenchmark"]):
            return None
        return STSB.load(senteval_folder(options.data_dir), "dev")

    if stsb := decided_by_first(stsb_dev):
        return metrics.CorrelationMetric(
            DRIFT_STSB, options.batch_size, {DRIFT_STSB: ScoredPairs(*stsb)}
        )
    cosines = metrics.general_cosines(start(), options.batch_size)
    return metrics.AgreementMetric(DRIFT_AGREEMENT, options.batch_size, cosines)


# The text of metrics


def _all_texts(
    config: Config, training: TrainingTexts, split: Split | None, tokens: TrainingTokens | None
) -> tuple[Texts, list[Texts], list[Texts]]:
    """Return the text of the metric that chooses, and of the other metrics.

    The others are those of `eval.beside` and those of `eval.hold`.
    """
    options = config.eval
    metric = config.eval.metric
    also = [name for name in dict.fromkeys(options.beside) if name != metric]
    needs_sts = STS_METRICS.intersection([metric, *also])
    if problem := _missing_sts_data(options.data_dir, options.tasks) if needs_sts else "":
        if metric in STS_METRICS:
            metric = "halves_retrieval"
            log_line(
                f"warning: eval.metric={options.metric} is replaced by {metric}, which needs no "
                f"labels: {problem}"
            )
        if left_out := STS_METRICS.intersection(also):
            log_line(f"notice: eval.beside: {', '.join(sorted(left_out))} is left out: {problem}")
        also = [name for name in also if name not in {*STS_METRICS, metric}]
    if split is None and config.data.held_out:
        split = open_split(config.data)

    def texts_of_metric(name: str) -> Texts:
        if name == MASKED_ACCURACY:
            return {"name": name, "token_ids": masked_texts(config, split, tokens)}
        return _texts(config, name, training, split)

    chosen, *others = [texts_of_metric(name) for name in (metric, *also)]
    chosen = _divided(chosen)
    hold = []
    for name in dict.fromkeys(options.hold):
        try:
            texts = _texts(config, name, training, split, most=MOST_HOLD_PAIRS)
            if (count := len(texts["queries"])) < FEWEST:
                raise DataError(f"it has {counted(count, 'pair{s}')} and needs at least {FEWEST}")
            hold.append(texts)
        except DataError as error:
            log_line(f"notice: eval.hold: {name} is left out: {error}")
    return chosen, others, hold


def _texts(
    config: Config,
    metric: str,
    training: TrainingTexts,
    split: Split | None,
    *,
    most: int = MOST_PAIRS,
) -> Texts:
    """Return a metric and its text.

    If pairs are made from documents or sentences, there are at most `most`.
    """
    options = config.eval
    kind, _, file = metric.partition(":")
    is_strict = config.data.on_bad_line == "error"
    texts: Texts = {"name": metric}
    if metric in STS_METRICS:
        return texts | {"sets": _sts_pairs(options)}
    if metric in HELD_OUT_PAIRS and split and split.share:
        return texts | {"queries": held_out_queries(split, config.data.max_length, metric, most)}
    if metric == "halves_retrieval":
        if len(found := training_halves(training, most)) < 2:
            raise DataError(
                f"data.train_file={config.data.train_file} has too few sentences. The dev metric "
                "halves_retrieval needs two different sentences of at least two words"
            )
        return texts | {"queries": found}
    if kind == "pairs_retrieval":
        return texts | {
            "queries": retrieval.read_retrieval_pairs(file or options.pairs_file, strict=is_strict)
        }
    if kind == search_collections.COLLECTION:
        return texts | {
            "collection": search_collections.read_collection(expand_path(file), strict=is_strict)
        }
    path = expand_path(options.pairs_file)  # the metric is pairs_spearman
    own = read_pairs(path, Form(0, (1, 2), labels=(-1e9, 1e9)))
    if np.ptp(own.gold) == 0:
        raise DataError(
            f"{path}: eval.metric=pairs_spearman needs at least two pairs with different scores"
        )
    return texts | {"sets": {metric: own}}


def masked_texts(
    config: Config, split: Split | None, tokens: TrainingTokens | None
) -> list[list[int]]:
    """Return the tokens of passages of the held-out documents.

    There are at most `MOST_PAIRS`, chosen by a hash.
    """
    if split is None or tokens is None:
        raise DataError(f"{MASKED_ACCURACY} is measured only while a masked LM is trained")
    length = config.data.max_length
    sections = (section for _, document in split.held_out() for section in document.sections)
    passages = {
        text for section in sections for text in short_passages(section.sentences(), length)
    }
    chosen = heapq.nsmallest(MOST_PAIRS, passages, key=digest)
    if not chosen:
        raise DataError(
            f"data.held_out={split.share} of data.train_file={split.name} leaves no passage for "
            f"{MASKED_ACCURACY}. Hold out more documents or choose another eval.metric"
        )
    return tokens.of(chosen, length)


def _metric_of(texts: Texts, batch_size: int, tokens: TrainingTokens | None = None) -> Any:
    """Return the metric of `_texts`.

    Other processes receive its text as JSON, with lists instead of tuples.
    """
    name = texts["name"]
    if name == MASKED_ACCURACY:
        assert tokens is not None  # otherwise there are no texts
        return MaskedAccuracy(name, batch_size, texts["token_ids"], tokens)
    if "queries" in texts:
        columns = map(list, zip(*texts["queries"], strict=True))
        return RetrievalMetric(name, batch_size, *columns, judges=texts.get("judges"))
    if "collection" in texts:
        collection = search_collections.Collection(*texts["collection"])
        return metrics.CollectionMetric(name, batch_size, collection, judges=texts.get("judges"))
    return metrics.CorrelationMetric(
        name, batch_size, {key: ScoredPairs(*each) for key, each in texts["sets"].items()}
    )


def _divided(texts: Texts) -> Texts:
    """Return the text of the metric that chooses, and which queries judge if there are enough."""
    if "queries" not in texts and "collection" not in texts:
        return texts
    metric: QueryMetric = _metric_of(texts, batch_size=1)
    judges = metrics.division(metric)
    return texts | {"judges": judges} if judges else texts


def _missing_sts_data(data_dir: str, tasks: Sequence[str]) -> str:
    """Say why these tasks cannot be scored, or return an empty string."""
    try:
        folder = senteval_folder(data_dir)
    except DataError as error:
        return f"{error} (eval.data_dir)"
    missing = [path for task in tasks for path in STS_TASKS[task][0].missing(folder, "dev")]
    return f"not found: {', '.join(map(str, missing))}" if missing else ""


def _sts_pairs(options: EvalConfig) -> dict[str, ScoredPairs]:
    """Read the dev splits of `eval.tasks`, by the name of their score."""
    folder = senteval_folder(options.data_dir)
    found = {}
    for name in options.tasks:
        task, score = STS_TASKS[name]
        found[score] = task.load(folder, "dev")
        if problem := size_problem(name, {"n": len(found[score].gold)}, "dev"):
            log_line(f"notice: {name} in {folder} is not the official data: {problem}")
    return found


# Queries made of unlabelled text


def queries_of_documents(file: str, *, strict: bool = False) -> RetrievalMetric:
    """Return the dev metric `mixed_retrieval` of all documents of a file, folder or collection.

    What was read, and what was not, is printed. With `strict`, a loss raises `DataError` instead.
    """
    on_bad_line = "error" if strict else "skip"
    split = open_split(DataConfig(train_file=file, held_out=1.0, on_bad_line=on_bad_line))
    report(split.ledger)
    queries = choose_queries(_queries_of(split, MOST_TOKENS, "mixed_retrieval"), MOST_PAIRS)
    if len(queries) < 2:
        raise DataError(
            f"{file}: its documents give {counted(len(queries), 'quer{y}')}, and a comparison "
            "needs two. Documents with titles, or with at least two sentences, give queries"
        )
    return _metric_of({"name": "mixed_retrieval", "queries": queries}, batch_size=64)


def held_out_queries(split: Split, max_length: int, metric: str, most: int) -> list[Query]:
    """Return at most `most` queries of the held-out documents for a metric of `HELD_OUT_PAIRS`.

    Args:
        split: The documents.
        max_length: The approximate number of tokens of a passage.
        metric: The name of the metric.
        most: The largest number of queries.
    """
    chosen = choose_queries(_queries_of(split, max_length, metric), most)
    if len(chosen) < 2:
        left = f"data.held_out={split.share} of data.train_file={split.name} leaves"
        raise DataError(
            f"{left} {counted(len(chosen), 'pair{s}')} for {metric}, which needs two different "
            "ones. Hold out more documents or choose another eval.metric"
        )
    return chosen


def _queries_of(split: Split, max_length: int, metric: str) -> Iterator[Query]:
    """Yield the queries of the held-out documents."""
    passages = itertools.count()
    unusable = Ledger(split.name)  # pairs whose texts are empty or too long
    for number, document in split.held_out():
        for section in document.sections:
            for pairs in HELD_OUT_PAIRS[metric](section, max_length):
                passage = next(passages)
                yield from (
                    (*pair, passage, number) for pair in pairs if usable(pair, Place(), unusable)
                )


def choose_queries(
    queries: Iterable[Query], limit: int, order: Callable[[str], int] = digest
) -> list[Query]:
    """Choose at most `limit` queries, whatever order they come in.

    They are those with the lowest `order`, a hash. Chosen queries of different passages share no
    text. Memory holds at most four times the limit.
    """
    lowest: dict[int, Query] = {}
    for query in queries:
        lowest[order(" ".join(query[:2]))] = query
        if len(lowest) > 4 * limit:
            lowest = dict(heapq.nsmallest(2 * limit, lowest.items()))
    candidates = [query for _, query in sorted(lowest.items())[: 2 * limit]]
    places = {(text, passage) for *texts, passage, _ in candidates for text in texts}
    occurrences = collections.Counter(text for text, _ in places)
    shared = {text for text, count in occurrences.items() if count > 1}
    return [query for query in candidates if query[0] != query[1] and shared.isdisjoint(query[:2])][
        :limit
    ]


def training_halves(training: Callable[[], Iterable[str]], most: int) -> Pairs:
    """Return the halves of the first `most` different sentences.

    Short ones are used only if there are no others.
    """
    found: dict[str, None] = {}
    for fewest in (FEWEST_WORDS, 2):
        for sentence in training():
            if len(words(sentence)) >= fewest:
                found[sentence] = None
            if len(found) == most:
                break
        if len(found) >= 2:
            break
    return [halve(sentence) for sentence in found]


def halve(sentence: str) -> tuple[str, str]:
    """Return the two halves of a sentence, by words."""
    middle = len(words(sentence)) // 2
    return some_words(sentence, 0, middle), some_words(sentence, middle)


# The pairs of each passage of a section


def _leads(section: Section, tokens: int) -> Iterator[Pairs]:
    if pair := lead_and_rest(texts_of(section)):
        yield [(pair[0], some_words(pair[1], 0, MOST_WORDS))]


def _neighbours(section: Section, tokens: int) -> Iterator[Pairs]:
    sentences = section.sentences()
    pairs = zip(sentences[::2], sentences[1::2], strict=False)  # a sentence twice would find itself
    return ([pair] for pair in pairs if min(map(width, pair)) >= FEWEST_CHARACTERS)


def _halves_of_sentences(section: Section, tokens: int) -> Iterator[Pairs]:
    return (
        [halve(sentence)]
        for sentence in section.sentences()
        if len(words(sentence)) >= FEWEST_WORDS
    )


def _mixed(section: Section, tokens: int) -> Iterator[Pairs]:
    for number, passage in enumerate(short_passages(section.sentences(), tokens)):
        title = [(section.title, passage)] if section.title and not number else []
        yield [
            *title,
            *_sentences_and_rests(passage),
            *_windows_and_rests(passage),
            (_keywords(passage), passage),
        ]


def _sentences_and_rests(passage: str) -> Iterator[tuple[str, str]]:
    sentences = split_sentences(passage)
    for index, sentence in enumerate(sentences):
        rest = join(sentences[:index] + sentences[index + 1 :])
        if WINDOW[0] <= len(words(sentence)) <= WINDOW[1] and len(words(rest)) >= WINDOW[0]:
            yield sentence, rest


def _windows_and_rests(passage: str) -> Iterator[tuple[str, str]]:
    """Yield windows of a passage and what is left of it.

    The passage has `pairs.FEWEST_WORDS` words or more. Its hash chooses sizes and places.
    """
    count = len(words(passage))
    (shortest, longest) = WINDOW
    for number in range(WINDOWS):
        random_size, random_start = divmod(digest(f"{number} {passage}"), 1 << 32)
        size = shortest + random_size % (min(longest, count - shortest) - shortest + 1)
        start = random_start % (count - size + 1)
        rest = join(
            filter(None, [some_words(passage, 0, start), some_words(passage, start + size)])
        )
        yield some_words(passage, start, start + size), rest


def _keywords(passage: str) -> str:
    """Return the longest words, in the order of the passage."""
    distinct = list(dict.fromkeys(word.strip(string.punctuation) for word in words(passage)))
    longest = sorted(distinct, key=len, reverse=True)[:KEYWORDS]
    return " ".join(word for word in distinct if word in longest)


HELD_OUT_PAIRS: dict[str, Callable[[Section, int], Iterator[Pairs]]] = {
    "lead_retrieval": _leads,
    "neighbours_retrieval": _neighbours,
    "halves_retrieval": _halves_of_sentences,
    "mixed_retrieval": _mixed,
}
