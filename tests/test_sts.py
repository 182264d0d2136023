import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax import SentenceEncoder
from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.evaluation import expand_groups, missing_files, senteval_folder, sts
from diffcse_jax.evaluation.backends import TorchEncoder

STSB_ROWS = [
    'main-news\tMSRpar\t2012\t0001\t5.000\ta  "quoted word\tsecond\u00a0one\n',
    "main-news\tMSRpar\t2012\t0002\t0.5\tb\tc\textra column\n",
]


class TableEncoder:
    """Looks vectors up and records what it was asked for."""

    pooler = "avg"

    def __init__(self, vectors):
        self.vectors = vectors
        self.asked = []

    def encode(self, sentences, batch_size=64):
        self.asked += sentences
        return np.array([self.vectors[sentence] for sentence in sentences], np.float32)


def write_stsb(folder, split, rows):
    path = folder / f"STS/STSBenchmark/sts-{split}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(rows), encoding="utf-8")
    return path


def test_stsb_rows_are_read_without_quoting(tmp_path):
    write_stsb(tmp_path, "dev", STSB_ROWS)
    pairs = sts.STSBenchmark(tmp_path).load("dev")
    assert pairs.first == ['a "quoted word', "b"]
    assert pairs.second == ["second one", "c"]
    assert pairs.gold.tolist() == [5.0, 0.5]


def test_sick_has_a_header(tmp_path):
    path = tmp_path / "SICK/SICK_trial.txt"
    path.parent.mkdir()
    path.write_text("pair_ID\tsentence_A\tsentence_B\trelatedness_score\tjudgment\n4\tA b\tC d\t3.5\tNEUTRAL\n")
    pairs = sts.SICKRelatedness(tmp_path).load("dev")
    assert (pairs.first, pairs.second, pairs.gold.tolist()) == (["A b"], ["C d"], [3.5])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a\tb\tc\td\t5.0\tonly one\n", "sts-dev.csv, line 3: expected at least 7 tab-separated columns, found 6"),
        ("a\tb\tc\td\tfive\tx\ty\n", "sts-dev.csv, line 3: expected a number as score, found 'five'"),
        ("a\tb\tc\td\tnan\tx\ty\n", "line 3: expected a number"),
        ("\n", "line 3: expected at least 7"),
    ],
)
def test_a_broken_row_is_named(row, message, tmp_path):
    write_stsb(tmp_path, "dev", [*STSB_ROWS, row])
    with pytest.raises(DataError, match=message):
        sts.STSBenchmark(tmp_path).load("dev")


def test_files_that_are_no_text_or_empty_are_refused(tmp_path):
    path = write_stsb(tmp_path, "dev", [])
    with pytest.raises(DataError, match="no sentence pairs"):
        sts.STSBenchmark(tmp_path).load("dev")
    path.write_bytes(b"\xff\xfe\tx")
    with pytest.raises(DataError, match=r"cannot read .*sts-dev\.csv"):
        sts.STSBenchmark(tmp_path).load("dev")


def test_scores_are_correlations_of_cosines(tmp_path):
    angles = {"p": 0.0, "q": 0.1, "r": 1.0, "s": 2.0}
    encoder = TableEncoder({name: [3 * np.cos(angle), 3 * np.sin(angle)] for name, angle in angles.items()})
    # Cosines with p fall q, r, s; one inversion of three ranks: Spearman = 1 - 6 * 2 / (3 * 8) = 0.5.
    rows = [f"-\t-\t-\t-\t{score}\tp\t{name}\n" for name, score in (("q", 4.0), ("r", 5.0), ("s", 1.0))]
    write_stsb(tmp_path, "dev", rows)
    scores = sts.STSBenchmark(tmp_path).run(encoder, "dev")
    cosines = np.cos([0.1, 1.0, 2.0])
    assert scores["spearman"] == pytest.approx(50)
    assert scores["pearson"] == pytest.approx(100 * np.corrcoef(cosines, [4, 5, 1])[0, 1], abs=1e-4)
    assert scores["n"] == 3
    assert scores["dev"]["spearman"] == scores["spearman"]


