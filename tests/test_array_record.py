import sys
from pathlib import Path

import pytest
import tensorflow_datasets as tfds
from hypothesis import given, settings
from hypothesis import strategies as st

from diffcse_jax.data import array_record, array_record_reader
from diffcse_jax.data.corpus import Corpus
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.errors import DataError
from diffcse_jax.groups import DataConfig


def corpus_of(rows: list[tuple[str, ...]]) -> Corpus:
    return Corpus("rows", tuple("abcde"[: len(rows[0])]), lambda: enumerate(rows, 1), lambda: "")


def opened(folder: Path, **options) -> Corpus:
    return open_corpus(DataConfig(train_file=str(folder), **options))


sentences = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).map(str.strip).filter(bool)


@settings(max_examples=6)
@given(data=st.data())
def test_what_is_prepared_is_read_in_order(tmp_path_factory, data):
    columns = data.draw(st.integers(1, 5))
    rows = data.draw(st.lists(st.tuples(*[sentences] * columns), min_size=1, max_size=8))
    folder = tmp_path_factory.mktemp("prepared")
    array_record.prepare(corpus_of(rows), folder)
    corpus = opened(folder)
    assert list(corpus) == rows
    assert corpus.columns == ("sentence", "positive", "hard_negative", "hard_negative_2", "hard_negative_3")[:columns]


def test_shards_are_read_one_after_the_other_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(array_record_reader, "BLOCK_RECORDS", 3)
    rows = [(f"sentence {number}",) for number in range(20)]
    folder = array_record.prepare(corpus_of(rows), tmp_path, shards=3)
    assert len(list(folder.glob("*.array_record-*"))) == 3
    assert list(opened(folder)) == list(opened(tmp_path)) == rows


def test_columns_can_be_chosen(tmp_path):
    array_record.prepare(corpus_of([("one", "two", "three")]), tmp_path)
    assert list(opened(tmp_path, columns=("hard_negative", "sentence"))) == [("three", "one")]
    with pytest.raises(DataError, match=r"no column 'text'.*it has: sentence, positive, hard_negative"):
        opened(tmp_path, columns=("text",))


def test_fingerprint_follows_the_content(tmp_path):
    fingerprints = []
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        array_record.prepare(corpus_of([(text,)]), tmp_path / name)
        fingerprints.append(opened(tmp_path / name).fingerprint())
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


class Reviews(tfds.core.GeneratorBasedBuilder):
    """A data set of another builder: two texts, one of them no valid UTF-8, and a label."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        text = tfds.features.Text()
        features = tfds.features.FeaturesDict(
            {"title": text, "body": text, "label": tfds.features.ClassLabel(num_classes=2)}
        )
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield 0, {"title": b"broken \xff", "body": "long", "label": 1}
        yield 1, {"title": "good", "body": "short", "label": 0}


def test_other_data_sets_are_read_by_their_text_features(tmp_path):
    Reviews(data_dir=str(tmp_path), file_format="array_record").download_and_prepare()
    corpus = opened(tmp_path, columns=("title", "body"))
    assert list(corpus) == [("good", "short")]
    assert corpus.skipped_summary() == "skipped 1 line: 1 not UTF-8"
    with pytest.raises(DataError, match=r"name one or more of its 2 columns in data\.columns: body, title"):
        opened(tmp_path)


def test_folders_that_are_no_such_data_set_are_refused(tmp_path):
    with pytest.raises(DataError, match="no ArrayRecord data set"):
        opened(tmp_path)
    folder = array_record.prepare(corpus_of([("one",)]), tmp_path / "a")
    array_record.prepare(corpus_of([("two",)]), tmp_path / "b")
    with pytest.raises(DataError, match="several data sets"):
        opened(tmp_path)
    next(folder.glob("*.array_record-*")).unlink()
    with pytest.raises(DataError, match="1 of 1 shards are missing, first sentence_corpus-train"):
        opened(tmp_path / "a")


def test_what_cannot_be_prepared_is_reported_and_leaves_nothing(tmp_path):
    with pytest.raises(DataError, match="rows cannot fill 3 shards"):
        array_record.prepare(corpus_of([("one",), ("two",)]), tmp_path, shards=3)
    with pytest.raises(DataError, match="rows: no usable line"):
        array_record.prepare(corpus_of([("",)]), tmp_path)
    with pytest.raises(DataError, match="no ArrayRecord data set"):
        opened(tmp_path)


def run_command(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["array_record", *map(str, arguments)])
    array_record.main()


def test_command_prepares_and_refuses_to_overwrite(tmp_path, monkeypatch, capsys):
    (tmp_path / "pairs.csv").write_text("id,x,y\n1,one,two\n2,three,\n3,four,five\n")
    arguments = ("--input", tmp_path / "pairs.csv", "--output", tmp_path / "out", "--shards", 2, "--columns", "y,x")
    run_command(monkeypatch, *arguments)
    output = capsys.readouterr().out
    assert f"data.train_file={tmp_path / 'out'}" in output
    assert "skipped 1 line: 1 empty" in output
    assert list(opened(tmp_path / "out")) == [("two", "one"), ("five", "four")]
    with pytest.raises(SystemExit, match="2"):
        run_command(monkeypatch, *arguments)
    assert "already holds a data set" in capsys.readouterr().err
