"""Search against sorting all similarities, and hybrid search against the formula."""

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.documents.document import Document, Section
from diffcse_jax.documents.ledger import Ledger, Place
from diffcse_jax.documents.open import open_documents_to_search
from diffcse_jax.errors import CheckpointError, ConfigError, DataError
from diffcse_jax.io import write_json
from diffcse_jax.models.pooling import normalize
from diffcse_jax.search import embeddings
from diffcse_jax.search.contents import Contents, documents_table, passages_table
from diffcse_jax.search.embeddings import StoredEmbeddings, nearest
from diffcse_jax.search.folder import Stored
from diffcse_jax.search.fusion import combine
from diffcse_jax.search.index import Index, check_count, find_index
from diffcse_jax.search.lexical import LexicalIndex
from diffcse_jax.search.modes import DEFAULT_WEIGHT, MODES, STORAGES
from diffcse_jax.search.passages import Passage
from diffcse_jax.search.recommended import recommended
from diffcse_jax.search.settings import IndexSettings, is_number
from diffcse_jax.search.vector_store import EncoderRecord, find_store, rows_table, vector_table

DIMENSION = 33
RECORD = EncoderRecord("mine", "avg", "float32", DIMENSION, "0123")


def random_vectors(rows: int, seed: int = 0, dimension: int = DIMENSION) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, dimension)).astype(np.float32)


def texts_of(rows: int) -> list[str]:
    words = ["red fox", "blue bird", "red bird"]
    return [f"this is the {words[row % 3]} with number {row}" for row in range(rows)]


def document_of(text: str, row: int) -> Document:
    return Document(f"a.txt:{row}", (Section("", (text,)),), Place("a.txt", row))


def contents_of(
    texts: list[str], vectors: np.ndarray | None, mode: str = "dense", storage: str = "float32"
) -> Contents:
    documents = [document_of(text, row) for row, text in enumerate(texts)]
    passages = passages_table([Passage(row, "", text) for row, text in enumerate(texts)])
    words = None if mode == "dense" else LexicalIndex.build(texts)
    embeddings = None if vectors is None else StoredEmbeddings.of(normalize(vectors), storage)
    return Contents(documents_table(documents, 0), passages, embeddings, words)


def index_of(vectors: np.ndarray, mode: str = "dense", storage: str = "float32") -> Index:
    contents = contents_of(texts_of(len(vectors)), vectors, mode, storage)
    return Index.of(Stored(IndexSettings(mode, storage=storage), contents, RECORD))


def ask(
    index: Index,
    queries: np.ndarray,
    top_k: int = 7,
    threshold: float | None = None,
    mode: str = "",
) -> list:
    """The rows and scores that queries with these embeddings find."""
    found = index.rank(["red foxes"] * len(queries), queries, top_k, threshold, mode=mode)
    return [
        [(int(hit.id.rpartition(":")[2]), round(hit.score, 5)) for hit in hits] for hits in found
    ]


def by_sorting(
    queries: np.ndarray, vectors: np.ndarray, top_k: int
) -> tuple[np.ndarray, np.ndarray]:
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
    everything = ask(index, queries, 300, mode="dense")
    for hits, expected, order in zip(everything, scores, rows, strict=True):
        np.testing.assert_allclose([dict(hits)[row] for row in order.tolist()], expected, atol=8e-3)
        assert hits[0][0] == order[0]
    texts = ["red foxes"] * 20
    best = [
        [hit for hit in hits if hit.score >= 0.2]
        for hits in index.rank(texts, queries, 300, mode="dense")
    ]
    assert index.rank(texts, queries, 300, 0.2, mode="dense") == best
    size = {"float32": 4 * 33, "float16": 2 * 33, "int8": 33, "bits": 8}[storage]
    assert index.embeddings.vectors.nbytes == 300 * size

    index.save(tmp_path / "index")
    Index.load(tmp_path / "index").save(tmp_path / "index")  # from the folder that it replaces
    loaded = Index.load(tmp_path / "index")
    assert not loaded.embeddings.vectors.flags.writeable  # mapped from the file
    assert (loaded.record, loaded.settings, loaded.lexical.language) == (
        RECORD,
        index.settings,
        "english",
    )
    for mode in MODES:
        assert ask(loaded, queries, mode=mode) == ask(index, queries, mode=mode)


