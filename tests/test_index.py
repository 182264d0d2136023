"""An index as an object: it is changed, saved and loaded, also while others read and write it."""

import contextlib
import dataclasses
import datetime
import importlib
import inspect
import json
import multiprocessing
import operator
import os
import re
import shutil
import zlib
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.documents.open import open_documents_to_search
from diffcse_jax.errors import CheckpointError, ConfigError, DataError, InUseError
from diffcse_jax.io import json_digest, sha256
from diffcse_jax.models import pooling
from diffcse_jax.models.sentence_folder import NO_PROMPTS
from diffcse_jax.search.folder import MANIFEST, writing
from diffcse_jax.search.index import Index, find_index
from diffcse_jax.search.lexical import LexicalIndex
from diffcse_jax.search.modes import STORAGES
from diffcse_jax.search.reading import read_documents
from diffcse_jax.search.settings import input_of
from diffcse_jax.search.vector_store import EncoderRecord

DIMENSION = 24


class WordEncoder:
    """The embedding of a text is the sum of its words'. It counts what it encodes."""

    name, prompts, languages = "words", NO_PROMPTS, ()

    def __init__(self, weights="0123"):
        self.weights, self.encoded = weights, []

    def encode_document(self, sentences, batch_size=64, normalize=False, prompt=""):
        self.encoded += sentences
        rows = [sum(map(vector_of, text.split()), np.zeros(DIMENSION)) for text in sentences]
        return pooling.normalize(np.array(rows, np.float32).reshape(len(rows), DIMENSION))

    encode_query = encode_document

    def split(self, passages, prompt=""):
        return list(passages)

    def record(self, prompt=""):
        return EncoderRecord(self.name, "avg", "float32", DIMENSION, self.weights, prompt)

    def largely_unknown(self, texts):
        return np.array([text.isupper() for text in texts], bool)


def vector_of(word: str) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(word.lower().encode())).normal(size=DIMENSION)


def found(index: Index, *queries: str, **options) -> list:
    return [
        [(hit.id, hit.text, round(hit.score, 5), hit.rank, hit.columns) for hit in hits]
        for hits in index.search(queries, 50, **options)
    ]


# Changes

WORDS = st.sampled_from(["red fox", "blue bird", "old tree", "red bird", "tall tree of the fox"])
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.dictionaries(st.sampled_from("abcdef"), WORDS, max_size=4)),
        st.tuples(st.just("add"), st.dictionaries(st.sampled_from("abcdef"), WORDS, max_size=3)),
        st.tuples(st.just("remove"), st.sampled_from("abcdef")),
    ),
    max_size=6,
)


def rows_of(texts: dict[str, str]) -> list[dict[str, str]]:
    return [{"id": key, "text": text} for key, text in texts.items()]


@given(
    CHANGES,
    st.sampled_from(["dense", "lexical", "hybrid"]),
    st.sampled_from(["float32", "float16"]),
)
def test_changes_in_any_order_give_the_index_of_the_final_texts(changes, mode, storage):
    index, expected = Index(WordEncoder(), mode=mode, storage=storage), {}
    for kind, content in changes:
        if kind == "remove" and content in expected:
            index.remove(content)
            del expected[content]
        elif kind == "remove":
            with pytest.raises(DataError, match="no document with the id"):
                index.remove(content)
        elif kind == "add" and expected.keys() & content.keys():
            with pytest.raises(DataError, match="already has documents with the id"):
                index.add(rows_of(content))
        else:
            getattr(index, kind)(rows_of(content))
            expected |= content
    anew = Index(WordEncoder(), rows_of(expected), mode=mode, storage=storage)
    assert found(index, "red fox", "tree") == found(anew, "red fox", "tree")


