"""Token stores: their content, when they are rebuilt, damage, and several processes."""

import json
import os
import resource
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diffcse_jax import io as files
from diffcse_jax.config import DataConfig
from diffcse_jax.data import token_store
from diffcse_jax.data.readers import Corpus
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.data.token_store import TokenStore, build_or_open
from diffcse_jax.data.tokenizer import tokenise, unlimited_tokenizer
from diffcse_jax.errors import DataError, DiskError

WORDS = ("one", "two", "three", "four", "five", "six")
CLS, SEP, UNK, FIRST_WORD = 1, 2, 3, 4


def word_tokenizer(largest_id: int = FIRST_WORD + len(WORDS)) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word; `largest_id` sets how wide ids must be."""
    vocabulary = {"[PAD]": 0, "[CLS]": CLS, "[SEP]": SEP, "[UNK]": UNK, "rare": largest_id}
    vocabulary |= {word: FIRST_WORD + index for index, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")


def corpus_of(path: Path, rows: list[tuple[str, ...]], **options) -> Corpus:
    columns = ("sentence", "positive", "hard_negative")[: len(rows[0])]
    path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows))
    return open_corpus(DataConfig(train_file=str(path), **options))


def ids_of(sentence: str, max_length: int) -> list[int]:
    """Return the word tokenizer's ids, computed by hand."""
    words = sentence.split()[: max_length - 2]
    return [CLS, *(FIRST_WORD + WORDS.index(word) if word in WORDS else UNK for word in words), SEP]


sentences = st.lists(st.sampled_from((*WORDS, "other")), min_size=1, max_size=9).map(" ".join)
texts = st.lists(st.sampled_from(["one", "two ", " ", "x" * 40, "x" * 3000]), max_size=40).map(" ".join)


@given(texts=st.lists(texts, max_size=4), max_length=st.integers(3, 20))
def test_cut_texts_have_the_tokens_of_the_whole(texts, max_length):
    backend = unlimited_tokenizer(word_tokenizer())
    backend.enable_truncation(max_length)
    whole = backend.encode_batch(texts)
    found = tokenise(backend, texts)
    assert found.ids == [encoding.ids for encoding in whole]
    assert found.cut == [bool(encoding.overflowing) for encoding in whole]


def test_a_long_text_costs_what_its_beginning_costs():
    backend = unlimited_tokenizer(word_tokenizer())
    backend.enable_truncation(8)
    start = time.process_time()
    found = tokenise(backend, ["one two " * 4_000_000, "x" * 30_000_000])
    assert time.process_time() - start < 2  # the whole texts need more than ten seconds
    assert found.ids == [[CLS, *(FIRST_WORD, FIRST_WORD + 1) * 3, SEP], [CLS, UNK, SEP]]
    assert found.cut == [True, True]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_gathered_rows_are_the_padded_token_ids(tmp_path, monkeypatch, data):
    monkeypatch.setattr(token_store, "BLOCK_ROWS", 3)
    monkeypatch.setattr(token_store, "BLOCK_CHARACTERS", 20)
    columns, max_length = data.draw(st.integers(1, 3)), data.draw(st.integers(3, 11))
    rows = data.draw(st.lists(st.tuples(*[sentences] * columns), min_size=1, max_size=10))
    store = build_or_open(corpus_of(tmp_path / "a.jsonl", rows), word_tokenizer(), max_length, tmp_path / "cache")
    assert len(store) == len(rows)
    assert isinstance(store.token_ids, np.memmap)
    assert isinstance(store.offsets, np.memmap)
    expected = [[ids_of(sentence, max_length) for sentence in row] for row in rows]
    assert len(store.token_ids) == sum(len(ids) for row in expected for ids in row)
    chosen = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=5)))
    input_ids, lengths = store.gather(chosen, width=12, pad_token_id=99)
    assert input_ids.dtype == np.int32
    assert input_ids.tolist() == [[ids + [99] * (12 - len(ids)) for ids in expected[row]] for row in chosen]
    assert lengths.tolist() == [[len(ids) for ids in expected[row]] for row in chosen]
    np.testing.assert_array_equal(store.lengths(chosen), lengths)