@pytest.mark.parametrize("storage", STORAGES)
def test_embeddings_are_exchanged(storage):
    vectors, added = normalize(random_vectors(40) + 1), normalize(random_vectors(9, seed=1))
    own = StoredEmbeddings.of(vectors[:20], storage)
    order = np.array([3, 24, 0, 28, 19, 20])  # of 20 rows, and then of the added ones
    found = own.updated(order, added)
    expected = np.concatenate([vectors[:20], added])[order]
    assert (found.storage, len(found.vectors)) == (storage, 6)
    np.testing.assert_allclose(
        found.rows(np.arange(6)), expected, atol={"float32": 0, "float16": 1e-3}.get(storage, 0.02)
    )
    for row in range(20, 40):  # one by one, until the number of rows has doubled
        own = own.updated(np.arange(row + 1), vectors[row : row + 1])
    np.testing.assert_array_equal(own.nearest(vectors, 1)[1][:, 0], np.arange(40))
    if storage in ("int8", "bits"):
        assert own.measured == 40
        np.testing.assert_allclose(own.rows(np.arange(40)), vectors, atol=1.5 * own.scale.max())


def test_bits_tell_apart_embeddings_that_point_almost_the_same_way():
    vectors = normalize(random_vectors(300) + 20)
    np.testing.assert_array_equal(
        StoredEmbeddings.of(vectors, "bits").nearest(vectors, 1)[1][:, 0], np.arange(300)
    )


def write_parts(
    folder: Path, vectors: np.ndarray, parts: int, record: EncoderRecord = RECORD, first: int = 0
) -> None:
    folder.mkdir(exist_ok=True)
    rows = [
        (document_of(text, row + 1), Passage(row, "", text))
        for row, text in enumerate(texts_of(len(vectors)))
    ]
    start = 0
    for part, block in enumerate(np.array_split(vectors, parts)):
        table = vector_table(rows_table(rows[start : start + len(block)]), block, vars(record))
        pq.write_table(table, folder / f"a.txt.{first + part:06d}.parquet")
        start += len(block)


@pytest.mark.parametrize("rows", [50, 0])
def test_vectors_of_embed_are_searched(rows, tmp_path):
    vectors, queries = random_vectors(rows).astype(np.float16), normalize(random_vectors(3, seed=1))
    write_parts(tmp_path / "vectors", vectors, 3)
    index = find_index(tmp_path / "vectors")
    expected = ask(index_of(vectors.astype(np.float32)), queries)
    assert ask(index, queries) == [[(row + 1, score) for row, score in hits] for hits in expected]
    assert {hit.file for hits in index.rank(["a"], queries[:1], 1) for hit in hits} <= {"a.txt"}
    index.save(tmp_path / "index")
    assert ask(Index.load(tmp_path / "index"), queries) == ask(index, queries)


def test_an_id_in_two_files_of_embeddings_is_two_documents(tmp_path, capsys):
    for number, name in enumerate(("a.csv", "b.csv")):
        document = Document("7", (Section("", (f"text {number}",)),), Place(name, 2))
        rows = rows_table([(document, Passage(0, "", f"text {number}"))])
        table = vector_table(rows, random_vectors(1, seed=number), vars(RECORD))
        pq.write_table(table, tmp_path / f"{name}.000000.parquet")
    documents, _ = find_store(tmp_path).tables()
    assert documents["id"].to_pylist() == ["7", "b.csv#7"]
    assert "a.csv and b.csv share 1 id; each file's rows" in capsys.readouterr().err