def test_an_input_is_read_again_as_it_was_recorded(tmp_path):
    file = tmp_path / "faq.csv"
    file.write_text("sku,question,answer\na,red fox,blue bird\nb,old tree,tall tree\n")
    index = Index(WordEncoder())
    own = input_of(str(file), "sku", ("question",))

    def documents_of(file):
        opened = open_documents_to_search(str(file), columns=["question"], id_column="sku")
        return read_documents(opened)

    index.put_input(own, documents_of(file))
    assert tuple(index.update(str(file))) == (0, 0, 0, 2)
    with pytest.raises(DataError, match="already has documents with the ids a, b"):
        index.add(str(file))
    (tmp_path / "other.csv").write_text("id,text\na,red\n")
    with pytest.raises(DataError, match="already has documents with the id a"):
        index.add(str(tmp_path / "other.csv"))
    assert index.inputs == (own,)  # a refused one leaves no trace
    # A text that replaces one of the file does not keep the file from being read again.
    assert tuple(index.update([{"id": "a", "text": "another fox"}])) == (0, 1, 0, 0)
    assert tuple(index.put_input(own, documents_of(file))) == (0, 1, 0, 1)
    assert index.inputs == (own,)


def test_the_record_of_a_known_name_does_not_depend_on_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("wiki1m", "docstrings", "-"):
        assert input_of(name).name == name
        assert input_of(f"./{name}").name == str(tmp_path / name)
    assert input_of("texts/*.md").name == f"{tmp_path}/texts/*.md"


def test_only_new_and_changed_texts_are_encoded():
    encoder = WordEncoder()
    index = Index(
        encoder, rows_of({"a": "red fox", "b": "blue bird", "c": "old tree"}), mode="hybrid"
    )
    before = index.documents
    assert tuple(index.update(rows_of({"a": "red fox"}))) == (0, 0, 0, 1)
    assert index.documents is before
    encoder.encoded.clear()
    changes = index.update(rows_of({"b": "blue bird", "c": "tall tree", "d": "grey wolf"}))
    assert str(changes) == "1 document new, 1 changed, 0 removed, 1 unchanged"
    assert encoder.encoded == ["tall tree", "grey wolf"]
    encoder.encoded.clear()
    index.update([{"id": "b", "text": "blue bird", "year": 1999}])  # its other columns have changed
    assert encoder.encoded == []
    assert index.search("blue bird")[0][0].columns == {"year": 1999}
    assert tuple(index.remove(["a", "d"])) == (0, 0, 2, 2)
    assert (len(index), repr(index)) == (2, "Index(2 documents, mode='hybrid', encoder='words')")
    index.add(["a text without an id", "another one"])
    index.add(["one more"])
    assert index.documents["id"].to_pylist() == ["b", "c", "0", "1", "2"]
    index.update(["the first of them", "another one"])  # by their numbers
    assert index.passages["text"].to_pylist()[2:] == [
        "the first of them",
        "another one",
        "one more",
    ]


def test_rows_with_the_same_id_are_one_document():
    rows = [
        {"file": "a.pdf", "start": start, "text": f"page {start} red fox"} for start in range(3)
    ]
    rows.append({"file": "b.pdf", "start": 9, "text": "blue bird"})
    index = Index(WordEncoder(), rows, mode="hybrid")
    (hits,) = index.search("red fox", 4)
    assert [(hit.id, hit.columns["start"]) for hit in hits][-1] == ("3", 9)
    assert sorted(hit.columns["start"] for hit in hits) == [0, 1, 2, 9]
    assert {hit.columns["file"] for hit in hits} == {"a.pdf", "b.pdf"}
    index = Index(WordEncoder(), rows, mode="hybrid", id_column="file")
    (hits,) = index.search("page 1 red fox", 4)
    assert [(hit.id, hit.columns) for hit in hits] == [
        ("a.pdf", {"start": 1}),
        ("b.pdf", {"start": 9}),
    ]
    assert hits[0].ranks == {"dense": 1, "lexical": 1}
    index.update([rows[0]])  # all rows of the id are replaced
    assert len(index.documents) == 2