def test_only_the_splits_of_the_mode_are_encoded(tmp_path):
    encoder = TableEncoder({name: [index, 1] for index, name in enumerate("abcdef")})
    write_stsb(tmp_path, "dev", ["-\t-\t-\t-\t1\ta\tb\n", "-\t-\t-\t-\t2\ta\tc\n"])
    write_stsb(tmp_path, "test", ["-\t-\t-\t-\t2\td\te\n", "-\t-\t-\t-\t1\td\tf\n"])
    task = sts.STSBenchmark(tmp_path)
    task.run(encoder, "dev")
    assert set(encoder.asked) == set("abc")
    scores = task.run(encoder, "test")
    assert set(encoder.asked) == set("abcdef")
    assert scores["n"] == scores["dev"]["n"] == 2
    assert scores["spearman"] == pytest.approx(-scores["dev"]["spearman"])


@given(st.lists(st.tuples(st.floats(-9, 9), st.integers(0, 5)), min_size=3, max_size=30))
def test_spearman_is_pearson_of_ranks(rows):
    system, gold = (np.array(column, float) for column in zip(*rows, strict=True))
    if np.ptp(system) == 0 or np.ptp(gold) == 0:
        assert sts.correlations(system, gold)["spearman"] == 0
        return
    ranks = [
        [((values < value).sum() + (values <= value).sum() + 1) / 2 for value in values] for values in (system, gold)
    ]
    expected = 100 * np.corrcoef(*ranks)[0, 1]
    assert sts.correlations(system, gold)["spearman"] == pytest.approx(expected, abs=1e-6)


def test_a_zero_vector_is_similar_to_nothing():
    u = np.array([[0, 0], [1, 0], [np.nan, 2]], np.float32)
    v = np.array([[1, 2], [1, 1], [0, 5]], np.float32)
    np.testing.assert_allclose(sts.cosine(u, v), [0, 0.5**0.5, 1], rtol=1e-6)


def test_groups_expand_once():
    assert expand_groups(["STSBenchmark", "sts"]) == ["STSBenchmark", "SICKRelatedness"]
    with pytest.raises(ConfigError, match="unknown task 'STSB'; known: sts, STSBenchmark, SICKRelatedness"):
        expand_groups(["STSB"])


def test_the_data_folder_comes_from_the_argument_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("DIFFCSE_DATA_DIR", raising=False)
    with pytest.raises(DataError, match="set DIFFCSE_DATA_DIR"):
        senteval_folder("")
    monkeypatch.setenv("DIFFCSE_DATA_DIR", str(tmp_path))
    with pytest.raises(DataError, match=r"there is no folder .*senteval"):
        senteval_folder("")
    (tmp_path / "senteval").mkdir()
    assert senteval_folder("") == tmp_path / "senteval"
    assert senteval_folder(str(tmp_path)) == tmp_path


def test_missing_files_are_those_of_the_mode(tmp_path):
    dev = write_stsb(tmp_path, "dev", STSB_ROWS)
    assert missing_files("STSBenchmark", tmp_path, "dev") == []
    assert missing_files("STSBenchmark", tmp_path, "test") == [dev.with_name("sts-test.csv")]


# Published for the mean pooler; the others were computed with SentEval's own code.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:minilm was trained for the pooler")
@pytest.mark.parametrize(
    ("pooler", "test", "dev"),
    [("avg", 82.03, 86.72), ("avg_first_last", 82.38, 87.02), ("cls_before_pooler", 73.50, 79.73)],
)
def test_minilm_on_stsb(pooler, test, dev, data_dir):
    scores = sts.STSBenchmark(data_dir / "senteval").run(
        SentenceEncoder.from_pretrained("minilm", pooler=pooler), "test"
    )
    assert round(scores["spearman"], 2) == test
    assert round(scores["dev"]["spearman"], 2) == dev


@pytest.mark.slow
def test_minilm_on_sick_agrees_with_torch(data_dir):
    task = sts.SICKRelatedness(data_dir / "senteval")
    ours = task.run(SentenceEncoder.from_pretrained("minilm"), "dev")
    theirs = task.run(TorchEncoder("minilm"), "dev")
    assert ours["n"] == 500
    assert ours["spearman"] == pytest.approx(theirs["spearman"], abs=0.005)
    assert ours["spearman"] > 70
