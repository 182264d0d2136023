"""Long texts become overlapping passages, and a search finds each text by its best one."""

import itertools
import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import write_tiny_model

from diffcse_jax import cli
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.search.index import SentenceIndex
from diffcse_jax.search.records import split_text
from diffcse_jax.search.vector_store import EncoderRecord


def words_of(text: str) -> list[tuple[int, int]]:
    """Each word is a token of its first letters and one of its last letter."""
    spans, start = [], 0
    for word in text.split(" "):
        end = start + len(word)
        spans += [(start, end - 1), (end - 1, end)] if len(word) > 1 else [(start, end)]
        start = end + 1
    return spans


@given(st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=60).map(" ".join), st.integers(1, 20))
def test_passages_cover_the_text_and_fit(text, limit):
    tokens = words_of(text)
    passages = split_text(text, tokens, limit)
    assert (passages[0][0], passages[-1][1]) == (0, len(text))
    for start, end in passages:
        assert 0 < sum(start <= first and last <= end for first, last in tokens) <= limit
    for (start, end), (following, stop) in itertools.pairwise(passages):
        assert start < following <= end + 1
        assert end < stop
        assert not text[end:following].strip()  # nothing is left out


def test_passages_end_with_sentences_and_overlap():
    text = "One two three. Four five six. Seven eight nine. Ten eleven twelve."
    tokens = [(start, start + len(word)) for word in text.split(" ") for start in [text.index(word)]]
    assert [text[start:end] for start, end in split_text(text, tokens, 6)] == [
        "One two three. Four five six.", "six. Seven eight nine.", "nine. Ten eleven twelve."
    ]  # fmt: skip
    characters = [(place, place + 1) for place in range(9)]
    assert split_text("a" * 9, characters, 4) == [(0, 4), (3, 7), (6, 9)]
    assert split_text("", [], 4) == [(0, 0)]


@pytest.mark.parametrize("mode", ["dense", "lexical", "hybrid"])
def test_each_document_is_found_once_by_its_best_passage(mode):
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(60, 4)).astype(np.float32)
    vectors[:50] += 3  # the passages of document 0 are the nearest to the query
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    words = ["apple apple apple"] * 49 + ["apple"] + ["apple pear plum"] * 9 + ["kiwi"]
    table = pa.table({"document": [0] * 50 + [*range(1, 11)], "sentence": words, "start": [*range(60)]})
    index = SentenceIndex.of(table, EncoderRecord("mine", "avg", "float32", 4, "0"), vectors, mode)
    (everything,) = index.search(np.full((1, 4), 0.5, np.float32), 60, texts=["apple"], mode=mode)
    (hits,) = index.search(np.full((1, 4), 0.5, np.float32), 4, texts=["apple"], mode=mode)
    assert hits == everything[:4]
    documents = [hit.row["document"] for hit in everything]
    assert sorted(documents) == [*range(10 if mode == "lexical" else 11)]
    assert documents[0] == 0
    assert [hit.score for hit in everything] == sorted((hit.score for hit in everything), reverse=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, minilm_dir) -> SentenceEncoder:
    return SentenceEncoder.from_pretrained(write_tiny_model(tmp_path_factory.mktemp("tiny"), minilm_dir), pooler="avg")


LONG = " ".join(["the cat sleeps on the warm roof ."] * 20 + ["a dog runs in the park ."])


def test_a_long_text_is_found_by_its_end(tiny):
    tiny.build_index([LONG, "the cat sleeps"], mode="hybrid", weight=0.3)
    hits = tiny.search_hits("a dog runs in the park .", top_k=2)[0]
    assert [hit.row["document"] for hit in hits] == [0, 1]
    assert hits[0].row["sentence"].endswith("a dog runs in the park .")
    assert LONG[hits[0].row["start"] :] == hits[0].row["sentence"]
    for hit in hits:
        assert len(tiny.tokenizer(hit.row["sentence"])["input_ids"]) <= tiny.max_length
    with pytest.warns(UserWarning, match=r"truncated 1 of 2 texts"):
        tiny.build_index([LONG, "the cat sleeps"], passages=False)
    assert tiny.search("a dog runs", top_k=2)[1][0] in (LONG, "the cat sleeps")
    tiny.build_index([{"sentence": "it sleeps", "title": "the cat"}, {"sentence": "it runs", "title": "a dog"}])
    vectors = tiny.encode(["the cat it sleeps", "a dog it runs"], normalize=True)
    np.testing.assert_allclose(tiny.index.embeddings.stored, vectors, atol=1e-6)
    tiny.build_index([{"sentence": "it sleeps", "start": 3}, {"sentence": "it runs", "start": 5}], passages=False)
    assert len(tiny.search("it runs")) == 2  # these are no passages of ours


def test_wrong_options_are_refused_before_texts_are_encoded(tiny, monkeypatch):
    monkeypatch.delattr(SentenceEncoder, "encode")
    for options in ({"storage": "int4"}, {"weight": 2}, {"mode": "hybrid", "language": "klingon"}):
        with pytest.raises(ConfigError, match=r"(int4'|2|klingon'): (use|expected|there is no)"):
            tiny.build_index(["the cat"], **options)
    with pytest.raises(DataError, match="the values of 'id' differ in type"):
        tiny.build_index([{"sentence": "a", "id": 1}, {"sentence": "b", "id": "x"}])


def test_titles_and_passages_of_files_are_searched_and_embedded(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_load_encoder", lambda options, record=None: tiny)
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "cats.md").write_text(f"# The cat\n\nThe cat sleeps all day.\n\n## More\n\n{LONG}\n")
    (folder / "dogs.md").write_text("# The dog\n\nA dog runs in the park.\n")
    sources = [["--input", str(folder), "--model", "tiny"], ["--input", str(tmp_path / "vectors")]]
    cli.main(["embed", "--passages", *sources[0], "--output", str(tmp_path / "vectors")])
    for source in sources:
        cli.main(["search", *source, "--json", "a dog runs in the park ."])
        (found,) = map(json.loads, capsys.readouterr().out.splitlines())
        assert sorted(hit["file"] for hit in found["hits"]) == ["cats.md", "dogs.md"]
        assert {hit["title"] for hit in found["hits"]} <= {"The cat", "The cat: More", "The dog"}
        assert all(hit["start"] >= 0 for hit in found["hits"])
    cli.main(["search", *sources[0], "--mode", "lexical", "--json", "more"])  # by a title
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert [hit["title"] for hit in found["hits"]] == ["The cat: More"]