@pytest.mark.parametrize("mode", ["dense", "lexical"])
def test_an_update_neither_keeps_emptied_texts_nor_replaces_others(mode):
    """Rows without an id never get that of a document; pandas makes ids beside them 3.0."""
    rows = pd.DataFrame({"id": [1, 2, 3], "text": ["red fox", "blue bird", "old tree"]})
    index = Index(WordEncoder(), rows, mode=mode)
    changes = index.update(pd.DataFrame({"id": [3, None], "text": ["tall tree", "red bird"]}))
    assert (changes.new, changes.changed, changes.removed) == (1, 1, 0)
    ids, texts = index.documents["id"].to_pylist(), index.passages["text"].to_pylist()
    found = dict(zip(ids, texts, strict=True))
    assert found.pop("4") == "red bird"
    assert found == {"1": "red fox", "2": "blue bird", "3": "tall tree"}
    with pytest.warns(UserWarning, match="longer than"):
        assert not index.update([{"id": 1, "text": "fox " * 40_000}]).removed
    emptied = [{"id": 1, "text": " "}, {"id": 2, "text": None}, {"id": 3, "text": "\n"}]
    assert index.update(emptied).removed == 3
    assert index.documents["id"].to_pylist() == ["4"]


@pytest.mark.parametrize(
    ("module", "make"),
    [("pandas", "DataFrame"), ("polars", "DataFrame"), ("pyarrow", "Table.from_pylist")],
)
def test_rows_of_tables_keep_ids_and_columns(module, make, tmp_path):
    day = datetime.date(2020, 5, 1)
    rows = [
        {
            "id": 1,
            "title": "Etna",
            "text": "a volcano",
            "line": 7,
            "day": day,
            "score": 0.5,
            "document": "x",
        },
        {
            "id": 2,
            "title": "Po",
            "text": "a river",
            "line": None,
            "day": day,
            "score": 1.5,
            "document": None,
        },
    ]
    table = operator.attrgetter(make)(importlib.import_module(module))(rows)
    index = Index(WordEncoder(), table)
    index.save(tmp_path / "index")
    index = Index.load(tmp_path / "index", WordEncoder())
    (hits,) = index.search("a river", 2)
    assert [(hit.id, hit.title, hit.text, hit.file, hit.line) for hit in hits] == [
        ("2", "Po", "a river", "", None), ("1", "Etna", "a volcano", "", None)
    ]  # fmt: skip
    assert hits[0].columns == {"day": "2020-05-01", "score": 1.5}
    assert hits[1].columns == {"line": 7, "day": "2020-05-01", "score": 0.5, "document": "x"}


def test_columns_keep_the_values_of_json():
    odd = {
        "tags": ["a", {"b": None}],
        "at": float("inf"),
        "name": "caf\udce9",
        7: np.int64(3),
        "none": float("nan"),
    }
    (hit,) = Index(WordEncoder(), [{"text": "red fox", **odd}]).search("red")[0]
    assert hit.columns == {"tags": ["a", {"b": None}], "at": "inf", "name": "caf\\udce9", "7": 3}
    json.dumps(hit._asdict()).encode()


def test_what_an_index_needs_is_said():
    with pytest.raises(
        ConfigError, match=r"mode='dense' needs an encoder. Give one, or use mode='lexical'"
    ):
        Index(texts=["a"])
    with pytest.raises(DataError, match="the index has no document with the ids x, y"):
        Index(WordEncoder(), ["a"]).remove(["x", "y"])
    numbered = Index(WordEncoder(), [{"id": number, "text": "a"} for number in (7, 8, 9)])
    with pytest.raises(DataError, match="the index has no document with the ids 1, 2"):
        numbered.remove([2, 1])
    assert (numbered.remove(8).removed, numbered.remove(np.array([7, 9])).removed) == (1, 2)
    assert Index(WordEncoder()).search("a") == [[]]
    rows = [{"text": "red fox"}, {"text": {"not": "text"}}, {"text": ""}]
    with pytest.warns(
        UserWarning, match=r"left out 2 texts: 1 with a value that is not text .*, 1 empty"
    ):
        Index(WordEncoder(), rows)
    with pytest.raises(DataError, match="line 2: with a value that is not text"):
        Index(WordEncoder(), rows, strict=True)
    assert (
        Index(texts=["red \udce9 fox"], mode="lexical").search("fox")[0][0].text == "red \ufffd fox"
    )


# The folder

TEXTS = {
    key: f"{text} number {key}"
    for key, text in zip("abcde", ["red fox", "blue bird", "old tree"] * 2, strict=False)
}


