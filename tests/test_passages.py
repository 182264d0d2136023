"""Documents become passages, and a search finds each document by its best one.

Passages of long texts overlap.
"""

import itertools
import json
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import write_tiny_model

from diffcse_jax import cli
from diffcse_jax.documents.document import Document, Section
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import ConfigError
from diffcse_jax.models.pooling import normalize
from diffcse_jax.search.contents import Contents, documents_table, passages_table
from diffcse_jax.search.embeddings import StoredEmbeddings
from diffcse_jax.search.folder import Stored
from diffcse_jax.search.index import Index
from diffcse_jax.search.lexical import LexicalIndex
from diffcse_jax.search.passages import LONGEST_TITLE, Passage, passages_of, split_text
from diffcse_jax.search.settings import IndexSettings
from diffcse_jax.search.vector_store import EncoderRecord

# Documents

PIECES = st.sampled_from(
    ["Mount Etna", "is an active volcano.", "e.g. this", "(Really)", "2.14", "--- * ---", "no end", "A", " ", "\t",
     "東京は首都です。", "火山", "Größe?", "\u00a0", "etc.", "\u201cQuoted!\u201d", "x" * 60, "Sentence number two."]
)  # fmt: skip
LINES = st.lists(st.lists(PIECES, max_size=12).map(" ".join), max_size=8)
TITLES = ("", "long title " * 40, "Mount", "Mount Etna: Height")
SECTIONS = st.builds(Section, st.one_of(st.sampled_from(TITLES), PIECES), LINES, st.booleans())


def letters(text: str) -> str:
    return "".join(filter(str.isalnum, text))


@given(st.lists(SECTIONS, max_size=4).map(tuple), st.booleans())
def test_all_letters_of_a_document_are_in_its_passages(sections, whole):
    passages = passages_of(Document("a", sections, whole=whole), 7)
    text = "\n".join(line for section in sections for line in section.lines)
    of_texts = letters("".join(passage.text for passage in passages))
    parts = [text for passage in passages for text in (*passage.title.split(": "), passage.text)]
    headings = set(map(letters, parts))
    for section in sections:
        title, own = letters(section.title), letters("".join(section.lines))
        assert own in of_texts or own.removeprefix(title) in of_texts
        path = set(filter(None, map(letters, section.title.split(": "))))
        is_text = len(section.title) > LONGEST_TITLE and title in of_texts
        assert is_text or title in headings or path <= headings
    titles = tuple(" ".join(section.title.split()) for section in sections)
    for passage in passages:
        assert (passage.document, passage.start <= len(text) + 1) == (7, True)
        # no title as text
        if not any(title and passage.text.startswith(title) for title in titles):
            assert text[passage.start :].startswith(passage.text[0])
    starts = [passage.start for passage in passages]
    assert starts == sorted(starts)


def test_sections_become_passages_of_whole_sentences():
    lines = [
        f"This is sentence number {number} of a long page, which goes on." for number in range(30)
    ]
    document = Document(
        "a", (Section("Guide", []), Section("Guide: Use", lines), Section("End", [" ", "Bye."]))
    )
    *found, last = passages_of(document, 0)
    text = "\n".join([*lines, " ", "Bye."])
    # which has the letters of its parent's title
    assert {passage.title for passage in found} == {"Guide: Use"}
    assert len(found) == 4
    assert len({passage.start for passage in found}) == 4
    for passage in found:
        assert " ".join(text[passage.start :].split()).startswith(passage.text)
        assert len(passage.text) <= 512
    assert (last.title, last.text, last.start) == ("End", "Bye.", text.index("Bye."))
    (whole,) = passages_of(Document("a", (Section("", lines),), whole=True), 0)
    assert (whole.text, whole.start) == ("\n".join(lines), 0)
    found = passages_of(Document("a", (Section("Port", ["-"]), Section("Portability", ["It."]))), 0)
    assert [passage.searched for passage in found] == ["Port -", "Portability It."]
    separate = (Section("", ["  one"], column="a"), Section("", ["two. " * 300], column="b"))
    passages = passages_of(Document("a", separate, whole=True), 0)
    assert [(each.column, each.start) for each in passages] == [("a", 2), ("b", 6)]


# Long texts


def words_of(text: str) -> list[tuple[int, int]]:
    """Each word is a token of its first letters and one of its last letter."""
    spans, start = [], 0
    for word in text.split(" "):
        end = start + len(word)
        spans += [(start, end - 1), (end - 1, end)] if len(word) > 1 else [(start, end)]
        start = end + 1
    return spans


