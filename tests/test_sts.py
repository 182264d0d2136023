import os

import numpy as np
import pytest
import scipy.stats

from diffcse_jax import SentenceEncoder
from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import EvaluationSettings, sts
from diffcse_jax.evaluation.retrieval import STSB_RETRIEVAL
from diffcse_jax.evaluation.sts import BINS, GEOMETRY, SICKR, STSB, YEARS
from diffcse_jax.models.sentence_folder import NO_PROMPTS

STS13 = YEARS[1]
STSB_ROWS = [
    'main-news\tMSRpar\t2012\t0001\t5.000\ta  "quoted word\tsecond\u00a0one\n',
    "main-news\tMSRpar\t2012\t0002\t0.5\tb\tc\textra column\n",
]


class TableEncoder:
    """Looks embeddings up in a dict, or computes them, and records the sentences that it was asked for."""

    pooler, truncate_dim, prompts, queries = "avg", None, NO_PROMPTS, None

    def __init__(self, vectors):
        self.vector_of = vectors if callable(vectors) else vectors.__getitem__
        self.asked = []

    def encode(self, sentences, batch_size=64, *, prompt=None):
        self.asked += sentences
        return np.array([self.vector_of(sentence) for sentence in sentences], np.float32)


def write_stsb(folder, split, rows):
    """Write rows as they are, or of a rating and two sentences."""
    lines = [
        row if isinstance(row, str) else "-\t-\t-\t-\t{}\t{}\t{}\n".format(*row) for row in rows
    ]
    path = folder / f"STS/STSBenchmark/sts-{split}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_stsb_rows_are_read_without_quoting(tmp_path):
    write_stsb(tmp_path, "dev", STSB_ROWS)
    pairs = STSB.load(tmp_path, "dev")
    assert (pairs.first, pairs.second) == (['a "quoted word', "b"], ["second one", "c"])
    assert pairs.gold == [5.0, 0.5]


def test_sick_has_a_header(tmp_path):
    path = tmp_path / "SICK/SICK_trial.txt"
    path.parent.mkdir()
    path.write_text(
        "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tjudgment\n4\tA b\tC d\t3.5\tNEUTRAL\n"
    )
    pairs = SICKR.load(tmp_path, "dev")
    assert (pairs.first, pairs.second, pairs.gold) == (["A b"], ["C d"], [3.5])
    path.write_text("4\tA b\tC d\t3.5\tNEUTRAL\n5\tE\tF\t1\tNEUTRAL\n")
    with pytest.raises(DataError, match=r"SICK_trial\.txt, line 1: expected a header, found data"):
        SICKR.load(tmp_path, "dev")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b"a\tb\tc\td\t5.0\tonly one\n", "line 3: expected 7 columns, found 6 in 'a.*only one'"),
        *((b"a\tb\tc\td\t%s\tx\ty\n" % score.encode(), f"line 3: expected a number from 0 to 5, found '{score}'")
          for score in ("nan", "1_0", "-0.1")),
        (b"\xff\xfe\tx", r"cannot read .*sts-dev\.csv"),
    ],
)  # fmt: skip
def test_invalid_rows_are_named(row, message, tmp_path):
    path = write_stsb(tmp_path, "dev", STSB_ROWS)
    path.write_bytes(path.read_bytes() + row)
    with pytest.raises(DataError, match=message):
        STSB.load(tmp_path, "dev")


def test_pipes_and_empty_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pairs.tsv")
    with pytest.raises(DataError, match=r"cannot read .*pairs\.tsv: it is a pipe or a device"):
        sts.read_lines(tmp_path / "pairs.tsv")
    write_stsb(tmp_path, "dev", [])
    with pytest.raises(DataError, match="no sentences"):
        STSB.load(tmp_path, "dev")


def test_zero_vectors_and_constant_similarities_score_0():
    u = np.array([[0, 0], [1, 0], [np.nan, 2]], np.float32)
    v = np.array([[1, 2], [1, 1], [0, 5]], np.float32)
    np.testing.assert_allclose(sts.cosine(u, v), [0, 0.5**0.5, 1], rtol=1e-6)
    assert sts.correlations(np.ones(3), np.arange(3.0)) == {"spearman": 0, "pearson": 0, "n": 3}


YEAR = {
    "FNWN": [("a", "b", "1.0"), ("a", "c", ""), ("a", "d", "3.5\tx"), ("b", "d", "5")],
    "headlines": [("c", "d", "2"), ("b", "c", "0.5")],
    "OnWN": [("a", "c", "4"), ("e", "b", "4.5"), ("e", "d", "1")],
}


def write_year(folder):
    directory = folder / "STS/STS13-en-test"
    directory.mkdir(parents=True)
    for subset, rows in YEAR.items():
        (directory / f"STS.input.{subset}.txt").write_text(
            "".join(f"{first}\t{second}\n" for first, second, _ in rows)
        )
        (directory / f"STS.gs.{subset}.txt").write_text("".join(f"{gold}\n" for *_, gold in rows))
    return directory