def saved(folder: Path, storage: str = "float32", texts: dict[str, str] = TEXTS) -> Index:
    index = Index(WordEncoder(), rows_of(texts), mode="hybrid", storage=storage)
    index.save(folder)
    return index


DAMAGED = ["index.json", "documents-*.arrow", "vectors-*.npy", "words-*/vocab.index.json"]


@pytest.mark.parametrize("storage", STORAGES)
def test_only_our_own_files_are_written_read_and_removed(storage, tmp_path):
    folder = tmp_path / "index"
    index = saved(folder, "int8")
    (folder / "notes.txt").write_text("mine")
    (folder / "scale.npy").write_bytes(b"stray")
    (folder / f"vectors-{'0' * 32}.npy").write_bytes(b"left by a save that was killed")
    index = saved(folder, storage, TEXTS | {"f": "grey wolf"})
    names = [path.name for path in folder.iterdir()]
    assert {"notes.txt", "scale.npy", MANIFEST} < set(names)
    # a reader may still open the old ones
    assert len([name for name in names if name.startswith("vectors-")]) == 2
    saved(folder, storage, TEXTS | {"f": "grey wolf"})
    assert len([path for path in folder.iterdir() if path.name.startswith("vectors-")]) == 2
    assert found(Index.load(folder, WordEncoder()), "red fox", "wolf") == found(
        index, "red fox", "wolf"
    )
    for content in ("{}", '{"format": "of another program"}'):
        theirs = tmp_path / f"theirs{len(content)}"
        theirs.mkdir()
        (theirs / MANIFEST).write_text(content)
        with pytest.raises(
            CheckpointError, match=r"not an index of this program: it holds index\.json"
        ):
            saved(theirs)
        with pytest.raises(DataError, match="is not an index"):
            Index.load(theirs)
        assert [path.name for path in theirs.iterdir()] == [MANIFEST]
    (folder / MANIFEST).unlink()
    with pytest.raises(
        CheckpointError, match=r"not an index of this program: it holds (notes|scale)"
    ):
        saved(folder)
    for name in ("notes.txt", "scale.npy"):
        (folder / name).unlink()
    (folder / f"{MANIFEST}.other.7.01234567.tmp").write_text("{")
    saved(folder)  # what a first save has left when it was killed


@pytest.mark.parametrize("name", [".lock", f"{MANIFEST}.tmp", MANIFEST])
@pytest.mark.parametrize("is_link", [True, False])
def test_files_of_the_user_in_a_new_folder_are_refused(name, is_link, tmp_path):
    mine, folder = tmp_path / "mine.txt", tmp_path / "index"
    folder.mkdir()
    path = mine if is_link else folder / name
    path.write_text("mine")
    if is_link:
        (folder / name).symlink_to(mine)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}.*(Rename or remove|Choose)"):
        saved(folder)
    assert path.read_text() == "mine"
    assert [each.name for each in folder.iterdir()] == [name]


def test_files_of_the_user_beside_an_index_stay(tmp_path):
    folder, other = tmp_path / "index", tmp_path / "other"
    saved(other)
    manifest = (other / MANIFEST).read_bytes()
    saved(folder)
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).symlink_to(other / MANIFEST)  # of an index, too
    (folder / f"{MANIFEST}.tmp").symlink_to(tmp_path / "nothing")
    saved(folder)
    assert (other / MANIFEST).read_bytes() == manifest
    assert not (tmp_path / "nothing").exists()
    assert found(Index.load(folder, WordEncoder()), "red fox")


@pytest.mark.parametrize("name", ["", *DAMAGED])
def test_an_index_that_may_not_be_read_is_refused(name, tmp_path, monkeypatch):
    saved(tmp_path)
    path = own_file(tmp_path, name)
    monkeypatch.setattr(os, "access", lambda other, mode: Path(other) != path)
    if not name:  # the folder, in which nothing can be looked up
        refusing = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
        monkeypatch.setattr(Path, "is_file", refusing)
    expected = rf"cannot read {re.escape(str(path))}: permission denied\. Change its permissions"
    with pytest.raises(CheckpointError, match=expected):
        Index.load(tmp_path)


