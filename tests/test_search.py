"""Search against sorting all similarities, and hybrid search against the formula."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.errors import CheckpointError, ConfigError, DataError
from diffcse_jax.io import write_json
from diffcse_jax.models.pooling import normalize
from diffcse_jax.search import embeddings
from diffcse_jax.search.embeddings import STORAGES, Embeddings, nearest
from diffcse_jax.search.fusion import DEFAULT_WEIGHT, combine
from diffcse_jax.search.index import MODES, SentenceIndex, check_count, find_index, recommended
from diffcse_jax.search.vector_store import EncoderRecord, VectorStore, vector_table

DIMENSION = 33
RECORD = EncoderRecord("mine", "avg", "float32", DIMENSION, "0123")


def random_vectors(rows: int, seed: int = 0, dimension: int = DIMENSION) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, dimension)).astype(np.float32)


def texts_of(rows: int) -> pa.Table:
    words = ["red fox", "blue bird", "red bird"]
    sentences = [f"this is the {words[row % 3]} with number {row}" for row in range(rows)]
    return pa.table({"line": range(1, rows + 1), "sentence": sentences})


def index_of(vectors: np.ndarray, mode: str = "dense", storage: str = "") -> SentenceIndex:
    return SentenceIndex.of(texts_of(len(vectors)), RECORD, normalize(vectors), mode, storage=storage)


def hits_of(index: SentenceIndex, queries: np.ndarray, top_k: int = 7, mode: str = "") -> list:
    found = index.search(queries, top_k, texts=["red foxes"] * len(queries), mode=mode)
    return [[(hit.row["line"], round(hit.score, 5)) for hit in hits] for hits in found]


def by_sorting(queries: np.ndarray, vectors: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """All similarities at once; equal ones in the order of the rows."""
    scores = queries.astype(np.float64) @ normalize(vectors.astype(np.float32)).astype(np.float64).T
    rows = np.argsort(-scores.round(6), axis=1, kind="stable")[:, :top_k]
    return np.take_along_axis(scores, rows, axis=1), rows


@given(st.integers(1, 40), st.integers(1, 19), st.integers(1, 20), st.sampled_from([1, 7, 8, 50]))
def test_blocks_give_what_sorting_all_gives(rows, queries, top_k, block_rows):
    """Of few distinct vectors, so that many are equally near."""
    vectors = np.random.default_rng(rows).integers(-1, 2, (rows, 4)).astype(np.float32)
    asked = normalize(random_vectors(queries, queries, 4))
    with pytest.MonkeyPatch.context() as smaller:
        smaller.setattr(embeddings, "BLOCK_QUERIES", 8)
        smaller.setattr(embeddings, "BLOCK_ROWS", block_rows)
        scores, found = nearest(asked, normalize(vectors), top_k)
    expected, order = by_sorting(asked, vectors, top_k)
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    np.testing.assert_array_equal(found, order)


@pytest.mark.parametrize("storage", STORAGES)
def test_an_index_finds_the_same_however_it_is_stored(storage, tmp_path):
    vectors = normalize(random_vectors(300))
    queries = normalize(vectors[:20] + random_vectors(20, seed=1) / 20)
    index = index_of(vectors, "hybrid", storage)
    scores, rows = by_sorting(queries, vectors, 300)
    everything = index.search(queries, 300, mode="dense")
    for hits, expected, order in zip(everything, scores, rows, strict=True):
        found = {hit.row["line"] - 1: hit.score for hit in hits}  # all rows, with scores up to rounding
        np.testing.assert_allclose([found[row] for row in order.tolist()], expected, atol=8e-3)
        assert hits[0].row["line"] - 1 == order[0]
    best = [[hit for hit in hits if hit.score >= 0.2] for hits in everything]
    assert index.search(queries, 300, 0.2, mode="dense") == best
    size = {"float32": 4 * 33, "float16": 2 * 33, "int8": 33, "bits": 8}[storage]
    assert index.embeddings.stored.nbytes == 300 * size

    index.save(tmp_path / "index")
    find_index(tmp_path / "index").save(tmp_path / "index")  # from the folder that it replaces
    assert {path.name for path in tmp_path.iterdir()} == {"index"}
    loaded = find_index(tmp_path / "index")
    assert isinstance(loaded.embeddings.stored, np.memmap)
    assert (loaded.encoder, loaded.mode, loaded.lexical.language, loaded.weight) == (RECORD, "hybrid", "english", 0.1)
    for mode in MODES:
        assert hits_of(loaded, queries, mode=mode) == hits_of(index, queries, mode=mode)


def test_bits_tell_apart_embeddings_that_point_almost_the_same_way():
    vectors = normalize(random_vectors(300) + 20)
    np.testing.assert_array_equal(Embeddings.of(vectors, "bits").nearest(vectors, 1)[1][:, 0], np.arange(300))


def write_parts(folder: Path, vectors: np.ndarray, parts: int, record: EncoderRecord = RECORD, first: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    texts, start = texts_of(len(vectors)), 0
    for part, block in enumerate(np.array_split(vectors, parts)):
        table = vector_table(texts.slice(start, len(block)), block, vars(record))
        pq.write_table(table, folder / f"a.txt.{first + part:06d}.parquet")
        start += len(block)


@pytest.mark.parametrize("rows", [50, 0])
def test_vectors_of_embed_are_searched(rows, tmp_path):
    vectors, queries = random_vectors(rows).astype(np.float16), normalize(random_vectors(3, seed=1))
    write_parts(tmp_path / "vectors", vectors, 3)
    store = find_index(tmp_path / "vectors")
    assert isinstance(store, VectorStore)
    index = SentenceIndex.of_store(store)
    assert hits_of(index, queries) == hits_of(index_of(vectors.astype(np.float32)), queries)
    assert {hit.row["file"] for hits in index.search(queries, 1) for hit in hits} <= {"a.txt"}
    index.save(tmp_path / "index")
    assert hits_of(SentenceIndex.load(tmp_path / "index"), queries) == hits_of(index, queries)


def test_what_is_no_index_is_refused(tmp_path):
    assert find_index(tmp_path) is find_index(tmp_path / "none") is None
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"not empty and not an index\. Choose another folder"):
        index_of(random_vectors(5)).save(tmp_path)
    assert (tmp_path / "notes.txt").exists()


def test_parquet_files_that_do_not_fit_are_refused(tmp_path):
    def refused(error: type, message: str) -> None:
        with pytest.raises(error, match=message):
            find_index(tmp_path).mapped()

    write_parts(tmp_path, random_vectors(9), 3)
    part = tmp_path / "a.txt.000002.parquet"
    write_parts(tmp_path, random_vectors(4), 1, EncoderRecord("other", "cls", "float32", DIMENSION, "4567"), first=2)
    refused(ConfigError, r"000002\.parquet holds embeddings of other \(.*, but the encoder is mine \(avg")
    pq.write_table(pq.read_table(part).replace_schema_metadata(None), part)
    refused(CheckpointError, r"000002\.parquet does not name the encoder")
    write_parts(tmp_path, random_vectors(4, dimension=3), 1, first=2)
    refused(DataError, r"000002\.parquet was not written by .* \(lists of 33 numbers")
    write_parts(tmp_path, np.full((4, DIMENSION), np.nan, np.float32), 1, first=2)
    refused(DataError, r"000002\.parquet, row 1: the embedding is missing, NaN or infinite")
    part.write_bytes(b"PAR1")
    refused(DataError, r"000002\.parquet cannot be read")
    write_parts(tmp_path, random_vectors(4), 1, first=2)
    for name in ("_metadata", "._a.txt.000000"):  # of other programs
        (tmp_path / f"{name}.parquet").write_bytes(b"PAR1")
    assert len(find_index(tmp_path).parts) == 3
    with pytest.raises(DataError, match=rf"000002\.parquet is a part of the embeddings in {tmp_path}\. Give"):
        find_index(part)
    table = pq.read_table(part)
    pq.write_table(table.set_column(1, "sentence", pa.array(["a", None, "b", None])), part)
    with pytest.raises(DataError, match=r"000002\.parquet, row 2: the sentence is missing\. Remove the file"):
        find_index(tmp_path).texts()
    (tmp_path / "a.txt.000001.parquet").unlink()
    refused(DataError, r"a\.txt\.000001\.parquet is missing\. Run the same `diffcse embed` command")


@pytest.mark.parametrize(
    ("name", "byte"), [("vectors.npy", 20), ("vectors.npy", -1), ("vocab.index.json", 1), ("index.json", 5)]
)
def test_a_damaged_index_is_refused(name, byte, tmp_path):
    index_of(random_vectors(5), "hybrid").save(tmp_path / "index")
    file = tmp_path / "index" / name
    content = bytearray(file.read_bytes())
    content[byte] ^= 0x40
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"index/{name} (is|differs).* Build the index again"):
        find_index(tmp_path / "index")


def test_invalid_options_are_refused():
    vectors, query = random_vectors(5), normalize(random_vectors(1))
    index = index_of(vectors)
    for top_k in (0, 1.5, True, None):
        with pytest.raises(ConfigError, match=f"top_k={top_k}: expected a whole number of at least 1"):
            check_count("top_k", top_k)
    with pytest.raises(ConfigError, match="threshold=nan: expected a number"):
        index.search(query, 1, float("nan"))
    with pytest.raises(ConfigError, match="storage='int4': use one of: float32, float16, int8, bits"):
        index_of(vectors, storage="int4")
    with pytest.raises(ConfigError, match="mode='sparse': use one of: dense, lexical, hybrid"):
        index.search(query, 1, mode="sparse")
    with pytest.raises(ConfigError, match=r"the index was built with mode='dense'.* again with mode='hybrid'"):
        index.search(query, 1, mode="hybrid")
    with pytest.raises(ConfigError, match=r"threshold=0\.5: the scores of a hybrid search"):
        index_of(vectors, "hybrid").search(query, 1, 0.5, texts=["red"])
    for weight in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match=f"weight={weight}: expected a number from 0"):
            SentenceIndex.of(texts_of(5), RECORD, vectors, "hybrid", weight=weight)


def test_search_uses_what_a_run_recommends(tmp_path):
    assert recommended("minilm") == recommended(None) == ("dense", None)
    write_json(tmp_path / "search.json", {"mode": "hybrid", "weight": 0.2})
    assert recommended(str(tmp_path)) == ("hybrid", 0.2)
    write_json(tmp_path / "search.json", {"mode": "hybrid", "weight": 2})
    with pytest.raises(CheckpointError, match=r"search.json: expected a `mode` of dense, lexical, hybrid"):
        recommended(str(tmp_path))


# BM25 and hybrid search

TEXTS = [
    "The cats were sleeping on the warm roof.",
    "A cat chased two mice, and the mice chased a cat.",
    "Share prices fell sharply on Monday.",
    "The price of shares is falling again.",
    "!!!",
]
QUERY = "falling price of the cat"


def test_a_hybrid_search_ranks_by_both_halves():
    vectors, query = normalize(random_vectors(5)), normalize(random_vectors(1, seed=1))
    index = SentenceIndex.of(pa.table({"sentence": TEXTS}), RECORD, vectors, "hybrid")
    (hits,) = index.search(query, 5, texts=[QUERY])
    dense, words = vectors @ query[0], index.lexical.scores(QUERY)
    expected = combine(dense, words, DEFAULT_WEIGHT, dense, words)
    assert [hit.row["sentence"] for hit in hits] == [TEXTS[row] for row in np.argsort(-expected)]
    np.testing.assert_allclose([hit.score for hit in hits], np.sort(expected)[::-1], rtol=1e-4)
    ranks = {hit.row["sentence"]: hit.ranks for hit in hits}
    assert ranks[TEXTS[dense.argmax()]]["dense"] == ranks[TEXTS[words.argmax()]]["lexical"] == 1
    assert "lexical" not in ranks["!!!"]


def test_words_are_searched_without_an_encoder(tmp_path):
    SentenceIndex.of(pa.table({"sentence": TEXTS}), mode="lexical").save(tmp_path / "lexical")
    assert not (tmp_path / "lexical/vectors.npy").exists()
    index = SentenceIndex.load(tmp_path / "lexical")
    scores = index.lexical.scores(QUERY)
    hits, *none = index.search(None, 5, texts=[QUERY, "zebra", ""])
    assert [hit.row["sentence"] for hit in hits] == [TEXTS[row] for row in np.argsort(-scores) if scores[row] > 0]
    assert none == [[], []]