def test_parquet_files_that_do_not_fit_are_refused(tmp_path):
    def refused(error: type, message: str) -> None:
        with pytest.raises(error, match=message):
            find_store(tmp_path).mapped()

    write_parts(tmp_path, random_vectors(9), 3)
    part = tmp_path / "a.txt.000002.parquet"
    write_parts(
        tmp_path,
        random_vectors(4),
        1,
        EncoderRecord("other", "cls", "float32", DIMENSION, "4567"),
        first=2,
    )
    refused(
        ConfigError,
        r"000002\.parquet holds embeddings of other \(.*, but the encoder is mine \(avg",
    )
    pq.write_table(pq.read_table(part).replace_schema_metadata(None), part)
    refused(CheckpointError, r"000002\.parquet does not name the encoder")
    write_parts(tmp_path, random_vectors(4, dimension=3), 1, first=2)
    refused(DataError, r"000002\.parquet was not written by this version .* \(lists of 33 numbers")
    write_parts(tmp_path, np.full((4, DIMENSION), np.nan, np.float32), 1, first=2)
    refused(DataError, r"000002\.parquet, row 1: the embedding is missing, NaN or infinite")
    part.write_bytes(b"PAR1")
    refused(DataError, r"000002\.parquet cannot be read")
    write_parts(tmp_path, random_vectors(4), 1, first=2)
    for name in ("_metadata", "._a.txt.000000"):  # of other programs
        (tmp_path / f"{name}.parquet").write_bytes(b"PAR1")
    assert len(find_store(tmp_path).parts) == 3
    with pytest.raises(
        DataError, match=rf"000002\.parquet is a part of the embeddings in {tmp_path}\. Give"
    ):
        find_store(part)
    table = pq.read_table(part)
    place = table.column_names.index("sentence")
    pq.write_table(table.set_column(place, "sentence", pa.array(["a", None, "b", None])), part)
    with pytest.raises(
        DataError, match=r"000002\.parquet, row 2: the sentence is missing\. Remove the file"
    ):
        find_store(tmp_path).tables()
    (tmp_path / "a.txt.000001.parquet").unlink()
    refused(DataError, r"a\.txt\.000001\.parquet is missing\. Run the same `diffcse embed` command")


def test_invalid_options_are_refused():
    vectors, query = random_vectors(5), normalize(random_vectors(1))
    index = index_of(vectors)
    for top_k in (0, 1.5, True, None):
        with pytest.raises(
            ConfigError, match=f"top_k={top_k}: expected a whole number of at least 1"
        ):
            check_count("top_k", top_k)
    with pytest.raises(ConfigError, match="threshold=nan: expected a number"):
        ask(index, query, threshold=float("nan"))
    with pytest.raises(
        ConfigError, match="storage='int4': use one of: float32, float16, int8, bits"
    ):
        IndexSettings(storage="int4").check()
    with pytest.raises(ConfigError, match="mode='sparse': use one of: dense, lexical, hybrid"):
        ask(index, query, mode="sparse")
    with pytest.raises(
        ConfigError, match=r"the index was built in mode dense .* again .* in mode hybrid"
    ):
        ask(index, query, mode="hybrid")
    with pytest.raises(ConfigError, match=r"threshold=0\.5: the scores of a hybrid search"):
        ask(index_of(vectors, "hybrid"), query, threshold=0.5)
    assert is_number(np.float32(0.5))
    assert not any(map(is_number, ("0.5", True, None)))
    words = Index(texts=["red foxes"], mode="lexical", language="none")
    with pytest.raises(DataError, match="query 2 is empty"):
        words.search(["red", " "])
    for weight in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match=f"weight={weight}: expected a number from 0"):
            IndexSettings("hybrid", weight=weight).check()


def test_search_uses_what_a_run_recommends(tmp_path):
    assert recommended("minilm") == recommended(None) == ("dense", None)
    write_json(tmp_path / "search.json", {"mode": "hybrid", "weight": 0.2})
    assert recommended(str(tmp_path)) == ("hybrid", 0.2)
    assert recommended(str(tmp_path), "hybrid") == ("hybrid", 0.2)
    assert recommended(str(tmp_path), "lexical") == ("lexical", None)
    write_json(tmp_path / "search.json", {"mode": "hybrid", "weight": 2})
    with pytest.raises(
        CheckpointError, match=r"search.json: expected a `mode` of dense, lexical, hybrid"
    ):
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
    contents = contents_of(TEXTS, vectors, "hybrid")
    (hits,) = Index.of(Stored(IndexSettings("hybrid"), contents, RECORD)).rank([QUERY], query, 5)
    dense, words = vectors @ query[0], contents.lexical.scores(QUERY)
    expected = combine(dense, words, DEFAULT_WEIGHT, dense, words)
    assert [hit.text for hit in hits] == [TEXTS[row] for row in np.argsort(-expected)]
    np.testing.assert_allclose([hit.score for hit in hits], np.sort(expected)[::-1], rtol=1e-4)
    ranks = {hit.text: hit.ranks for hit in hits}
    assert ranks[TEXTS[dense.argmax()]]["dense"] == ranks[TEXTS[words.argmax()]]["lexical"] == 1
    assert "lexical" not in ranks["!!!"]