def reseal(folder: Path, **changed) -> None:
    """Write the manifest anew, with checksums that fit."""
    content = json.loads((folder / MANIFEST).read_text()) | changed
    content["files"] = {name: sha256([folder / name]) for name in content["files"]}
    content.pop("sha256")
    (folder / MANIFEST).write_text(json.dumps(content | {"sha256": json_digest(content)}))


def own_file(folder: Path, name: str) -> Path:
    number = json.loads((folder / MANIFEST).read_text())["number"]
    return folder / name.replace("*", number)


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_index_is_refused(name, tmp_path):
    saved(tmp_path)
    for byte in (5, -1):
        copied = tmp_path / f"copy{byte}"
        shutil.copytree(tmp_path, copied, ignore=shutil.ignore_patterns("copy*"))
        file = own_file(copied, name)
        content = bytearray(file.read_bytes())
        content[byte] ^= 0x40
        file.write_bytes(content)
        with pytest.raises(
            CheckpointError, match=rf"{file.name}.* (is|differs).*\. Build the index again"
        ):
            Index.load(copied)
        file.unlink()
        with pytest.raises(
            (CheckpointError, DataError), match=rf"{file.name}.*no such file|is not an index"
        ):
            Index.load(copied)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("vectors-*.npy", lambda array: array[:-1], r"has float32 \(4, 24\), not float32 \(5, 24\)"),
        ("vectors-*.npy", lambda array: array[:, :-1], r"not float32 \(5, 24\)"),
        ("vectors-*.npy", lambda array: array.astype(np.float64), r"has float64 \(5, 24\), not float32"),
        ("vectors-*.npy", lambda array: array * np.nan, "contains NaN or infinite"),
        ("vectors-*.npy", lambda array: array.astype(object), "cannot be read|another kind"),
        ("words-*/data.csc.index.npy", lambda array: array * np.inf, "contains NaN or infinite"),
        ("words-*/indptr.csc.index.npy", lambda array: array[:0], "words-.* cannot be read"),
        ("words-*/indices.csc.index.npy", lambda array: array + 5, "words-.* cannot be read"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_are_refused_although_their_checksums_do(
    name, change, message, tmp_path
):
    saved(tmp_path)
    file = own_file(tmp_path, name)
    np.save(file, change(np.load(file)), allow_pickle=True)
    reseal(tmp_path)
    with pytest.raises(CheckpointError, match=rf"{message}.*\. Build the index again"):
        Index.load(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        {"settings": {}}, {"settings": 3}, {"encoder": None}, {"encoder": {"model": "x"}}, {"documents": 4},
        {"passages": "5"}, {"inputs": [{}]}, {"typical": [1]}, {"typical": [float("nan"), 1]}, {"measured": None},
        {"format": "diffcse_jax index 99"}, {"number": None}, {"language": 5}, {"number": "0" * 32},
    ],
)  # fmt: skip
def test_manifests_that_do_not_fit_are_refused_although_their_checksum_does(changed, tmp_path):
    saved(tmp_path)
    reseal(tmp_path, **changed)
    with pytest.raises(CheckpointError, match=rf"{MANIFEST}.*\. Build the index again"):
        Index.load(tmp_path)


def test_the_last_words_of_an_index_may_be_removed(tmp_path):
    texts = [{"id": "a", "text": "red fox"}, {"id": "b", "text": "\U0001f44d"}]
    for mode, encoder in (("lexical", None), ("hybrid", WordEncoder())):
        index = Index(encoder, texts, mode=mode)
        assert index.remove("a").removed == 1
        index.save(tmp_path / mode)
        again = Index.load(tmp_path / mode, encoder)
        assert again.search("fox", mode="lexical") == [[]]
        assert again.add([{"id": "c", "text": "old fox"}]).new == 1
        assert again.search("fox", mode="lexical")[0][0].id == "c"


@pytest.mark.parametrize(
    "rows",
    [
        [{"id": 1, "text": "red fox"}, {"id": "1", "text": "blue bird"}],
        [{"id": " a", "text": "red fox"}, {"id": "a", "text": "blue bird"}],
    ],
)
def test_different_ids_do_not_become_one_document(rows):
    with pytest.raises(DataError, match="would be one document"):
        Index(None, rows, mode="lexical")


