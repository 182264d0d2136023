"""ArrayRecord data sets: what is prepared is read, and other data sets are read by their columns of text."""

from pathlib import Path

import pytest
import tensorflow_datasets as tfds
from hypothesis import given, settings
from hypothesis import strategies as st

from diffcse_jax.config import DataConfig
from diffcse_jax.data import array_record
from diffcse_jax.data.readers import Corpus
from diffcse_jax.data.sources import open_corpus, open_text
from diffcse_jax.errors import DataError, UserError


def corpus_of(rows: list[tuple[str, ...]]) -> Corpus:
    return Corpus("rows", tuple("abcde"[: len(rows[0])]), lambda: enumerate(rows, 1), lambda: "")


def opened(folder: Path, **options) -> Corpus:
    return open_corpus(DataConfig(train_file=str(folder), **options))


sentences = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).map(str.strip).filter(bool)


@settings(max_examples=6)
@given(data=st.data())
def test_prepared_rows_are_read_in_order(tmp_path_factory, data):
    columns = data.draw(st.integers(1, 5))
    rows = data.draw(st.lists(st.tuples(*[sentences] * columns), min_size=1, max_size=8))
    folder = tmp_path_factory.mktemp("prepared")
    array_record.prepare(corpus_of(rows), folder)
    corpus = opened(folder)
    assert list(corpus) == rows
    assert corpus.columns == ("sentence", "positive", "hard_negative", "hard_negative_2", "hard_negative_3")[:columns]


def test_shards_columns_and_fingerprints(tmp_path, monkeypatch):
    monkeypatch.setattr(array_record, "BLOCK_RECORDS", 3)
    (tmp_path / "pairs.csv").write_text(
        "id,x,y\n" + "".join(f"{i},one {i},two {i}\n" for i in range(20)) + "3,three,\n"
    )
    corpus = open_text(tmp_path / "pairs.csv", columns=("y", "x"))
    folder = array_record.prepare(corpus, tmp_path / "out", shards=3)
    assert corpus.skipped_summary() == "skipped 1 line: 1 empty"
    assert len(list(folder.glob("*.array_record-*"))) == 3
    rows = [(f"two {i}", f"one {i}") for i in range(20)]
    assert list(opened(folder)) == list(opened(tmp_path / "out")) == rows
    assert list(opened(folder, columns=("positive",))) == [row[1:] for row in rows]
    with pytest.raises(DataError, match=r"no column 'text'.*It has: sentence, positive"):
        opened(folder, columns=("text",))
    with pytest.raises(DataError, match="already contains a data set"):
        array_record.prepare(corpus, tmp_path / "out")
    array_record.prepare(corpus_of([("three", "four")]), tmp_path / "other")
    assert opened(folder).fingerprint() == opened(folder).fingerprint() != opened(tmp_path / "other").fingerprint()


class Reviews(tfds.core.GeneratorBasedBuilder):
    """A data set of another builder: two texts, one of them not UTF-8, and a label."""

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


def test_other_data_sets_are_read_by_their_columns_of_text(tmp_path):
    Reviews(data_dir=str(tmp_path), file_format="array_record").download_and_prepare()
    corpus = opened(tmp_path, columns=("title", "body"))
    assert list(corpus) == [("good", "short")]
    assert corpus.skipped_summary() == "skipped 1 line: 1 not UTF-8"
    with pytest.raises(DataError, match=r"name one or more of its 2 columns in data\.columns: body, title"):
        opened(tmp_path)


def test_folders_that_cannot_be_read_are_refused(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="rows cannot fill 3 shards"):
        array_record.prepare(corpus_of([("one",), ("two",)]), tmp_path, shards=3)
    with pytest.raises(DataError, match="rows: no usable line"):
        array_record.prepare(corpus_of([("",)]), tmp_path)
    with pytest.raises(DataError, match="or a prepared ArrayRecord data set"):
        opened(tmp_path)
    folder = array_record.prepare(corpus_of([("one",)]), tmp_path / "a")
    array_record.prepare(corpus_of([("two",)]), tmp_path / "b")
    with pytest.raises(DataError, match="2 data sets"):
        opened(tmp_path)
    (shard,) = folder.glob("*.array_record-*")
    content = shard.read_bytes()
    shard.write_bytes(content[:100] + b"\xff" * 50 + content[150:])
    with pytest.raises(DataError, match=r"damaged|cannot read"):
        list(opened(tmp_path / "a"))
    shard.unlink()
    with pytest.raises(DataError, match="1 of 1 shards are missing, first sentence_corpus-train"):
        opened(tmp_path / "a")
    monkeypatch.setitem(__import__("sys").modules, "tensorflow_datasets", None)
    with pytest.raises(UserError, match="Install the extra 'tfds'"):
        opened(tmp_path / "b")