def test_tokens_are_those_of_the_pretrained_tokenizer(tmp_path, minilm_dir):
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_dir)
    rows = ["A short one.", "Überlange Wörter are split (electroencephalographically), then cut.", "日本 🙂"]
    store = build_or_open(corpus_of(tmp_path / "a.jsonl", [(text,) for text in rows]), tokenizer, 16, tmp_path)
    expected = tokenizer(rows, truncation=True, max_length=16, padding="max_length", return_tensors="np")
    input_ids, lengths = store.gather(np.arange(3), 16, tokenizer.pad_token_id)
    np.testing.assert_array_equal(input_ids[:, 0], expected["input_ids"])
    np.testing.assert_array_equal(lengths[:, 0], expected["attention_mask"].sum(-1))


def test_settings_of_the_tokenizer_are_ignored_and_kept(tmp_path):
    corpus, tokenizer = corpus_of(tmp_path / "a.jsonl", [("one two three four five",)]), word_tokenizer()
    plain = build_or_open(corpus, tokenizer, 6, tmp_path / "cache")
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    before = tokenizer.backend_tokenizer.to_str()
    assert build_or_open(corpus, tokenizer, 6, tmp_path / "cache").folder == plain.folder
    assert tokenizer.backend_tokenizer.to_str() == before


@pytest.mark.parametrize(("largest_id", "dtype"), [(2**16 - 1, np.uint16), (2**16, np.uint32)])
def test_ids_are_as_wide_as_the_vocabulary_needs(tmp_path, largest_id, dtype):
    store = build_or_open(corpus_of(tmp_path / "a.jsonl", [("rare",)]), word_tokenizer(largest_id), 8, tmp_path)
    assert store.token_ids.dtype == dtype
    assert store.token_ids.tolist() == [CLS, largest_id, SEP]