def test_words_are_searched_without_an_encoder(tmp_path):
    Index(texts=TEXTS, mode="lexical").save(tmp_path / "lexical")
    assert not [*(tmp_path / "lexical").glob("vectors*")]
    index = Index.load(tmp_path / "lexical")
    scores = index.lexical.scores(QUERY)
    hits, *none = index.search([QUERY, "zebra", "!"])
    assert [hit.text for hit in hits] == [
        TEXTS[row] for row in np.argsort(-scores) if scores[row] > 0
    ]
    assert none == [[], []]
    assert none[0].note == "No passage has a word of this query."


# Snippets and notes

PROSE = " ".join(f"filler{number}" for number in range(60))


def test_a_snippet_shows_the_words_of_the_query():
    text = f"{PROSE} the valve opens slowly {PROSE} the valves of the pump {PROSE}"
    index = Index(texts=[text, "A short text about a pump."], mode="lexical")
    (hits,) = index.search("pump valves")
    assert [hit.id for hit in hits] == ["0", "1"]
    shown = hits[0].snippet
    assert "the valves of the pump" in shown
    assert shown.startswith("... filler")
    assert shown.endswith(" ...")
    assert all(word in text.split() for word in shown.split()[1:-1])  # whole words
    assert len(shown) <= 240
    assert hits[1].snippet == "A short text about a pump."
    japanese = "雨" * 300 + "東京タワー" + "雨" * 300
    assert "東京タワー" in Index(texts=[japanese], mode="lexical").search("タワー")[0][0].snippet


def test_closeness_compares_documents_and_not_the_passages_of_a_long_one():
    vectors = np.random.default_rng(0).normal(size=(31, DIMENSION)).astype(np.float32)
    short = contents_of(texts_of(31), vectors)
    # The last document is a log that repeats one line.
    repeated = np.concatenate([vectors, vectors[-1:].repeat(400, axis=0)])
    long = contents_of(texts_of(431), repeated)
    rows = np.minimum(np.arange(431), 30).tolist()
    passages = passages_table([Passage(row, "", f"text {row}") for row in rows])
    long = dataclasses.replace(long, documents=short.documents, passages=passages)
    for cosine in (0.0, 0.5, 1.0):
        assert long.closeness(cosine) == pytest.approx(short.closeness(cosine), rel=0.5, abs=0.3)
    alike = contents_of(texts_of(30), vectors[:1].repeat(30, axis=0))
    assert alike.closeness(0.5) is None


def test_notes_say_when_nothing_fits():
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(10, DIMENSION)) * (np.arange(DIMENSION) < 20)
    vectors = centers.repeat(6, axis=0) + rng.normal(size=(60, DIMENSION)) / 5
    vectors = normalize(vectors.astype(np.float32))
    index = Index.of(
        Stored(IndexSettings("hybrid"), contents_of(texts_of(60), vectors, "hybrid"), RECORD)
    )
    far, close = np.eye(DIMENSION, dtype=np.float32)[-1:], vectors[:1]

    def note(vector: np.ndarray, text: str, mode: str = "") -> str:
        (hits,) = index.rank([text], vector, 3, mode=mode)
        assert len(hits) == 3
        return hits.note

    assert (
        note(close, "red foxes")
        == note(close, "zebra", "dense")
        == note(close, "red", "lexical")
        == ""
    )
    assert note(close, "zebra") == "Found by meaning only: no passage has a word of this query."
    assert "nothing is close" in note(far, "zebra").lower()
    assert note(far, "zebra").endswith("No passage has a word of it.")
    assert note(far, "red zebra").endswith("The best hit has 1 of its 2 words.")
    poor = "red zebra lion tiger bear"
    assert note(far, poor, "lexical") == "The best hit has only 1 of the 5 words of this query."
    (hits,) = index.rank(["x"], far, 3, 0.99, mode="dense")
    assert (hits, hits.note) == ([], "Nothing has a score of 0.99 or more.")


def test_parquet_files_of_others_with_embeddings_are_text(tmp_path):
    table = pa.table({"text": ["One text.", "Two texts."], "embedding": [[0.0, 1.0], [1.0, 0.0]]})
    pq.write_table(table, tmp_path / "theirs.parquet")
    assert find_store(tmp_path) is None
    documents = open_documents_to_search(tmp_path).read(Ledger("theirs"))
    assert [document.text() for document in documents] == [" One text.", " Two texts."]
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")  # as readers of text say
    assert find_store(tmp_path) is None
