"""Search against sorting all similarities: exact, in blocks, from memory and files."""

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.errors import CheckpointError, ConfigError, DataError
from diffcse_jax.models.pooling import normalize
from diffcse_jax.search import array_store as module
from diffcse_jax.search.array_store import STORAGES, nearest
from diffcse_jax.search.index import SentenceIndex, check_count, find_index
from diffcse_jax.search.vector_store import EncoderRecord, vector_table

DIMENSION = 4
RECORD = EncoderRecord("mine", "avg", "float32", DIMENSION, "0123")


def random_vectors(rows: int, seed: int = 0, dimension: int = DIMENSION) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, dimension)).astype(np.float32)


def by_sorting(queries: np.ndarray, vectors: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """All similarities at once; equal ones in the order of the rows."""
    scores = queries.astype(np.float64) @ normalize(vectors.astype(np.float32)).astype(np.float64).T
    rows = np.argsort(-scores.round(6), axis=1, kind="stable")[:, :top_k]
    return np.take_along_axis(scores, rows, axis=1), rows


@given(
    st.integers(1, 40), st.integers(1, 19), st.integers(1, 20), st.booleans(), st.lists(st.integers(0, 40), max_size=4)
)
def test_blocks_give_what_sorting_all_gives(rows, queries, top_k, half, cuts):
    """Of few distinct vectors, so that many are equally near."""
    vectors = np.random.default_rng(rows).integers(-1, 2, (rows, DIMENSION)).astype(np.float16 if half else np.float32)
    asked = normalize(random_vectors(queries, seed=queries))
    edges = sorted({0, rows, *(cut for cut in cuts if cut < rows)})
    blocks = (vectors[first:end] for first, end in itertools.pairwise(edges))
    with pytest.MonkeyPatch.context() as smaller:
        smaller.setattr(module, "BLOCK_QUERIES", 8)
        scores, found = nearest(asked, map(normalize, blocks), rows, top_k)
    expected, order = by_sorting(asked, vectors, top_k)
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    np.testing.assert_array_equal(found, order)


def test_queries_and_corpora_share_few_programs():
    compiled = module._better._cache_size()
    for rows, queries, top_k in ((100, 3, 5), (128, 7, 8), (70, 2, 6)):
        nearest(random_vectors(queries, dimension=5), [random_vectors(rows, dimension=5)], rows, top_k)
    assert module._better._cache_size() == compiled + 1


def index_of(vectors: np.ndarray, record: EncoderRecord = RECORD) -> SentenceIndex:
    texts = pa.table({"line": range(1, len(vectors) + 1), "sentence": [f"text {row}" for row in range(len(vectors))]})
    return SentenceIndex.of(texts, normalize(vectors), record)


def hits_of(index: SentenceIndex, queries: np.ndarray, **options) -> list:
    return [[(hit.row["sentence"], round(hit.score, 5)) for hit in hits] for hits in index.search(queries, **options)]


def test_an_index_is_the_same_from_its_folder(tmp_path):
    vectors, queries = random_vectors(50), normalize(random_vectors(3, seed=1))
    index = index_of(vectors)
    expected = hits_of(index, queries, top_k=7)
    scores, rows = by_sorting(queries, vectors, 7)
    assert expected == [
        [(f"text {row}", round(float(score), 5)) for row, score in zip(*pair, strict=True)]
        for pair in zip(rows, scores, strict=True)
    ]
    index.save(tmp_path / "index")
    index.save(tmp_path / "index")  # takes its place
    assert {path.name for path in tmp_path.iterdir()} == {"index"}
    loaded = SentenceIndex.load(tmp_path / "index")
    assert isinstance(loaded.store.vectors, np.memmap)
    assert hits_of(loaded, queries, top_k=7) == expected
    assert (loaded.encoder, len(loaded)) == (RECORD, 50)
    least = expected[0][2][1] - 1e-5
    (found, *_) = hits_of(loaded, queries, top_k=7, threshold=least)
    assert found == expected[0][:3]
    assert loaded.search(queries, 1)[0][0].row == {"line": rows[0][0] + 1, "sentence": expected[0][0][0]}


@pytest.mark.parametrize("storage", STORAGES)
def test_stored_kinds_of_numbers_find_the_same(storage, tmp_path):
    dimension = 33
    vectors = normalize(random_vectors(300, dimension=dimension))
    queries = normalize(vectors[:20] + random_vectors(20, seed=1, dimension=dimension) / 20)
    record, texts = EncoderRecord("mine", "avg", "float32", dimension, "0123"), index_of(vectors).store.table
    exact, index = (SentenceIndex.of(texts, vectors, record, each) for each in ("float32", storage))
    expected, found = (each.search(queries, 300) for each in (exact, index))
    for one, other in zip(expected, found, strict=True):  # all rows, with scores up to rounding
        scores = [{hit.row["line"]: hit.score for hit in hits} for hits in (one, other)]
        assert scores[0].keys() == scores[1].keys()
        np.testing.assert_allclose([scores[1][line] for line in scores[0]], [*scores[0].values()], atol=8e-3)
    assert [hits[0].row["line"] for hits in index.search(queries, 1)] == [*range(1, 21)]
    bits = {"float32": 32, "float16": 16, "int8": 8, "bits": 1}[storage]
    assert index.store.vectors.nbytes == 300 * -(-dimension // 32) * 4 if bits == 1 else 300 * dimension * bits // 8
    index.save(tmp_path / "index")
    find_index(tmp_path / "index").save(tmp_path / "index")  # from the folder that it replaces
    assert hits_of(find_index(tmp_path / "index"), queries, top_k=5) == hits_of(index, queries, top_k=5)


def write_parts(folder: Path, vectors: np.ndarray, parts: int, record: EncoderRecord = RECORD, first: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    start = 0
    for part, block in enumerate(np.array_split(vectors, parts)):
        texts = pa.table(
            {"line": np.arange(len(block)) + 1, "sentence": [f"text {start + i}" for i in range(len(block))]}
        )
        pq.write_table(vector_table(texts, block, vars(record)), folder / f"a.txt.{first + part:06d}.parquet")
        start += len(block)


def test_vectors_of_embed_are_searched(tmp_path):
    vectors, queries = random_vectors(50).astype(np.float16), normalize(random_vectors(3, seed=1))
    write_parts(tmp_path / "vectors", vectors, 3)
    index = find_index(tmp_path / "vectors").with_embeddings()
    expected = hits_of(index_of(vectors.astype(np.float32)), queries, top_k=9)
    assert hits_of(index, queries, top_k=9) == expected
    hit = index.search(queries, 1)[0][0]
    assert hit.row["file"] == "a.txt"
    index.save(tmp_path / "index")
    assert hits_of(SentenceIndex.load(tmp_path / "index"), queries, top_k=9) == expected


def test_files_without_texts_are_searched(tmp_path):
    write_parts(tmp_path / "vectors", random_vectors(0), 1)
    index = find_index(tmp_path / "vectors").with_embeddings()
    assert index.search(normalize(random_vectors(2)), 3) == [[], []]


def test_what_is_no_index_is_refused(tmp_path):
    assert find_index(tmp_path) is find_index(tmp_path / "none") is None
    (tmp_path / "notes.txt").write_text("mine")
    index = index_of(random_vectors(5))
    with pytest.raises(CheckpointError, match=r"not empty and not an index\. Choose another folder"):
        index.save(tmp_path)
    assert (tmp_path / "notes.txt").exists()
    index.save(tmp_path / "index")
    (tmp_path / "index/index.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match=r"index\.json lacks the index's mode or checksums"):
        find_index(tmp_path / "index")


def test_vectors_of_no_encoder_or_of_several_are_refused(tmp_path):
    write_parts(tmp_path, random_vectors(4), 2)
    write_parts(tmp_path, random_vectors(4), 1, EncoderRecord("other", "cls", "float32", DIMENSION, "4567"), first=2)
    with pytest.raises(DataError, match=r"000002\.parquet holds embeddings of other, .* another encoder, mine"):
        find_index(tmp_path)
    part = tmp_path / "a.txt.000002.parquet"
    pq.write_table(pq.read_table(part).replace_schema_metadata(None), part)
    with pytest.raises(CheckpointError, match=r"000002\.parquet does not name the encoder"):
        find_index(tmp_path)


@pytest.mark.parametrize("byte", [20, -1], ids=["header", "embedding"])
def test_a_damaged_index_is_refused(byte, tmp_path):
    index_of(random_vectors(5)).save(tmp_path / "index")
    file = tmp_path / "index/vectors.npy"
    content = bytearray(file.read_bytes())
    content[byte] ^= 0x40
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"index/vectors\.npy is missing or damaged.* Build the index again"):
        find_index(tmp_path / "index")


def test_a_missing_parquet_part_is_reported(tmp_path):
    write_parts(tmp_path / "vectors", random_vectors(9), 3)
    (tmp_path / "vectors/a.txt.000001.parquet").unlink()
    with pytest.raises(DataError, match=r"a\.txt\.000001\.parquet is missing\. Run the same `diffcse embed` command"):
        find_index(tmp_path / "vectors")


def test_invalid_options_are_refused():
    index, query = index_of(random_vectors(5)), normalize(random_vectors(1))
    for top_k in (0, 1.5, True, None):
        with pytest.raises(ConfigError, match=f"top_k={top_k}: expected a whole number of at least 1"):
            check_count("top_k", top_k)
    with pytest.raises(ConfigError, match="threshold=nan: expected a number"):
        index.search(query, 1, float("nan"))
    with pytest.raises(ConfigError, match="storage='int4': use one of: float32, float16, int8, bits"):
        index.stored_as("int4")