def test_columns_by_themselves_and_names_in_capitals_are_read():
    pandas, datasets = map(pytest.importorskip, ("pandas", "datasets"))
    data = datasets.Dataset.from_dict({"id": [7, 8], "text": ["red fox", "blue bird"]})
    for column in (pandas.Series(["red fox", "blue bird"]), data["text"]):
        assert len(Index(None, column, mode="lexical")) == 2
    for rows in (data.with_format("jax"), [{"ID": 7, "Title": "Fox", "Text": "red"}]):
        assert Index(None, rows, mode="lexical").search("red")[0][0].id == "7"
    repeated = pandas.DataFrame([["river", "cat"]], columns=["text", "text"])
    with pytest.raises(DataError, match="two columns are called 'text'"):
        Index(None, repeated, mode="lexical")
    with pytest.raises(DataError, match="a set has another order"):
        Index(None, {"river", "cat"}, mode="lexical")


def test_texts_of_symbols_are_kept_and_do_not_empty_a_document():
    symbols = ["\U0001f44d" * 3, "???", "C'est ???", "-"]
    rows = [{"id": key, "text": text} for key, text in zip("abcd", symbols, strict=True)]
    rows.append({"id": "e", "title": "Five stars", "text": "\U0001f44d"})
    index = Index(WordEncoder(), rows, strict=True)
    assert index.passages["text"].to_pylist() == [*symbols, "\U0001f44d"]
    assert len(Index(WordEncoder(), symbols, strict=True)) == len(symbols)
    changes = index.update([{"id": "c", "text": "\u2764"}, {"id": "d", "text": " "}], strict=True)
    assert (changes.changed, changes.removed) == (1, 1)
    assert (
        dict(
            zip(index.documents["id"].to_pylist(), index.passages["text"].to_pylist(), strict=True)
        )["c"]
        == "\u2764"
    )


POLISH = ["Drukarki nie działają.", "Nowa drukarka stoi w biurze.", "Urlop trzeba zgłosić szefowi."]


def test_the_language_of_words_is_said_and_recorded(tmp_path, capsys):
    index = Index(texts=POLISH, mode="lexical", show_progress=True)
    assert "BM25: polish stems (languages of the texts: Polish " in capsys.readouterr().err
    index.save(tmp_path)
    assert json.loads((tmp_path / MANIFEST).read_text())["language"] == "polish"
    assert [hit.id for hit in Index.load(tmp_path).search("drukarkę")[0]] == ["0", "1"]
    named = Index(texts=POLISH, mode="lexical", language="none", show_progress=True)
    assert "BM25" not in capsys.readouterr().err
    assert not named.search("drukarkę")[0]


GERMAN = ["Die Katze liegt auf dem Dach und schläft.", "Der Drucker druckt heute nicht mehr."] * 4
ENGLISH = ["The cat is asleep on the roof of the house.", "The printer is out of paper."] * 12


@pytest.mark.parametrize(
    ("languages", "texts", "warns"),
    [
        (("en",), [*GERMAN, *ENGLISH], True),
        (("en-US",), GERMAN * 3, True),
        (("en",), ENGLISH, False),
        (("de", "en"), [*GERMAN, *ENGLISH], False),
        (("multilingual",), [*GERMAN, *ENGLISH], False),
        ((), [*GERMAN, *ENGLISH], False),
        (("en",), ["Drucker", "Haus", "The cat"], False),
    ],
)
def test_texts_in_languages_that_the_encoder_is_not_for_are_said(languages, texts, warns):
    encoder = WordEncoder()
    encoder.languages = languages
    message = r"the text is \d+% German, but by its card words is a model for English.*multilingual"
    with pytest.warns(UserWarning, match=message) if warns else contextlib.nullcontext():
        Index(encoder, texts)


def test_words_that_an_older_version_counted_are_counted_again(tmp_path):
    index = Index(texts=["the café", "a bar"], mode="lexical", language="english")
    older = LexicalIndex.build(["caf\u00e9x", "bar"], "english")
    index._contents = dataclasses.replace(index._contents, lexical=older)
    index.save(tmp_path)
    assert not Index.load(tmp_path).search("cafe")[0]
    reseal(tmp_path, words=1)
    (hits,) = Index.load(tmp_path).search("the cafe")
    assert [hit.id for hit in hits] == ["0"]
    assert hits.note == "Ignored as common words: the."