def test_a_second_start_finds_the_store_and_reports_it(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.csv").write_bytes(b"sentence,positive\none two,three\n,six\n\xe9,four\n")
    corpus = open_corpus(DataConfig(train_file=str(tmp_path / "a.csv")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    store = build_or_open(corpus, word_tokenizer(), 8)
    assert store.folder.parent == tmp_path / "xdg/diffcse_jax/tokens"
    message = capsys.readouterr().err
    assert "token store built" in message
    assert "warning: text that is not UTF-8 was skipped. Text must be UTF-8. To convert a file, run: iconv" in message
    assert message.endswith("first row: sentence 'one two', positive 'three'\n")
    monkeypatch.setattr(Corpus, "numbered", lambda self: pytest.fail("the corpus was read again"))
    build_or_open(corpus, word_tokenizer(), 8)
    message = capsys.readouterr().err
    assert "token store found" in message
    assert "1 rows of sentence, positive, 7 tokens (skipped 2 lines: 1 empty, 1 not UTF-8)" in message


def test_each_change_of_the_tokens_makes_another_store(tmp_path):
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    rows = [("one two", "three")]
    build_or_open(corpus_of(path, rows), word_tokenizer(), 8, cache)
    build_or_open(corpus_of(path, rows), word_tokenizer(), 9, cache)
    build_or_open(corpus_of(path, rows), word_tokenizer(largest_id=50), 8, cache)
    build_or_open(corpus_of(path, rows, columns=("positive",)), word_tokenizer(), 8, cache)
    build_or_open(corpus_of(path, rows, columns=("positive", "sentence")), word_tokenizer(), 8, cache)
    build_or_open(corpus_of(path, rows, on_bad_line="error"), word_tokenizer(), 8, cache)
    build_or_open(corpus_of(path, [("one two", "four")]), word_tokenizer(), 8, cache)
    for names, content in [(["a.txt"], "x\none\n"), (["a.csv"], "x\none\n"), (["b1.txt", "b2.txt"], "o\nne\n")]:
        folder = tmp_path / names[0]
        folder.mkdir()
        for index, name in enumerate(names):  # the second folder of txt files has the bytes of the first file
            (folder / name).write_text(content if len(names) == 1 else ["x\no", "ne\n"][index])
        build_or_open(open_corpus(DataConfig(train_file=str(folder))), word_tokenizer(), 8, cache)
    assert len(list(cache.iterdir())) == 10


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=st.lists(st.lists(sentences, min_size=1, max_size=4), min_size=1, max_size=4),
    blank=st.sampled_from(["\n", "\n \n"]),
)
def test_documents_start_after_blank_lines(tmp_path, monkeypatch, documents, blank):
    monkeypatch.setattr(token_store, "BLOCK_ROWS", 3)
    path = tmp_path / "a.txt"
    path.write_text(blank.join("".join(f"{line}\n" for line in lines) for lines in documents))
    with_documents = DataConfig(train_file=str(path), documents="blank_lines")
    store, plain = (
        build_or_open(open_corpus(data), word_tokenizer(), 8, tmp_path / "cache")
        for data in (with_documents, DataConfig(train_file=str(path)))
    )
    starts = np.cumsum([0, *(len(lines) for lines in documents[:-1])])
    np.testing.assert_array_equal(store.document_starts, starts)
    assert plain.document_starts is None
    np.testing.assert_array_equal(store.token_ids, plain.token_ids)


def test_a_skipped_line_ends_a_document(tmp_path, capsys):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\n\xff\nthree\n\nfour\n")
    corpus = open_corpus(DataConfig(train_file=str(path), documents="blank_lines"))
    store = build_or_open(corpus, word_tokenizer(), 8, tmp_path / "cache")
    assert store.document_starts.tolist() == [0, 2, 3]
    assert "4 rows of sentence, 12 tokens (2 documents; skipped 1 line: 1 not UTF-8)" in capsys.readouterr().err


def flip_last_bit(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))


DAMAGE = {
    "cut": lambda folder: os.truncate(folder / "token_ids.npy", (folder / "token_ids.npy").stat().st_size - 1),
    "emptied": lambda folder: os.truncate(folder / "offsets.npy", 0),
    "a bit of an id": lambda folder: flip_last_bit(folder / "token_ids.npy"),
    "a bit of an offset": lambda folder: flip_last_bit(folder / "offsets.npy"),
    "pickled": lambda folder: np.save(folder / "offsets.npy", np.array([{}], object)),
    "a missing file": lambda folder: (folder / "document_starts.npy").unlink(),
    "not JSON": lambda folder: (folder / "meta.json").write_text('{"columns": ["sen'),
    "other JSON": lambda folder: (folder / "meta.json").write_text("[]"),
    "another length": lambda folder: (folder / "meta.json").write_text(
        (folder / "meta.json").read_text().replace('"max_length": 8', '"max_length": 9')
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_store_is_named_and_rebuilt(tmp_path, capsys, damage):
    text = tmp_path / "a.txt"
    text.write_text("one two\n\nthree\n")
    corpus = open_corpus(DataConfig(train_file=str(text), documents="blank_lines"))
    folder = build_or_open(corpus, word_tokenizer(), 8, tmp_path / "cache").folder
    DAMAGE[damage](folder)
    capsys.readouterr()
    store = build_or_open(corpus, word_tokenizer(), 8, tmp_path / "cache")
    assert f"is damaged or missing; making {folder} again" in capsys.readouterr().err
    assert store.token_ids.tolist() == ids_of("one two", 8) + ids_of("three", 8)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]
    build_or_open(corpus, word_tokenizer(), 8, tmp_path / "cache")
    assert "warning" not in capsys.readouterr().err


def test_a_text_that_changes_meanwhile_or_is_bad_leaves_nothing(tmp_path, monkeypatch):
    corpus, write_arrays = corpus_of(tmp_path / "a.jsonl", [("one",)]), token_store._write_arrays

    def changed(*arguments) -> None:
        corpus_of(tmp_path / "a.jsonl", [("two",)])
        write_arrays(*arguments)

    monkeypatch.setattr(token_store, "_write_arrays", changed)
    with pytest.raises(DataError, match=r"a\.jsonl changed while it was read\. Start again"):
        build_or_open(corpus, word_tokenizer(), 8, tmp_path / "cache")
    monkeypatch.setattr(token_store, "_write_arrays", write_arrays)
    monkeypatch.setattr(token_store, "BLOCK_ROWS", 1)
    corpus = corpus_of(tmp_path / "a.jsonl", [("one",), ("two",), ("",)], on_bad_line="error")
    with pytest.raises(DataError, match="line 3: empty"):
        build_or_open(corpus, word_tokenizer(), 8, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] in ([], [".lock"], [".lock"] * 2)


def test_several_processes_of_a_host_build_a_store_once(tmp_path, monkeypatch):
    """Before, each of them built it. Threads stand for the processes: the lock is one on the file."""
    corpus, cache = corpus_of(tmp_path / "a.jsonl", [("one",), ("two three",)]), tmp_path / "cache"
    write_arrays, built = token_store._write_arrays, []

    def slow(*arguments) -> None:
        built.append(1)
        time.sleep(0.2)
        write_arrays(*arguments)

    monkeypatch.setattr(token_store, "_write_arrays", slow)
    threads = [threading.Thread(target=build_or_open, args=(corpus, word_tokenizer(), 8, cache)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]
    (folder,) = cache.iterdir()
    assert TokenStore(folder).token_ids.tolist() == ids_of("one", 8) + ids_of("two three", 8)


def test_a_full_disk_is_one_paragraph_and_costs_nothing(tmp_path):
    """A limit on the size of files stands for the disk."""
    corpus = corpus_of(tmp_path / "a.jsonl", [("one two three",)] * 9000)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, unlimited[1]))
    try:
        with pytest.raises(DiskError) as full:
            build_or_open(corpus, word_tokenizer(), 8, tmp_path / "cache", quiet=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert str(full.value).startswith(f"cannot write {tmp_path}/cache/")
    assert "make room on that disk, or set data.cache_dir to another folder; then run the same" in str(full.value)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert len(build_or_open(corpus, word_tokenizer(), 8, tmp_path / "cache")) == 9000


def test_a_store_gets_its_name_when_its_content_is_on_disk(tmp_path, monkeypatch):
    synced, rename = [], Path.rename
    monkeypatch.setattr("diffcse_jax.io.sync", lambda path: synced.append(path.name))

    def renamed(path: Path, target: Path) -> Path:
        assert {"meta.json", "offsets.npy", "token_ids.npy", path.name} == set(synced)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    build_or_open(corpus_of(tmp_path / "a.jsonl", [("one",)]), word_tokenizer(), 8, tmp_path / "cache")


def test_partial_folders_of_dead_processes_are_removed(tmp_path):
    corpus, cache, host = corpus_of(tmp_path / "a.jsonl", [("one",)]), tmp_path / "cache", files._HOST
    dead = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(dead, 0)
    abandoned = [f"a.{host}.{dead}.01234567.tmp", "old.other.7.01234567.tmp", "d.other.7.11111111.tmp"]
    kept = [f"b.{host}.{os.getpid()}.01234567.tmp", "c.other.7.01234567.tmp", "mine.tmp"]
    for name in (*abandoned, *kept):
        (cache / name).mkdir(parents=True)
        if name in abandoned[1:] or name == "mine.tmp":
            os.utime(cache / name, (0, 0))
    store = build_or_open(corpus, word_tokenizer(), 8, cache)
    assert {path.name for path in cache.iterdir()} == {*kept, store.name}
