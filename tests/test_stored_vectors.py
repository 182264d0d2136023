"""Stored embeddings: each sentence of a batch gets its own, and stores that do not fit are refused."""

import errno
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from diffcse_jax.apps.embed import embed
from diffcse_jax.config import DataConfig
from diffcse_jax.data.batches import BatchSource, Shards
from diffcse_jax.data.sampling import Neighbours
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.data.token_store import TokenStore, build_or_open, open_vectors
from diffcse_jax.data.tokenizer import load_tokenizer
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import DataError, DiskError
from diffcse_jax.search.vector_store import EncoderRecord, VectorStore, find_store

DIMENSION = 6


def vectors_of(sentences: Sequence[str], **options) -> np.ndarray:
    """Return embeddings that are a function of the text."""
    return np.array(
        [np.random.default_rng(zlib.crc32(text.encode())).normal(size=DIMENSION) for text in sentences], np.float32
    )


def write_part(path: Path, sentences: Sequence[str], vectors: np.ndarray) -> None:
    embedding = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    pq.write_table(pa.table({"sentence": sentences, "embedding": embedding}), path)


def stored(folder: Path, *files: Path, dtype: str = "float32") -> VectorStore:
    """The store that the command writes of these files, with vectors of `vectors_of`."""
    record = EncoderRecord("hash", "avg", "float32", DIMENSION, "0123")
    encoder = mock.Mock(spec=SentenceEncoder, encode=vectors_of, record=lambda: record)
    folder.mkdir(exist_ok=True)
    embed([*map(str, files)], folder, lambda: encoder, rows_per_file=7, batch_size=4, dtype=dtype)
    return find_store(str(folder))


@pytest.fixture(scope="module")
def tokenizer(minilm_dir) -> PreTrainedTokenizerFast:
    return load_tokenizer(minilm_dir)


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"number {row % 19} is here\n" + "\n" * (row % 5 == 0) for row in range(24)))
    return path


@pytest.fixture
def tokenised(tmp_path, tokenizer):
    """Return the corpus of a file and its token store."""

    def tokenised(path: Path, **options) -> tuple:
        corpus = open_corpus(DataConfig(train_file=str(path), **options))
        return corpus, build_or_open(corpus, tokenizer, 16, tmp_path / "cache")

    return tokenised


def check(source: BatchSource, tokenizer: PreTrainedTokenizerFast, tolerance: float = 0.0) -> None:
    """Compare the embeddings of each batch with those of the sentences that its tokens spell."""
    for index in range(len(source)):
        views = source[index]
        texts = tokenizer.batch_decode(views.rows.input_ids, skip_special_tokens=True)
        expected = vectors_of(texts).reshape(*views.input_ids.shape[:2], DIMENSION)
        assert views.vectors["store"].dtype == np.float32
        np.testing.assert_allclose(views.vectors["store"], expected, rtol=tolerance)


def source_of(examples: TokenStore | Neighbours, vectors, **options) -> BatchSource:
    options = {"batch_size": 4, "steps": 8, "seed": 3, "pad_token_id": 0, "vectors": {"store": vectors}} | options
    return BatchSource(examples, **options)


def test_sentences_of_all_columns_get_their_vectors_from_any_number_of_files(tmp_path, tokenizer, tokenised):
    rows = [(f"first {row % 11}", f"second {row % 5}", f"first {row % 3}") for row in range(20)]
    table, seconds, others = (tmp_path / name for name in ("table.tsv", "b.txt", "a.txt"))
    table.write_text("\n".join("\t".join(row) for row in [("sent0", "sent1", "hard_neg"), *rows]))
    seconds.write_text("".join(f"second {row}\n" for row in range(9)))
    others.write_text("more text\n" * 30 + "first 7\n")
    store = stored(tmp_path / "store", table, seconds, others, dtype="float16")
    corpus, tokens = tokenised(table)
    vectors = open_vectors(store, corpus, tokens)
    check(source_of(tokens, vectors, shards=Shards(range(1, 2), 2)), tokenizer, tolerance=1e-3)


def test_next_sentences_get_their_vectors(tmp_path, text, tokenizer, tokenised):
    store = stored(tmp_path / "store", text)
    corpus, tokens = tokenised(text, documents="blank_lines")
    vectors = open_vectors(store, corpus, tokens)
    check(source_of(tokens, vectors), tokenizer)
    check(source_of(Neighbours(tokens, within=2), vectors), tokenizer)
    check(source_of(Neighbours(tokens), vectors, next_sentence=True), tokenizer)