def test_a_year_is_scored_by_subset_and_by_every_aggregation(tmp_path):
    write_year(tmp_path)
    rng = np.random.default_rng(0)
    vectors = {name: rng.normal(size=8) for name in "abcde"}
    scores = STS13.run(TableEncoder(vectors), tmp_path)
    systems, golds = {}, {}
    for subset, rows in YEAR.items():
        scored = [
            (vectors[first], vectors[second], float(gold.split()[0]))
            for first, second, gold in rows
            if gold
        ]
        systems[subset] = [u @ v / np.linalg.norm(u) / np.linalg.norm(v) for u, v, _ in scored]
        golds[subset] = [gold for *_, gold in scored]
    expected = {
        subset: 100 * scipy.stats.spearmanr(systems[subset], golds[subset]).statistic
        for subset in YEAR
    }
    assert {name: entry["spearman"] for name, entry in scores["subsets"].items()} == pytest.approx(
        expected
    )
    assert [entry["n"] for entry in scores["subsets"].values()] == [3, 2, 3]
    together = scipy.stats.spearmanr(
        *(np.concatenate([*part.values()]) for part in (systems, golds))
    ).statistic
    aggregations = {name: entry["spearman"] for name, entry in scores["aggregations"].items()}
    fnwn, headlines, onwn = expected.values()
    mean, wmean = (fnwn + headlines + onwn) / 3, (3 * fnwn + 2 * headlines + 3 * onwn) / 8
    assert aggregations == pytest.approx({"all": 100 * together, "mean": mean, "wmean": wmean})
    assert (scores["spearman"], scores["n"]) == (aggregations["all"], 8)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("gs.OnWN", "1\n2\n", r"STS\.input\.OnWN\.txt has 3 lines, but .*STS\.gs\.OnWN\.txt has 2"),
        ("gs.headlines", "1\n50\n", r"gs\.headlines\.txt with .*, line 2: expected a number from 0 to 5, found '50'"),
        ("gs.headlines", "\n\n", r"STS\.gs\.headlines\.txt with .*: no sentences"),
        *(("input.FNWN", f"a\tb\na\na\td\n{row}\n", rf"/STS\.input\.FNWN\.txt, line 4: expected 2 .*, found {found}")
          for row, found in (("b", 1), ("b\td\te", 3))),
    ],
)  # fmt: skip
def test_invalid_years_are_named(file, content, message, tmp_path):
    (write_year(tmp_path) / f"STS.{file}.txt").write_text(content)
    with pytest.raises(DataError, match=message):
        STS13.load(tmp_path, file.partition(".")[2])


@pytest.mark.slow
def test_minilm_has_its_published_score(data_dir, tmp_path):
    path = write_stsb(tmp_path, "dev", STSB_ROWS)  # a short one, to save time
    path.with_name("sts-test.csv").symlink_to(data_dir / "senteval/STS/STSBenchmark/sts-test.csv")
    assert (
        round(STSB.run(SentenceEncoder.from_pretrained("minilm"), tmp_path)["spearman"], 2) == 82.03
    )


# The geometry of STS-B

ROWS = [
    (5.0, "a", "b"),
    (4.2, "c", "d"),
    (5.0, "e", "f"),
    (4.0, "a", "f"),
    (0.0, "b", "e"),
    (0.5, "d", "e"),
]


@pytest.fixture
def vectors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=5).astype(np.float32) for name in "abcdef"}


def test_measures_follow_their_definitions(tmp_path, vectors):
    write_stsb(tmp_path, "test", ROWS)
    results = GEOMETRY.run(TableEncoder(vectors), tmp_path)
    units = {name: vector / np.linalg.norm(vector) for name, vector in vectors.items()}
    positives = [("a", "b"), ("c", "d"), ("e", "f")]  # rated above 4
    alignment = np.mean([np.sum((units[u] - units[v]) ** 2) for u, v in positives])
    kernel = [
        np.exp(-2 * np.sum((units[u] - units[v]) ** 2)) for u in units for v in units if u != v
    ]
    assert results["alignment"] == pytest.approx(alignment, rel=1e-5)
    assert results["uniformity"] == pytest.approx(np.log(np.mean(kernel)), rel=1e-4)
    values = np.linalg.svd(np.stack([*vectors.values()]), compute_uv=False)
    np.testing.assert_allclose(results["singular_values"], values / values[0], rtol=1e-5)
    groups = results["similarity_by_rating"]
    assert [group["n"] for group in groups] == [2, 0, 0, 1, 3]
    assert (groups[3]["mean"], groups[3]["std"]) == pytest.approx((units["a"] @ units["f"], 0))
    assert groups[1]["mean"] is None
    width = BINS[1] - BINS[0]
    assert [sum(group["density"]) * width for group in groups] == pytest.approx([1, 0, 0, 1, 1])


def test_data_without_a_geometry_is_refused(tmp_path, vectors):
    for row in ((4.0, "a", "b"), (5.0, "a", "a")):
        write_stsb(tmp_path, "test", [row])
        with pytest.raises(
            DataError,
            match=r"sts-test\.csv: geometry needs .* rated above 4, and different sentences",
        ):
            GEOMETRY.run(TableEncoder(vectors), tmp_path)


def test_retrieval_ranks_the_other_sentence_among_all_but_the_query(tmp_path, vectors):
    vectors["b"] = vectors["a"] * 3  # found at once
    vectors["f"] = -vectors["e"]  # found last
    write_stsb(tmp_path, "test", ROWS)
    (tmp_path / "queries.txt").write_text("a\n")
    settings = EvaluationSettings(queries_file=tmp_path / "queries.txt", top_k=2)
    results = STSB_RETRIEVAL.run(TableEncoder(vectors), tmp_path, settings)
    assert (results["n"], results["recall@1"], results["recall@5"], results["recall@10"]) == (
        2,
        0,
        50,
        50,
    )
    # "a" stands in the split twice, so its copy is as near as its pair: their mean rank is above 1.
    ((hit, cosine), (other, _)) = results["examples"][0]["hits"]
    assert ({hit, other}, cosine) == ({"a", "b"}, pytest.approx(1))
