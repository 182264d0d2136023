import dataclasses
import decimal
import json
import math
import re

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest
import scipy.stats
from test_retrieval import letters
from test_sts import TableEncoder, write_stsb

from diffcse_jax.config import Config, DataConfig, EvalConfig
from diffcse_jax.data.columns import training_columns
from diffcse_jax.data.sources import open_split
from diffcse_jax.documents import docstrings
from diffcse_jax.documents.tables.formats import open_table
from diffcse_jax.documents.tables.values import number_of
from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import CachedEncoder, dev, metrics, senteval_data, systems
from diffcse_jax.evaluation.graded_pairs import read_graded_pairs
from diffcse_jax.evaluation.metrics import RetrievalMetric, general_sentences, paired_interval
from diffcse_jax.evaluation.queries import halve, held_out_queries, queries_of_documents
from diffcse_jax.evaluation.runner import find_task
from diffcse_jax.evaluation.systems import HYBRID, System
from diffcse_jax.models.sentence_folder import NO_PROMPTS
from diffcse_jax.search.modes import DEFAULT_WEIGHT, HIGHER_WEIGHT

TRAINING = [
    "one two three four five six",
    "too short",
    "seven eight nine ten eleven twelve thirteen",
]


@pytest.fixture(autouse=True)
def no_data_elsewhere(monkeypatch):
    monkeypatch.delenv("DIFFCSE_DATA_DIR", raising=False)


def build(sentences=TRAINING, data=DataConfig(), **options):  # noqa: B008
    config = dataclasses.replace(Config(), data=data, eval=EvalConfig(**options))
    return dev.build_dev_evaluation(config, lambda: sentences)


def angles(**names):
    return TableEncoder({name: [np.cos(angle), np.sin(angle)] for name, angle in names.items()})


def test_spearman_of_stsb_or_of_all_tasks(tmp_path):
    write_stsb(tmp_path, "dev", [(5, "a", "b"), (1, "a", "c"), (3, "a", "d")])
    (tmp_path / "SICK").mkdir()
    sick = ["id\ta\tb\tscore", "1\ta\tb\t1", "2\ta\tc\t5", "3\ta\td\t3"]
    (tmp_path / "SICK/SICK_trial.txt").write_text("\n".join(sick))
    encoder = angles(a=0.0, b=0.1, c=1.0, d=0.5)
    stsb = build(data_dir=str(tmp_path))
    assert (stsb.metric, stsb.chosen.units) == ("stsb_spearman", "3 pairs")
    assert stsb.measure(encoder).scores == pytest.approx({"stsb_spearman": 100})
    average = build(
        data_dir=str(tmp_path), metric="average_spearman", tasks=("STSBenchmark", "SICKRelatedness")
    )
    assert (average.metric, average.chosen.units) == ("average_spearman", "6 pairs")
    expected = {"stsb_spearman": 100, "sickr_spearman": -100, "average_spearman": 0}
    assert average.measure(encoder).scores == pytest.approx(expected)


def test_without_sts_data_halves_of_sentences_replace_it(tmp_path, capsys):
    for data_dir, missing in (
        ("", "DIFFCSE_DATA_DIR"),
        (str(tmp_path), "STS/STSBenchmark/sts-dev.csv"),
    ):
        evaluation = build(data_dir=data_dir)
        notice = capsys.readouterr().err
        assert "warning: eval.metric=stsb_spearman is replaced by halves_retrieval" in notice
        assert missing in notice
    assert evaluation.metric == "halves_retrieval"
    halves = {
        "one two three": 0.0,
        "four five six": 0.1,
        "seven eight nine": 1.0,
        "ten eleven twelve thirteen": 1.2,
    }
    assert evaluation.measure(angles(**halves)).scores["halves_retrieval"] == pytest.approx(100)