def test_vectors_are_copied_once_for_a_text_and_a_content(tmp_path, text, tokenised):
    store = stored(tmp_path / "store", text)
    open_vectors(store, *tokenised(text))
    for part in store.parts:
        part.unlink()
    open_vectors(store, *tokenised(text))  # the digest of this store is known
    (tmp_path / "other").mkdir()
    write_part(tmp_path / "other/other.parquet", ["only this"], np.ones((1, DIMENSION), np.float32))
    with pytest.raises(DataError, match=r"lacks the embeddings of 24 of the 24 sentences"):
        open_vectors(find_store(str(tmp_path / "other")), *tokenised(text))


def test_missing_sentences_are_reported(tmp_path, text, tokenised):
    store = stored(tmp_path / "store", text)
    text.write_text("number 1 is here\n\nwho is this\nnumber 2 is here\nand this\nwho is this\n")
    with pytest.raises(DataError, match=r"lacks the embeddings of 3 of the 5 sentences of .* on line 3: 'who is this'"):
        open_vectors(store, *tokenised(text))
    assert not [folder for folder in (tmp_path / "cache").rglob("vectors-*")]


def test_a_changed_text_is_refused(tmp_path, text, tokenised):
    store, (corpus, tokens) = stored(tmp_path / "store", text), tokenised(text)
    with text.open("a") as file:
        file.write("number 1 is here\n")
    with pytest.raises(DataError, match="has changed since this run started"):
        open_vectors(store, corpus, tokens)


def test_vectors_that_are_not_finite_are_refused(tmp_path, text, tokenised):
    store = stored(tmp_path / "store", text)
    vectors = np.ones((3, DIMENSION), np.float32)
    vectors[1, 2] = np.nan
    write_part(store.parts[1], ["a", "b", "c"], vectors)
    with pytest.raises(DataError, match=r"000001\.parquet, row 2: the text is missing, or the embedding is NaN"):
        open_vectors(store, *tokenised(text))


def test_files_that_are_no_store_are_refused(tmp_path):
    assert find_store("minilm") is find_store(str(tmp_path)) is None
    write_part(tmp_path / "a.parquet", ["a"], np.ones((1, 3), np.float32))
    write_part(tmp_path / "b.parquet", ["b"], np.ones((1, 4), np.float32))
    with pytest.raises(DataError, match=r"b\.parquet holds embeddings of type .*\[4\], but a\.parquet has .*\[3\]"):
        find_store(str(tmp_path))
    for folder in ("empty", "empty.state"):
        (tmp_path / folder).mkdir()
    (tmp_path / "empty.state/settings.json").write_text("{}")
    with pytest.raises(DataError, match="empty holds no embeddings yet"):
        find_store(str(tmp_path / "empty"))
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"b\.parquet cannot be read"):
        find_store(str(tmp_path))
    pq.write_table(pa.table({"sentence": ["b"], "embedding": [[1.0, 2.0, 3.0]]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet was not written by `diffcse embed`: .*has: sentence"):
        find_store(str(tmp_path))


@pytest.mark.parametrize("name", ["vectors.npy", "rows.npy", "meta.json"])
def test_a_damaged_copy_is_made_again(name, tmp_path, text, tokenised, capsys):
    store = stored(tmp_path / "store", text)
    corpus, tokens = tokenised(text)
    every = np.arange(len(tokens))[:, None]
    expected = np.array(open_vectors(store, corpus, tokens).gather(every))
    (path,) = (tmp_path / "cache").glob(f"*/vectors-*/{name}")
    content = path.read_bytes()
    path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    np.testing.assert_array_equal(open_vectors(store, corpus, tokens).gather(every), expected)
    assert f"warning: {path} is damaged or missing; making" in capsys.readouterr().err
    assert path.read_bytes() == content
    open_vectors(store, corpus, tokens)
    assert "is damaged" not in capsys.readouterr().err


def test_a_flipped_bit_of_a_vector_is_noticed(tmp_path, text, tokenised):
    store = stored(tmp_path / "store", text)
    part = store.parts[1]
    corpus, tokens = tokenised(text)
    column = pq.ParquetFile(part).metadata.row_group(0).column(2)
    content = bytearray(part.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 3] ^= 1
    part.write_bytes(bytes(content))
    with pytest.raises(DataError, match=f"{part.name} cannot be read .*(CRC|crc|[Cc]hecksum)"):
        open_vectors(find_store(str(store.folder)), corpus, tokens)


def test_a_full_disk_is_reported(tmp_path, text, tokenised, monkeypatch):
    """Room is reserved first: on a full disk, writing to mapped memory would end the process."""
    store = stored(tmp_path / "store", text)
    corpus, tokens = tokenised(text)
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(DiskError, match=rf"cannot write .*/vectors-.*: No space left.* {store.folder} is unchanged"):
        open_vectors(store, corpus, tokens)
    assert not list((tmp_path / "cache").glob("*/vectors-*"))