@given(
    st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=60).map(" ".join),
    st.integers(1, 20),
)
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
    tokens = [
        (start, start + len(word)) for word in text.split(" ") for start in [text.index(word)]
    ]
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
    words = ["apple apple apple"] * 49 + ["apple"] + ["apple pear plum"] * 9 + ["kiwi"]
    numbers = [0] * 50 + [*range(1, 11)]
    documents = documents_table([Document(str(number), ()) for number in range(11)], 0)
    passages = passages_table(
        [Passage(number, "", text, 3) for number, text in zip(numbers, words, strict=True)]
    )
    lexical = None if mode == "dense" else LexicalIndex.build(words)
    contents = Contents(documents, passages, StoredEmbeddings.of(normalize(vectors)), lexical)
    index = Index.of(
        Stored(IndexSettings(mode), contents, EncoderRecord("mine", "avg", "float32", 4, "0"))
    )
    query = np.full((1, 4), 0.5, np.float32)
    (everything,) = index.rank(["apple"], query, 60)
    (hits,) = index.rank(["apple"], query, 4)
    assert [hit.id for hit in hits] == [hit.id for hit in everything[:4]]
    assert sorted(hit.id for hit in everything) == sorted(
        str(each) for each in range(10 if mode == "lexical" else 11)
    )
    assert everything[0].id == "0"
    assert [hit.rank for hit in everything] == [*range(1, len(everything) + 1)]
    assert [hit.score for hit in everything] == sorted(
        (hit.score for hit in everything), reverse=True
    )
    if mode == "hybrid":  # ranks count documents
        assert sorted(hit.ranks["dense"] for hit in everything) == [*range(1, 12)]
        assert sorted(hit.ranks["lexical"] for hit in everything if hit.ranks.get("lexical")) == [
            *range(1, 11)
        ]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, minilm_dir) -> SentenceEncoder:
    return SentenceEncoder.from_pretrained(
        write_tiny_model(tmp_path_factory.mktemp("tiny"), minilm_dir), pooler="avg"
    )


LONG = " ".join(["the cat sleeps on the warm roof ."] * 20 + ["a dog runs in the park ."])


def test_a_long_text_is_found_by_its_end(tiny):
    tiny.build_index([LONG, "the cat sleeps"], mode="hybrid", weight=0.3)
    hits = tiny.search_hits("a dog runs in the park .", top_k=2)[0]
    assert [hit.id for hit in hits] == ["0", "1"]
    assert hits[0].text.endswith("a dog runs in the park .")
    assert LONG[hits[0].start :] == hits[0].text
    for hit in hits:
        assert len(tiny.tokenizer(hit.text)["input_ids"]) <= tiny.max_length
    with pytest.warns(UserWarning, match=r"truncated 1 of 2 texts"):
        tiny.build_index([LONG, "the cat sleeps"], passages=False)
    assert tiny.search("a dog runs", top_k=2)[1][0] in (LONG, "the cat sleeps")
    tiny.build_index(
        [{"sentence": "it sleeps", "title": "the cat"}, {"sentence": "it runs", "title": "a dog"}]
    )
    vectors = tiny.encode(["the cat it sleeps", "a dog it runs"], normalize=True)
    np.testing.assert_allclose(tiny.index.embeddings.vectors, vectors, atol=1e-6)
    # leaves no room for the text, so it becomes a part of it
    title = "the cat sleeps on the warm roof " * 6
    parts = tiny.split([Passage(0, title.strip(), "a dog runs", 90)])
    assert {part.title for part in parts} == {""}
    assert parts[-1].text.endswith("a dog runs")
    assert letters("".join(part.text for part in parts)).count("dog") == 1
    assert [part.start for part in parts] == [90] * len(parts)
    assert all(len(tiny.tokenizer(part.text)["input_ids"]) <= tiny.max_length for part in parts)


def test_wrong_options_are_refused_before_texts_are_encoded(tiny, monkeypatch):
    monkeypatch.setattr(SentenceEncoder, "encode", mock.Mock(side_effect=AssertionError))
    for options in ({"storage": "int4"}, {"weight": 2}, {"mode": "hybrid", "language": "klingon"}):
        with pytest.raises(ConfigError, match=r"(int4'|2\.0|klingon'): (use|expected|there is no)"):
            tiny.build_index(["the cat"], **options)


def test_titles_and_passages_of_files_are_searched_and_embedded(
    tiny, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(SentenceEncoder, "from_pretrained", lambda *arguments, **options: tiny)
    for module in ("embed", "search"):
        monkeypatch.setattr(f"diffcse_jax.apps.{module}.require_model", lambda name: None)
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "cats.md").write_text(f"# The cat\n\nThe cat sleeps all day.\n\n## More\n\n{LONG}\n")
    (folder / "dogs.md").write_text("# The dog\n\nA dog runs in the park.\n")
    sources = [["--input", str(folder), "--model", "tiny"], ["--input", str(tmp_path / "vectors")]]
    cli.main(["embed", "--passages", *sources[0], "--output", str(tmp_path / "vectors")])
    for source in sources:
        cli.main(["search", *source, "--json", "a dog runs in the park ."])
        (found,) = map(json.loads, capsys.readouterr().out.splitlines())
        assert sorted(hit["file"] for hit in found["hits"]) == [
            f"{folder}/cats.md",
            f"{folder}/dogs.md",
        ]
        assert {hit["title"] for hit in found["hits"]} <= {"The cat", "The cat: More", "The dog"}
        assert all(hit["start"] >= 0 for hit in found["hits"])
    cli.main(["search", *sources[0], "--mode", "lexical", "--json", "more"])  # by a title
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert [hit["title"] for hit in found["hits"]] == ["The cat: More"]