def test_a_reader_keeps_its_index_and_an_interrupted_save_leaves_the_old_one(tmp_path, monkeypatch):
    old = saved(tmp_path)
    reader = Index.load(tmp_path, WordEncoder())
    expected = found(old, "red fox")

    def refuse(*_) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(np, "save", refuse)
        with pytest.raises(CheckpointError, match="earlier index there is unchanged"):
            saved(tmp_path, texts={"z": "other"})
    assert found(Index.load(tmp_path, WordEncoder()), "red fox") == expected
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("documents-")]) == 1
    for number in range(3):
        saved(tmp_path, texts={"z": f"other {number}"})
    assert found(reader, "red fox") == expected  # the removed files stay mapped
    with writing(tmp_path, wait=False), pytest.raises(InUseError, match="is in use by process"):
        writing(tmp_path, wait=False).__enter__()


def test_settings_of_other_types_are_stored_or_refused(tmp_path):
    """A fault: what was saved could not be loaded, or not saved after all texts were encoded."""
    texts = ["a cat sleeps", "dogs run"]
    given = {"language": None, "id_column": None, "passages": 0, "weight": np.float32(0.25)}
    index = Index.__new__(Index)
    build = inspect.unwrap(Index.__init__)  # without the tests' own check of types
    build(index, None, texts, mode="lexical", **given)
    index.save(tmp_path / "index")
    settings = Index.load(tmp_path / "index").settings
    assert (settings.language, settings.id_column, settings.passages) == ("", "", False)
    assert settings.weight == 0.25


@pytest.mark.parametrize("encoder", ["minilm", Path("minilm"), ["a text"]])
def test_what_cannot_encode_is_refused(encoder, tmp_path):
    Index(WordEncoder(), ["a cat"]).save(tmp_path / "index")
    message = "expected a SentenceEncoder|load it with SentenceEncoder"
    with pytest.raises(ConfigError, match=message):
        inspect.unwrap(Index.__init__)(Index.__new__(Index), encoder)
    with pytest.raises(ConfigError, match=message):
        inspect.unwrap(Index.use)(Index.load(tmp_path / "index"), encoder)


def test_a_folder_whose_first_save_did_not_end_says_so(tmp_path):
    with writing(tmp_path, wait=False):
        pass
    with pytest.raises(CheckpointError, match=r"is not an index yet.* Run it again"):
        find_index(tmp_path)


def test_another_encoder_is_refused(tmp_path):
    saved(tmp_path)
    with pytest.raises(ConfigError, match="holds embeddings of words"):
        Index.load(tmp_path, WordEncoder("4567"))
    index = Index.load(tmp_path)
    assert [hit.id for hit in index.search("blue", mode="lexical")[0]] == ["b", "e"]
    with pytest.raises(ConfigError, match="it was given no encoder"):
        index.search("blue")


SAVES = int(os.environ.get("DIFFCSE_TEST_SAVES", "40"))  # of each writer


def write_again_and_again(folder: str, seed: int, saves: int) -> None:
    indexes = [
        Index(texts=[f"word{seed} {key}{number}" for number in range(20)], mode="lexical")
        for key in "ab"
    ]
    for number in range(saves):
        indexes[number % 2].save(folder)


def test_a_reader_beside_two_writers_gets_one_index_or_another(tmp_path):
    write_again_and_again(str(tmp_path), 0, 1)
    context = multiprocessing.get_context("spawn")
    writers = [
        context.Process(target=write_again_and_again, args=(str(tmp_path), seed, SAVES))
        for seed in (1, 2)
    ]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        index = Index.load(tmp_path)
        texts = index.passages["text"].to_pylist()
        assert len({(text.split()[0], text.split()[1][0]) for text in texts}) == 1
        # its words are those of its texts
        assert index.search(texts[-1].split()[1])[0][0].text == texts[-1]
        seen.add(texts[0])
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert len(seen) > 1
