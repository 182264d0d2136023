"""Token stores: their content, when they are made again, damage, and several processes."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import write_bpe_tokenizer
from tiny_run import full_disk

from diffcse_jax.config import DataConfig
from diffcse_jax.data import token_store
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.data.token_store import Corpus, TokenStore, build_or_open
from diffcse_jax.documents.files.formats import Unreadable
from diffcse_jax.documents.files.pool import parse_files
from diffcse_jax.errors import DataError, DiskError
from diffcse_jax.models.tokenizer import cutting_tokenizer, load_tokenizer, tokenise
from diffcse_jax.training.tokens import length_of, open_tokens, warn_of_languages

CLS, SEP, FIRST_WORD = 1, 2, 4


def word_tokenizer(largest_id: int = 10, side: str = "right") -> transformers.BertTokenizer:
    """Return a tokenizer with one token per word; `largest_id` sets how wide ids must be."""
    vocabulary = {
        "[PAD]": 0,
        "[CLS]": CLS,
        "[SEP]": SEP,
        "[UNK]": 3,
        "one": 4,
        "two": 5,
        "three": 6,
        "[MASK]": 7,
    }
    return transformers.BertTokenizer(vocab=vocabulary | {"rare": largest_id}, truncation_side=side)


def corpus_of(path: Path, rows: list[tuple[str, ...]], **options) -> Corpus:
    columns = ("sentence", "positive", "hard_negative")[: len(rows[0])]
    path.write_text(
        "".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows)
    )
    return open_corpus(DataConfig(train_file=str(path), **options))


texts = st.lists(st.sampled_from(["one", "two ", " ", "x" * 40, "x" * 3000]), max_size=40).map(
    " ".join
)


@given(
    texts=st.lists(texts, max_size=4),
    max_length=st.integers(3, 20),
    side=st.sampled_from(["left", "right"]),
)
def test_cut_texts_have_the_tokens_of_the_whole(texts, max_length, side):
    backend = cutting_tokenizer(word_tokenizer(side=side), max_length)
    whole = backend.encode_batch(texts)
    tokens = tokenise(backend, texts)
    assert tokens.ids == [encoding.ids for encoding in whole]
    assert tokens.cut == [bool(encoding.overflowing) for encoding in whole]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_long_text_costs_what_its_kept_part_costs(side):
    backend = cutting_tokenizer(word_tokenizer(side=side), 8)
    start = time.process_time()
    found = tokenise(backend, ["one two " * 4_000_000])
    assert time.process_time() - start < 2  # the whole text needs more than ten seconds
    assert found == ([[CLS, *(FIRST_WORD, FIRST_WORD + 1) * 3, SEP]], [True], [False])


def test_gathered_tokens_are_those_of_the_pretrained_tokenizer(tmp_path, monkeypatch, minilm_dir):
    monkeypatch.setattr(token_store, "BLOCK_ROWS", 2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_dir)
    rows = [
        ("A short one.", "two"),
        (
            "\xdcberlange W\xf6rter (electroencephalographically), then cut.",
            "\u65e5\u672c \U0001f642",
        ),
    ] * 2
    store = build_or_open(corpus_of(tmp_path / "a.jsonl", rows), tokenizer, 12, tmp_path)
    assert len(store) == 4
    assert isinstance(store.token_ids, np.memmap)
    chosen = np.array([3, 0, 2])
    input_ids, lengths = store.gather(chosen, 14, tokenizer.pad_token_id)
    for column in (0, 1):
        texts = [rows[row][column] for row in chosen]
        options = {"truncation": True, "max_length": 12, "return_tensors": "np"}
        expected = tokenizer(texts, padding="max_length", **options)
        np.testing.assert_array_equal(input_ids[:, column, :12], expected["input_ids"])
        np.testing.assert_array_equal(lengths[:, column], expected["attention_mask"].sum(-1))
    assert np.all(input_ids[..., 12:] == tokenizer.pad_token_id)
    np.testing.assert_array_equal(store.lengths(chosen), lengths)


def test_a_store_keeps_the_end_of_texts_for_a_model_that_reads_the_end(tmp_path):
    corpus = corpus_of(tmp_path / "a.jsonl", [("two one three",)])
    stores = [
        build_or_open(corpus, word_tokenizer(side=side), 4, tmp_path) for side in ("left", "right")
    ]
    assert [store.token_ids.tolist() for store in stores] == [[CLS, 4, 6, SEP], [CLS, 5, 4, SEP]]


@pytest.mark.parametrize(("largest_id", "dtype"), [(2**16 - 1, np.uint16), (2**16, np.uint32)])
def test_ids_are_as_wide_as_the_vocabulary_needs(tmp_path, largest_id, dtype):
    store = build_or_open(
        corpus_of(tmp_path / "b.jsonl", [("rare",)]), word_tokenizer(largest_id), 8, tmp_path
    )
    assert (store.token_ids.dtype, store.token_ids.tolist()) == (dtype, [CLS, largest_id, SEP])


def test_a_second_start_finds_the_store_and_reports_it(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.csv").write_bytes(b"sentence,positive\none two,three\n,six\nfour,five,six\n")
    corpus = open_corpus(DataConfig(train_file=str(tmp_path / "a.csv")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    store = open_tokens(corpus, word_tokenizer(), 8)
    assert store.folder.parent == tmp_path / "xdg/diffcse_jax/tokens"
    assert capsys.readouterr().err.endswith("first row: sentence 'one two', positive 'three'\n")
    monkeypatch.setattr(Corpus, "rows", lambda *_: pytest.fail("the corpus was read again"))
    open_tokens(corpus, word_tokenizer(), 8)
    message = capsys.readouterr().err
    assert "found tokens of " in message
    assert "1 row (sentence, positive), 7 tokens, in " in message
    account = message.partition("\nwarning: left out 2 texts: ")[2]
    assert "1 empty" in account
    assert "1 with a wrong number of fields" in account
    assert "a.csv, line 4" in account


def test_a_text_in_languages_that_the_checkpoint_is_not_for_is_said(tmp_path, minilm_dir, capsys):
    english = [
        (f"The train to the station leaves at {n} o'clock every morning.",) for n in range(30)
    ]
    german = [(f"Der Zug zum Bahnhof fährt jeden Morgen um {n} Uhr dort ab.",) for n in range(15)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_dir)
    for rows, languages, is_warned in [
        (english + german, ("en",), True),
        (english, ("en",), False),
        (english + german, (), False),
    ]:
        store = build_or_open(corpus_of(tmp_path / "a.jsonl", rows), tokenizer, 32, tmp_path / "c")
        warn_of_languages(store, tokenizer, "minilm", languages)
        assert ("% German, but by its card minilm" in capsys.readouterr().err) == is_warned


def test_the_last_space_of_a_prompt_may_belong_to_the_text(tmp_path, minilm_dir):
    write_bpe_tokenizer(
        tmp_path / "bpe", "search query: the garden is open, the query is a search " * 9
    )
    for folder in (tmp_path / "bpe", minilm_dir):
        tokenizer = load_tokenizer(folder)
        for prompt in ("", "search query: ", "query:"):
            text = f"{prompt}the garden"
            whole = tokenizer.convert_ids_to_tokens(tokenizer.encode(text))
            first = whole[1 + length_of(prompt, tokenizer)]  # after [CLS]
            assert first.removeprefix("\u0120") == "the"


def test_each_change_of_the_tokens_makes_another_store(tmp_path):
    long = f"This is a {'very ' * 20}long sentence."
    contents = {
        "a.txt": f"{long}\n{long}\n\n{long}\n", "a.csv": "sentence,positive\none two,three\n", "b/1.txt": "x\no",
        # b, c and d have the same bytes
        "b/2.txt": "ne\n", "c/1.txt": "x\none\n", "d/1.csv": "x\none\n",
        # a file in a folder is one document, and named columns are texts and not lists
        "e/a.txt": f"{long}\n{long}\n\n{long}\n", "lists.jsonl": '{"query": "one", "pos": ["two", "three"]}',
    }  # fmt: skip
    for file, content in contents.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(content)
    ways: list[dict] = [
        *({"train_file": file} for file in ("b", "c", "d", "a.csv")),
        {"train_file": "a.csv", "columns": ("positive",)},
        {"train_file": "a.csv", "columns": ("positive", "sentence")},
        {"train_file": "a.csv", "on_bad_line": "error"},
        *(
            {"train_file": "a.txt", "pairs": pairs}
            for pairs in ("columns", "dropout", "lead", "crops", "passages")
        ),
        {"train_file": "a.txt", "pairs": "dropout", "held_out": 0.01},
        {"train_file": "e", "pairs": "lead"},
        {"train_file": "lists.jsonl"},
        {"train_file": "lists.jsonl", "columns": ("query", "pos")},
    ]

    def name(data: dict, length: int = 8, largest_id: int = 10) -> str:
        corpus = open_corpus(
            DataConfig(**data | {"train_file": f"{tmp_path}/{data['train_file']}"})
        )
        return build_or_open(corpus, word_tokenizer(largest_id), length, tmp_path / "cache").name

    names = {*map(name, ways), name(ways[0], length=9), name(ways[0], largest_id=50)}
    assert len(names) == len(ways) + 2
    # the sentences that `dropout` also uses
    assert name({"train_file": "a.txt", "pairs": "neighbours"}) in names


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("offsets.npy", b"\x07\0", b"\x06\0"),
        ("meta.json", b"}", b""),
        ("meta.json", b'_length": 8', b'_length": 9'),
    ],
)
def test_a_damaged_store_is_named_and_rebuilt(tmp_path, capsys, file, old, new):
    corpus = corpus_of(tmp_path / "a.jsonl", [("one two",), ("three",)])
    folder = build_or_open(corpus, word_tokenizer(), 8, tmp_path / "cache").folder
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content.replace(old, new))
    assert (folder / file).read_bytes() != content
    capsys.readouterr()
    store = build_or_open(corpus, word_tokenizer(), 8, tmp_path / "cache")
    assert f"Building {folder} again" in capsys.readouterr().err
    assert store.token_ids.tolist() == [
        CLS,
        FIRST_WORD,
        FIRST_WORD + 1,
        SEP,
        CLS,
        FIRST_WORD + 2,
        SEP,
    ]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


def test_a_text_that_changes_meanwhile_or_is_bad_leaves_nothing(tmp_path, monkeypatch):
    corpus, write_arrays = corpus_of(tmp_path / "a.jsonl", [("one",)]), token_store._write_arrays

    def changed(*arguments, **options) -> np.dtype:
        corpus_of(tmp_path / "a.jsonl", [("two",)])
        return write_arrays(*arguments, **options)

    monkeypatch.setattr(token_store, "_write_arrays", changed)
    with pytest.raises(DataError, match=r"a\.jsonl changed while it was read\. Start again"):
        build_or_open(corpus, word_tokenizer(), 8, tmp_path / "cache")
    monkeypatch.undo()
    monkeypatch.setattr(token_store, "BLOCK_ROWS", 1)
    corpus = corpus_of(tmp_path / "a.jsonl", [("one",), ("two",), ("",)], on_bad_line="error")
    with pytest.raises(DataError, match="line 3: empty"):
        build_or_open(corpus, word_tokenizer(), 8, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] in (
        [],
        [".lock"],
        [".lock"] * 2,
    )


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_a_file_beyond_a_limit_is_tried_again_and_part_of_the_name(tmp_path, monkeypatch, share):
    for number in range(40):
        (tmp_path / f"{number}.md").write_text(f"# one {number}\n\ntwo {number}. three {number}.\n")

    def store_of() -> TokenStore:
        data = DataConfig(train_file=str(tmp_path), pairs="dropout", held_out=share)
        return build_or_open(open_corpus(data), word_tokenizer(), 8, tmp_path / ".cache")

    def limited(files, *, with_code):
        for file, parsed in zip(files, parse_files(files, with_code=with_code), strict=True):
            is_late = file.stem in ("3", "4")
            yield Unreadable("took longer than 60 seconds", is_limit=True) if is_late else parsed

    monkeypatch.setattr("diffcse_jax.documents.open.parse_files", limited)
    incomplete = store_of()
    assert any("took longer than 60 seconds" in line for line in incomplete.account)
    assert store_of().is_new  # tried again
    monkeypatch.undo()
    complete = store_of()
    assert complete.is_new
    assert complete.name != incomplete.name
    assert not complete.account or "60 seconds" not in str(complete.account)
    assert not store_of().is_new


def test_several_processes_of_a_host_build_a_store_once(tmp_path, monkeypatch):
    """Before, each of them built it. Threads stand for the processes: the lock is one on the file."""
    corpus, cache = corpus_of(tmp_path / "a.jsonl", [("one",), ("two three",)]), tmp_path / "cache"
    write_arrays, built = token_store._write_arrays, []

    def slow(*arguments, **options) -> np.dtype:
        built.append(1)
        time.sleep(0.2)
        return write_arrays(*arguments, **options)

    monkeypatch.setattr(token_store, "_write_arrays", slow)
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda _: build_or_open(corpus, word_tokenizer(), 8, cache), range(3)))
    assert built == [1]
    (folder,) = cache.iterdir()
    assert len(TokenStore(folder)) == 2


def test_a_full_disk_is_one_paragraph_and_costs_nothing(tmp_path):
    corpus = corpus_of(tmp_path / "a.jsonl", [("one two three",)] * 9000)
    with full_disk(50_000), pytest.raises(DiskError) as full:
        build_or_open(corpus, word_tokenizer(), 8, tmp_path / "cache")
    assert str(full.value).startswith(f"cannot write {tmp_path}/cache/")
    assert "make room on that disk, or set data.cache_dir to another folder; then try again" in str(
        full.value
    )
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert len(build_or_open(corpus, word_tokenizer(), 8, tmp_path / "cache")) == 9000


def test_a_store_gets_its_name_when_its_content_is_on_disk(tmp_path, monkeypatch):
    synced, rename = [], Path.rename
    monkeypatch.setattr("diffcse_jax.io.sync", lambda path: synced.append(path.name))

    def renamed(path: Path, target: Path) -> Path:
        assert {"meta.json", "offsets.npy", "rows.npy", "token_ids", path.name} == set(synced)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    build_or_open(
        corpus_of(tmp_path / "a.jsonl", [("one",)]), word_tokenizer(), 8, tmp_path / "cache"
    )
