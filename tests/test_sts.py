import os

import numpy as np
import pytest
import scipy.stats

from diffcse_jax import SentenceEncoder
from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import sts
from diffcse_jax.evaluation.sts import SICKR, STSB, YEARS
from diffcse_jax.models.sentence_folder import NO_PROMPTS

STS12, STS13, *_ = YEARS
STSB_ROWS = [
    'main-news\tMSRpar\t2012\t0001\t5.000\ta  "quoted word\tsecond\u00a0one\n',
    "main-news\tMSRpar\t2012\t0002\t0.5\tb\tc\textra column\n",
]


class TableEncoder:
    """Looks embeddings up, and records the sentences that it was asked for."""

    pooler = "avg"
    truncate_dim = None
    prompts = NO_PROMPTS

    def __init__(self, vectors):
        self.vectors = vectors
        self.asked = []

    def encode(self, sentences, batch_size=64, *, prompt=None):
        self.asked += sentences
        return np.array([self.vectors[sentence] for sentence in sentences], np.float32)


def write_stsb(folder, split, rows):
    path = folder / f"STS/STSBenchmark/sts-{split}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(rows), encoding="utf-8")
    return path


def test_stsb_rows_are_read_without_quoting(tmp_path):
    write_stsb(tmp_path, "dev", STSB_ROWS)
    pairs = STSB.load(tmp_path, "dev")
    assert (pairs.first, pairs.second) == (['a "quoted word', "b"], ["second one", "c"])
    assert pairs.gold == [5.0, 0.5]


def test_sick_has_a_header(tmp_path):
    path = tmp_path / "SICK/SICK_trial.txt"
    path.parent.mkdir()
    path.write_text("pair_ID\tsentence_A\tsentence_B\trelatedness_score\tjudgment\n4\tA b\tC d\t3.5\tNEUTRAL\n")
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


def write_year(folder, subsets):
    """Files of STS13 with rows (first, second, gold)."""
    directory = folder / "STS/STS13-en-test"
    directory.mkdir(parents=True)
    for subset, rows in subsets.items():
        sentences, scores = directory / f"STS.input.{subset}.txt", directory / f"STS.gs.{subset}.txt"
        sentences.write_text("".join(f"{first}\t{second}\n" for first, second, _ in rows), encoding="utf-8")
        scores.write_text("".join(f"{gold}\n" for *_, gold in rows))
    return directory


YEAR = {
    "FNWN": [("a", "b", "1.0"), ("a", "c", ""), ("a", "d", "3.5\tx"), ("b", "d", "5")],
    "headlines": [("c", "d", "2"), ("b", "c", "0.5")],
    "OnWN": [("a", "c", "4"), ("e", "b", "4.5"), ("e", "d", "1")],
}


def test_a_year_is_scored_by_subset_and_by_every_aggregation(tmp_path):
    write_year(tmp_path, YEAR)
    rng = np.random.default_rng(0)
    vectors = {name: rng.normal(size=8) for name in "abcde"}
    scores = STS13.run(TableEncoder(vectors), tmp_path)
    systems, golds = {}, {}
    for subset, rows in YEAR.items():
        scored = [(vectors[first], vectors[second], float(gold.split()[0])) for first, second, gold in rows if gold]
        systems[subset] = [u @ v / np.linalg.norm(u) / np.linalg.norm(v) for u, v, _ in scored]
        golds[subset] = [gold for *_, gold in scored]
    expected = {subset: 100 * scipy.stats.spearmanr(systems[subset], golds[subset]).statistic for subset in YEAR}
    assert {name: entry["spearman"] for name, entry in scores["subsets"].items()} == pytest.approx(expected)
    assert [entry["n"] for entry in scores["subsets"].values()] == [3, 2, 3]
    together = scipy.stats.spearmanr(*(np.concatenate([*part.values()]) for part in (systems, golds))).statistic
    aggregations = {name: entry["spearman"] for name, entry in scores["aggregations"].items()}
    fnwn, headlines, onwn = expected.values()
    assert aggregations == pytest.approx(
        {
            "all": 100 * together,
            "mean": (fnwn + headlines + onwn) / 3,
            "wmean": (3 * fnwn + 2 * headlines + 3 * onwn) / 8,
        }
    )
    assert (scores["spearman"], scores["n"]) == (aggregations["all"], 8)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("gs.OnWN", "1\n2\n", r"STS\.input\.OnWN\.txt has 3 lines, but .*STS\.gs\.OnWN\.txt has 2"),
        (
            "gs.headlines",
            "1\n50\n",
            r"STS\.gs\.headlines\.txt with .*, line 2: expected a number from 0 to 5, found '50'",
        ),
        ("gs.headlines", "\n\n", r"STS\.gs\.headlines\.txt with .*: no sentences"),
        *(("input.FNWN", f"a\tb\na\na\td\n{row}\n", rf"/STS\.input\.FNWN\.txt, line 4: expected 2 .*, found {found}")
          for row, found in (("b", 1), ("b\td\te", 3))),
    ],
)  # fmt: skip
def test_invalid_years_are_named(file, content, message, tmp_path):
    (write_year(tmp_path, YEAR) / f"STS.{file}.txt").write_text(content)
    with pytest.raises(DataError, match=message):
        STS13.load(tmp_path, file.partition(".")[2])


@pytest.mark.slow
@pytest.mark.parametrize(("task", "expected"), [(STSB, 82.03), (STS12, 72.37)])
def test_minilm_has_its_published_scores(task, expected, data_dir):
    scores = task.run(SentenceEncoder.from_pretrained("minilm"), data_dir / "senteval")
    assert round(scores["spearman"], 2) == expected
