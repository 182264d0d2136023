"""An index as an object: it is changed, saved and loaded, beside readers and writers."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.errors import DataError
from diffcse_jax.models import pooling
from diffcse_jax.models.sentence_folder import NO_PROMPTS
from diffcse_jax.search.index import Index
from diffcse_jax.search.vector_store import EncoderRecord

DIMENSION = 24


class WordEncoder:
    """The embedding of a text is the sum of its words'. It counts what it encodes."""

    name, prompts = "words", NO_PROMPTS

    def __init__(self):
        self.encoded = []

    def encode(self, sentences, batch_size=64, normalize=False, prompt=""):
        self.encoded += sentences
        rows = [sum(map(vector_of, text.split()), np.zeros(DIMENSION)) for text in sentences]
        return pooling.normalize(np.array(rows, np.float32).reshape(len(rows), DIMENSION))

    def split(self, passages, prompt=""):
        return list(passages)

    def record(self, prompt=""):
        return EncoderRecord(self.name, "avg", "float32", DIMENSION, "0123", prompt)

    def warning_once(self):
        import contextlib
        return contextlib.nullcontext()


def vector_of(word: str) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(word.lower().encode())).normal(size=DIMENSION)


def found(index: Index, *queries: str, **options) -> list:
    return [
        [(hit.id, hit.text, round(hit.score, 5), hit.rank, hit.columns) for hit in hits]
        for hits in index.search(queries, 50, **options)
    ]

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


@given(CHANGES, st.sampled_from(["dense", "lexical", "hybrid"]), st.sampled_from(["float32", "float16"]))
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