def test_a_file_of_pairs_chooses_and_others_are_reported(tmp_path, capsys):
    chosen_by, others = (tmp_path / name for name in ("dev.tsv", "others.tsv"))
    chosen_by.write_text("\ufeff1\ta\tb\n2\ta\tc\n3\ta\td\n\n", encoding="utf-8")
    others.write_text("a\tb\nc\td\n")
    beside = (f"pairs_retrieval:{others}", "pairs_spearman", "stsb_spearman")
    evaluation = build(metric="pairs_spearman", pairs_file=str(chosen_by), beside=beside)
    # there is no such data here
    assert "eval.beside: stsb_spearman is left out: " in capsys.readouterr().err
    measured = evaluation.measure(angles(a=0.0, b=0.1, c=0.5, d=1.0))
    assert evaluation.metric == "pairs_spearman"
    assert measured.scores == pytest.approx({"pairs_spearman": -100, beside[0]: 75})
    assert [len(values) for values in measured.outcomes] == [3]  # of the metric that chooses


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "id,sentence1,sentence2,score\nx,a,b,1\ny,a,c,2\nz,a,d,3.5\n"),
        ("a.csv", "one text,other text,human_score\na,b,1\na,,2\na,c,\na,c,2\na,d,3.5\n"),
        ("a.tsv", "Score\tfirst\tsecond\n1\ta\tb\n2\ta\tc\n\n3.5\ta\td\n"),
        ("a.tsv", "question\tanswer\tsim\na\tb\t1\na\tb\na\tc\t2\na\td\t3.5\n"),
        ("a.txt", "1\ta\tb\n2\ta\tc\n3.5\ta\td\tmore\n"),
        ("a.txt", "01.\ta\tb\n2.\ta\tc\n.35e1\ta\td\n"),
        ("a.jsonl", '["a", "b", 1]\n["a", "c", 2]\n["a", "d", 3.5]\n["a", "d", 3.5]\n' * 2),
    ],
)
def test_graded_pairs_are_read_as_other_pairs(tmp_path, capsys, name, text):
    (tmp_path / name).write_text(text)
    pairs = read_graded_pairs(tmp_path / name)
    rows = {*zip(*pairs, strict=True)}
    assert rows == {("a", "b", 1.0), ("a", "c", 2.0), ("a", "d", 3.5)}
    odd = "a,,2" in text or "a\tb\na" in text
    assert ("without a score and two sentences" in capsys.readouterr().err) == odd


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "score,label,text\n1,2,a\n", "It has: score, label, text. Name the columns"),
        ("a.tsv", "\n\na\tb\n", r"a\.tsv, line 3: without a score .* 'a\\tb'. Name the columns"),
        ("a.tsv", "1\ta\n", r"no score with two sentences\. .* line 1"),
    ],
)
def test_files_without_graded_pairs_say_what_to_do(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        read_graded_pairs(tmp_path / name)


def test_decimals_of_parquet_are_grades(tmp_path):
    grades = [decimal.Decimal(text) for text in ("1.0", "2.0", "3.5")] * 2
    columns = {"sentence1": ["a"] * 6, "sentence2": list("bcdbcd"), "human": grades}
    pq.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert read_graded_pairs(tmp_path / "a.parquet").gold == [1.0, 2.0, 3.5] * 2
    table = open_table(tmp_path / "a.parquet", "a")
    assert training_columns(table.columns, table.scale_columns) is None
    assert number_of(decimal.Decimal("sNaN")) == number_of(10**400) == math.inf


@pytest.mark.parametrize(
    ("trained", "warns"), [(["one"], True), (["ONE ", "x"], True), (["x"], False)]
)
def test_pairs_that_are_also_trained_on_are_named(tmp_path, capsys, trained, warns):
    (tmp_path / "pairs.tsv").write_text("one\t1\ntwo\t2\n")
    evaluation = build(["x"], metric="pairs_retrieval", pairs_file=str(tmp_path / "pairs.tsv"))
    dev.warn_of_trained_queries(evaluation, lambda: trained)
    err = capsys.readouterr().err
    assert (
        ("1 of 2 queries of pairs_retrieval " in err) == ("texts to train on, so" in err) == warns
    )


def test_regressions_beyond_chance(monkeypatch, capsys):
    monkeypatch.setattr(docstrings, "docstring_pairs", lambda limit: [("a", "b"), ("c", "d")])
    options = {
        "metric": "pairs_retrieval",
        "pairs_file": "docstrings",
        "hold": ("halves_retrieval",),
    }
    halves = [(f"{n} is the one half", f"and {n} the other one") for n in range(20)]
    sentences = [f"{first} {second}" for first, second in halves]
    rng = np.random.default_rng(0)
    found = {
        text: vector
        for pair, vector in zip(halves, rng.normal(size=(20, 8)), strict=True)
        for text in pair
    }
    lost = {text: rng.normal(size=8) for text in found}

    evaluation = build(sentences, **options)
    assert evaluation.measure(angles(a=0.0, b=0.1, c=1.0, d=1.1)).scores[
        "pairs_retrieval"
    ] == pytest.approx(100)
    good, bad = (evaluation.held(TableEncoder(vectors)) for vectors in (found, lost))
    assert evaluation.regressions(good, good) == evaluation.regressions(bad, good) == []
    (regression,) = evaluation.regressions(good, bad)
    expected = (
        r"halves_retrieval \d\d\.\d\d, was 100\.00 \(95% interval -\S+ to -\S+ over 20 queries\)"
    )
    assert re.fullmatch(expected, regression)
    assert not capsys.readouterr().err


ONE = [
    "The first subject comes up here.",
    "The first one has a second sentence.",
    "And its third one is here.",
]
TWO = [
    "Another subject is what this is.",
    "Of the other there is more to say.",
    "It is said in this very place.",
]


@pytest.mark.parametrize(
    ("metric", "pairs"),
    [
        ("lead_retrieval", [(text[0], " ".join(text[1:])) for text in (ONE, TWO)]),
        ("neighbours_retrieval", [tuple(text[:2]) for text in (ONE, TWO)]),
        ("halves_retrieval", [halve(sentence) for sentence in ONE + TWO]),
    ],
)
def test_pairs_of_held_out_documents(tmp_path, metric, pairs):
    (tmp_path / "a.txt").write_text("\n\n".join("\n".join(text) for text in (ONE, TWO, ONE)))
    data = DataConfig(train_file=str(tmp_path / "a.txt"), pairs="dropout", held_out=1.0)
    encoder = TableEncoder(
        {text: np.eye(len(pairs))[row] for row, pair in enumerate(pairs) for text in pair}
    )
    # the encoder knows no other text
    scores = build(data=data, metric=metric).measure(encoder).scores
    assert scores.keys() == {metric, *(f"{metric}_recall@{k}" for k in (1, 5, 10)), "uniformity"}
    n = 2 * len(pairs)  # distances are 0 within a pair and the root of 2 between others
    uniformity = np.log((n + n * (n - 2) * np.exp(-4)) / (n * (n - 1)))
    assert (scores[metric], scores["uniformity"]) == pytest.approx((100, uniformity), abs=1e-5)


@pytest.mark.parametrize("queries", [1, 5])
def test_the_interval_of_a_mean_is_that_of_normal_theory(queries):
    """Equal queries of a document are one observation."""
    rng = np.random.default_rng(1)
    first, gain = (
        each.repeat(queries) for each in (rng.normal(0, 5, 400), rng.normal(1.0, 2.0, 400))
    )
    documents = np.arange(400).repeat(queries)
    low, high = paired_interval([first.tolist()], [(first + gain).tolist()], groups=documents)
    error = 1.96 * gain.std() / np.sqrt(400)  # unpaired, it would be three times as wide
    assert (low, high) == pytest.approx((gain.mean() - error, gain.mean() + error), abs=0.05)


def test_held_out_queries_have_several_forms_and_give_nothing_away(tmp_path):
    words = [
        f"{first}{second}"
        for first in "bcdfglmnrst"
        for second in ("alo", "emi", "iru", "oka", "une")
    ]
    rng = np.random.default_rng(0)
    # without titles, sentences and capitals
    texts = [" ".join(rng.choice(words, 30)) for _ in range(30)]
    titled = [
        {"title": f"Title {i}", "text": f"{text.capitalize()}."}
        for i, text in enumerate(texts[:15])
    ]
    (tmp_path / "a.jsonl").write_text(
        "\n".join(map(json.dumps, [*titled, *({"text": text} for text in texts[15:])]))
    )
    data = DataConfig(
        str(tmp_path / "a.jsonl"), pairs="lead", cloze=1.0, held_out=1.0, max_length=64
    )
    found = held_out_queries(open_split(data), 64, "mixed_retrieval", 1000)
    lengths = [(len(query.split()), len(target.split())) for query, target, *_ in found]
    assert sum(query.startswith("Title ") for query, *_ in found) == 15
    assert lengths.count((5, 30)) >= 30  # keywords
    windows = [each for each in lengths if each[1] < 30]
    assert len(windows) == 60
    assert all(5 <= query <= 25 and query + target == 30 for query, target in windows)
    assert (
        build(data=data, metric="mixed_retrieval").chosen.units
        == f"{len(found):,} queries of 30 documents"
    )


# Queries that choose, and queries that judge


def of_documents(count: int) -> RetrievalMetric:
    """Return a metric with one to four queries of each document. The last two share a text."""
    queries, targets, document_of = [], [], []
    for document in range(count):
        for number in range(1 + document % 4):
            queries.append(f"question {number} of {document}")
            targets.append(f"answer {number} of {document}")
            document_of.append(document)
    targets[-1] = f" ANSWER 0 of {count - 2}"
    return RetrievalMetric("it", 64, queries, targets, list(range(len(queries))), document_of)


def test_queries_are_divided_by_document_whatever_their_order():
    metric = of_documents(61)
    judges = metrics.division(metric)
    assert judges == metrics.division(of_documents(61))
    divided = dataclasses.replace(metric, judges=judges)
    assert (divided.judging ^ divided.choosing).all()
    documents = np.array(metric.document_of)
    judging, choosing = (
        set(documents[rows].tolist()) for rows in (divided.judging, divided.choosing)
    )
    assert judging.isdisjoint(choosing)
    assert judging | choosing == set(range(61))
    assert len(judging & {59, 60}) in (0, 2)  # a text in common
    assert divided.sample == (30, "documents")  # of 60, because two share a text
    count = sum(judges)
    assert divided.units == f"{count} queries of 30 documents that chose nothing"
    order = np.random.default_rng(0).permutation(len(documents)).tolist()
    columns = [
        [column[row] for row in order]
        for column in (metric.queries, metric.targets, metric.passages, metric.document_of)
    ]
    assert metrics.division(RetrievalMetric("it", 64, *columns)) == [judges[row] for row in order]


def test_few_documents_are_not_divided():
    assert metrics.division(of_documents(50)) is None  # two share a text
    halves = np.array(metrics.division(of_documents(51)))
    assert len(set(np.array(of_documents(51).document_of)[halves])) in (25, 26)
    metric = of_documents(20)
    assert metric.units == "50 queries of 19 documents"
    assert metric.remark == "The same queries chose the checkpoint, which favours it a little."


def test_the_dev_score_is_of_queries_that_choose_and_the_verdict_is_of_the_others():
    metric = of_documents(60)
    divided = dataclasses.replace(metric, judges=metrics.division(metric))
    rng = np.random.default_rng(0)
    texts = sorted({*metric.queries, *metric.targets})
    worse, better = (
        TableEncoder(dict(zip(texts, rng.normal(size=(len(texts), 8)), strict=True)))
        for _ in range(2)
    )
    before, after = divided.measure(worse), divided.measure(better)
    assert after.outcomes == metric.measure(better).outcomes
    (values,) = map(np.array, after.outcomes)
    assert after.scores["it"] == pytest.approx(values[divided.choosing].mean())
    assert divided.judged(after) == pytest.approx(values[divided.judging].mean())
    assert metric.judged(metric.measure(better)) == pytest.approx(values.mean())
    rows = np.flatnonzero(divided.judging)
    alone = RetrievalMetric(
        "it",
        64,
        *([column[row] for row in rows] for column in (metric.queries, metric.targets)),
        document_of=[metric.document_of[row] for row in rows],
    )
    judged = ([np.array(each.outcomes[0])[rows].tolist()] for each in (before, after))
    expected = alone.interval(*judged)
    assert divided.interval(before.outcomes, after.outcomes) == pytest.approx(expected)
    lucky = np.where(divided.choosing, 100.0, np.array(before.outcomes[0])).tolist()
    assert divided.interval(before.outcomes, [lucky]) == (0, 0)


def test_only_the_metric_that_chooses_is_divided(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    words = [
        f"{first}{second}" for first in "bcdfglmnrst" for second in ("alo", "emi", "iru", "oka")
    ]
    sentences = (" ".join(rng.choice(words, 8)).capitalize() for _ in range(180))
    texts = [f"{next(sentences)}.\n{next(sentences)}.\n{next(sentences)}." for _ in range(60)]
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    path = str(tmp_path / "a.txt")
    data = DataConfig(train_file=path, held_out=1.0, pairs="lead")
    options = {"beside": ("neighbours_retrieval",), "hold": ("halves_retrieval",)}
    evaluation = build(data=data, metric="lead_retrieval", **options)
    assert evaluation.chosen.units == "30 queries that chose nothing"
    others = [*evaluation.also, *evaluation.hold, queries_of_documents(path)]
    assert [metric.judges for metric in others] == [None, None, None]
    monkeypatch.setattr(metrics, "DIVIDED_FROM", 61)
    whole = build(data=data, metric="lead_retrieval")
    assert whole.chosen.units == "60 queries"
    assert whole.text != evaluation.text  # so a run is not resumed with another division


def test_collections_are_divided_by_query(tmp_path):
    lines = [(f"d{n}\ttext {n}", f"q{n}\tquery {n}", f"q{n} 0 d{n} 1") for n in range(60)]
    for file, content in zip(
        ("collection.tsv", "queries.tsv", "qrels.txt"), zip(*lines, strict=True), strict=True
    ):
        (tmp_path / file).write_text("\n".join(content))
    metric = build(metric=f"retrieval:{tmp_path}").chosen
    assert metric.units == "30 queries that chose nothing"
    rng = np.random.default_rng(0)
    texts = [f"{kind} {n}" for kind in ("text", "query") for n in range(60)]
    measured = metric.measure(
        TableEncoder(dict(zip(texts, rng.normal(size=(120, 4)), strict=True)))
    )
    (values,) = map(np.array, measured.outcomes)
    assert measured.scores[metric.name] == pytest.approx(values[metric.choosing].mean())
    assert metric.judged(measured) == pytest.approx(values[metric.judging].mean())


def test_correlations_are_resampled_with_their_ratings(monkeypatch):
    monkeypatch.setattr(metrics, "RESAMPLES", 40)
    rng = np.random.default_rng(2)
    golds = [rng.integers(0, 6, count).astype(float) for count in (30, 20)]
    first, second = (
        [(gold + rng.normal(0, noise, len(gold))).tolist() for gold in golds]
        for noise in (3.0, 1.0)
    )
    draws, differences = np.random.default_rng(0), np.zeros(40)
    for a, b, gold in zip(map(np.array, first), map(np.array, second), golds, strict=True):
        rows = draws.integers(len(gold), size=(40, len(gold)))
        for i in range(40):
            after, before = (
                scipy.stats.spearmanr(x[rows[i]], gold[rows[i]]).statistic for x in (b, a)
            )
            differences[i] += 100 * (after - before) / 2
    assert paired_interval(first, second, golds) == pytest.approx(
        np.percentile(differences, (2.5, 97.5))
    )


def test_a_cached_encoder_computes_each_sentence_once():
    encoder = angles(a=0.0, b=0.9, c=1.0)
    cached = CachedEncoder(encoder)
    first, second = cached.encode(["b", "a", "b"]), cached.encode(["c", "a"])
    assert encoder.asked == ["b", "a", "c"]
    np.testing.assert_array_equal(first, encoder.encode(["b", "a", "b"]))
    np.testing.assert_array_equal(second, encoder.encode(["c", "a"]))


def test_the_drift_check_compares_similarities_or_uses_stsb(monkeypatch, tmp_path):
    monkeypatch.setattr(
        senteval_data, "_hub_folder", lambda: pytest.fail("a drift check downloads nothing")
    )

    def encoder_of(vectors) -> TableEncoder:
        return TableEncoder(dict(zip(general_sentences(), vectors, strict=True)))

    def score(encoder) -> float:
        return check.measure(encoder).scores[check.name]

    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(len(general_sentences()), 8))
    rotation, _ = np.linalg.qr(rng.normal(size=(8, 8)))
    check = dev.build_drift_check(EvalConfig(), lambda: encoder_of(vectors))
    assert check.name == dev.DRIFT_AGREEMENT
    assert score(encoder_of(vectors @ rotation * 3)) == pytest.approx(100, abs=0.01)
    assert score(encoder_of(np.ones_like(vectors))) == 0  # not NaN
    near, far = (
        score(encoder_of(vectors + rng.normal(0, noise, vectors.shape))) for noise in (0.1, 1.0)
    )
    assert 99 > near > far > 20

    write_stsb(tmp_path, "dev", [(5, "a", "b"), (1, "a", "c"), (3, "a", "d")])
    check = dev.build_drift_check(
        EvalConfig(data_dir=str(tmp_path)), lambda: pytest.fail("not needed")
    )
    assert check.name == dev.DRIFT_STSB
    assert score(angles(a=0.0, b=0.1, c=1.0, d=0.5)) == pytest.approx(100)


def test_search_collections_choose_and_are_reported(tmp_path):
    files = {
        "collection.tsv": "d1\ta\nd2\tc\n",
        "queries.tsv": "q1\tb\nq2\td\n",
        "qrels.txt": "q1 0 d1 1\nq2 0 d1 1\n",
    }
    for file, content in files.items():
        (tmp_path / file).write_text(content)
    name = f"retrieval:{tmp_path}"
    evaluation = build(metric=name, beside=("halves_retrieval",))
    encoder = angles(
        a=0, c=80, b=10, d=70, **{word: 0 for sentence in TRAINING for word in halve(sentence)}
    )
    measured = evaluation.measure(encoder)
    assert (
        measured.scores[name]
        == pytest.approx(np.mean(measured.outcomes))
        == pytest.approx(50 + 50 / np.log2(3))
    )
    assert measured.scores[f"{name}_mrr@10"] == pytest.approx(75)
    assert evaluation.chosen.units == "2 queries"


# Search systems

# The letter gives the direction of a text, and the other words are for BM25.
WORDS = ["one", "two", "six", "ten", "cat", "dog", "sun", "sea", "red", "tea"]
TARGETS = [f"{letter} {word} text" for letter, word in zip("adgjmpsvyb", WORDS, strict=True)]


def test_each_half_finds_what_it_can():
    def compared(queries):
        return systems.compare_systems(
            {"letters": letters()}, RetrievalMetric("lead_retrieval", 64, queries, TARGETS)
        )

    bm25, dense, hybrid = compared([f"{text[0]}zz nothing" for text in TARGETS])
    found = [(each.name, each.mode) for each in (bm25, dense, hybrid)]
    assert found == [("BM25", "lexical"), ("letters", "dense"), ("letters + BM25", "hybrid")]
    assert dense.score == hybrid.score == 100
    assert bm25.reciprocal_ranks == pytest.approx(100 / 5.5)  # no word in common, so all texts tie
    bm25, dense, hybrid = compared([f"k {text.split()[1]}" for text in TARGETS])
    assert bm25.score == 100
    assert dense.score < 50 < hybrid.score


def test_systems_are_compared_by_the_queries_that_judge():
    by_letter, by_words = (
        [f"{text[0]}zz nothing" for text in TARGETS],
        [f"k {text.split()[1]}" for text in TARGETS],
    )
    copies = [f"{text} " for text in TARGETS]
    metric = RetrievalMetric("lead_retrieval", 64, by_letter + by_words, TARGETS + copies)
    metric = dataclasses.replace(metric, judges=[True] * 10 + [False] * 10)
    bm25, dense, hybrid = systems.compare_systems({"letters": letters()}, metric)
    assert [len(each.reciprocal_ranks) for each in (bm25, dense, hybrid)] == [10, 10, 10]
    assert dense.score == 100
    assert bm25.reciprocal_ranks == pytest.approx(100 / 5.5)
    assert hybrid.weight > DEFAULT_WEIGHT  # the others, which words alone answer, chose it
    made = dataclasses.replace(metric, document_of=range(20))
    assert systems.compare_systems({"letters": letters()}, made)[-1].weight == DEFAULT_WEIGHT
    assert systems.compare_systems({"letters": letters()}, made, 0.2)[-1].weight == 0.2


def test_copies_of_a_text_are_one_target_for_every_system(capsys):
    """Also in the statistics of BM25. Otherwise five copies of a target would be five that compete."""
    questions = [f"{text[0]} {number} {text.split()[1]}" for text in TARGETS for number in range(5)]
    copies = [
        text.upper() if number % 2 else f"{text} "
        for number, text in enumerate(np.repeat(TARGETS, 5).tolist())
    ]
    metric = RetrievalMetric("pairs_retrieval", 64, questions, copies)
    found = systems.compare_systems({"letters": letters()}, metric)
    assert capsys.readouterr().err.count("BM25: ") == 1  # how it reads the words
    assert [system.score for system in found] == [100, 100, 100]
    assert metric.units == "50 queries of 10 groups with equal texts"
    once = RetrievalMetric("pairs_retrieval", 64, questions[::5], TARGETS)
    assert systems._word_scores(metric)[0][::5, ::5] == pytest.approx(systems._word_scores(once)[0])
    scores = metric.measure(letters()).scores
    assert scores["pairs_retrieval"] == 100
    # both answer
    two = [(f"{text[0]} x", f"{text} {number}") for text in TARGETS for number in (6, 7)]
    two += [("k sun", "a x"), ("y y", "k  SUN")]  # a query that is a target does not find itself
    found = systems.compare_systems(
        {"letters": letters()}, RetrievalMetric("it", 64, *map(list, zip(*two, strict=True)))
    )
    assert found[1].reciprocal_ranks[:20] == pytest.approx(100)
    # 14 texts are nearer, and two are as near
    assert found[1].reciprocal_ranks[20] == pytest.approx(100 / 16)
    each_once = RetrievalMetric("pairs_retrieval", 64, questions, [*TARGETS, *TARGETS[:1] * 40])
    assert scores["uniformity"] == pytest.approx(each_once.measure(letters()).scores["uniformity"])


def test_intervals_draw_pairs_that_share_a_text_together():
    rng = np.random.default_rng(0)
    gains = rng.normal(1, 3, 100)
    queries = [f"q{number}" for number in range(500)]
    targets = [f"t{number // 5}" if number % 2 else f" T{number // 5}" for number in range(500)]
    before, after = np.zeros(500).tolist(), gains.repeat(5).tolist()
    metric = RetrievalMetric("pairs_retrieval", 64, queries, targets)
    low, high = metric.interval([before], [after])
    error = 1.96 * gains.std() / np.sqrt(100)
    assert (low, high) == pytest.approx((gains.mean() - error, gains.mean() + error), abs=0.1)
    one_group = RetrievalMetric("pairs_retrieval", 64, queries, ["t"] * 500)
    low, high = one_group.interval([before], [after])
    assert 0.1 < high - low < error
    assert one_group.units == "500 queries of 1 group with equal texts"


def test_bm25_is_part_of_the_recommendation_unless_it_is_clearly_worse():
    def system(encoder, mode, rank, first=None):
        name = f"{encoder} {mode}"
        return System(name, mode, encoder, 0.3, 100 / np.array([first or rank] + [rank] * 39))

    words, start = system("", "lexical", 2, first=1), system("start", "dense", 2)
    with_words, adapted = system("start", "hybrid", 2), system("adapted", "dense", 2)
    both = system("adapted", "hybrid", 2)
    five = [words, start, with_words, adapted, both]  # no interval is above 0
    assert systems.recommend(five) is with_words
    assert systems.recommend(five, "adapted") is both
    described = systems.describe_difference(words, both)
    assert "is 1.25 higher than that of adapted hybrid, but this may be chance (" in described
    better = system("adapted", "dense", 1)
    clearly = [words, start, with_words, better, both]
    assert systems.recommend(clearly) is systems.recommend(clearly, "adapted") is better
    assert systems.describe_difference(better, both) == (
        "The score of adapted dense is 50.00 higher than that of adapted hybrid (95% interval "
        "+50.00 to +50.00)."
    )
    other = [words, start, system("start", "hybrid", 1), adapted, both]
    assert systems.recommend(other, "adapted") is other[2]  # of two with BM25, the better one
    by_words = [system("", "lexical", 1), *five[1:]]
    assert systems.recommend(by_words, "adapted") is by_words[0]
    left_out = dataclasses.replace(with_words, weight=0.0)
    assert systems.recommend([start, left_out]) is start
    table = [line.partition(")  ")[2] for line in systems.describe([start, left_out, both])]
    weights = ["", "weight of BM25: 0, which leaves BM25 out", "weight of BM25: 0.3"]
    assert table == weights
    low, high = words.interval()
    assert low < words.score < high
    assert start.interval(with_words) == (0, 0)


def test_queries_that_repeat_their_texts_do_not_compare_systems():
    texts = ["One two, three.", "Four five six.", "AI機械学習がPython"]
    queries = ["three one", "four ten", "が 機械"]
    metric = RetrievalMetric(
        "it", 64, queries, texts, range(3), range(3), judges=[True, False, True]
    )
    kept = metric.without_repetitions()
    assert (kept.queries, kept.targets, kept.judges) == (["four ten"], texts[1:2], [False])
    assert (kept.passages, kept.document_of) == ([1], [1])


class Numbers:
    """An encoder that knows the number in a text, and nothing else."""

    pooler, truncate_dim, queries, prompts = "avg", None, None, NO_PROMPTS

    def encode(self, sentences, *, batch_size=64, prompt=None):
        angles = [float(re.search(r"\d+", text)[0]) / 40 for text in sentences]
        return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def test_made_queries_give_words_that_find_as_much_a_higher_weight():
    numbers = range(120)
    targets = [f"t{number} word{number} text" for number in numbers]

    def weight(queries, count=120):
        metric = RetrievalMetric(
            "mixed_retrieval", 64, queries[:count], targets[:count], range(count), range(count)
        )
        return systems.made_weight(systems.words_find_as_much("numbers", Numbers(), metric))

    by_both = [f"q{number} word{number}" for number in numbers]
    by_number = [f"q{number} nothing" for number in numbers]
    assert weight(by_both) == HIGHER_WEIGHT
    assert weight(by_number) == DEFAULT_WEIGHT
    assert weight(by_both, 99) == DEFAULT_WEIGHT  # too few documents
    assert weight(targets) == DEFAULT_WEIGHT  # queries that repeat their texts tell nothing


def test_documents_are_compared_without_labels(tmp_path):
    for number, (letter, word) in enumerate(zip("adgjmpsvyb", WORDS, strict=True)):
        (tmp_path / f"{number}.txt").write_text(f"{letter} {word} " * 20)
    scores = find_task(f"documents:{tmp_path}").run(letters(), tmp_path)
    assert [each["mode"] for each in scores["systems"]] == ["lexical", "dense", "hybrid"]
    assert scores["n"] >= 20
    assert min(scores["mrr"], scores["BM25"], scores[HYBRID]) > 50
