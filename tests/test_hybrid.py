"""BM25 against its formula, fusion against closed forms, and indexes that are searched by words."""

import collections
import copy
import math
import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.models.pooling import normalize
from diffcse_jax.search.index import SentenceIndex
from diffcse_jax.search.lexical import (
    DEFAULT_WEIGHT,
    LexicalIndex,
    best_rows,
    choose_weight,
    combine,
    detect_language,
    ndcg,
    split_words,
)
from diffcse_jax.search.vector_store import EncoderRecord

pytest.importorskip("bm25s")
TEXTS = [
    "The cats were sleeping on the warm roof.",
    "A cat chased two mice, and the mice chased a cat.",
    "Share prices fell sharply on Monday.",
    "The price of shares is falling again.",
    "!!!",
]


def bm25_by_formula(documents: list[list[str]], query: list[str], k1: float = 1.2, b: float = 0.75) -> list[float]:
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for words in map(collections.Counter, documents):
        score = 0.0
        for word in query:
            containing = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - containing + 0.5) / (containing + 0.5))
            score += idf * words[word] / (words[word] + k1 * (1 - b + b * words.total() / mean))
        scores.append(score)
    return scores


def test_scores_are_those_of_the_formula():
    index = LexicalIndex.build(TEXTS)
    stems = [["cat", "were", "sleep", "warm", "roof"], ["cat", "chase", "two", "mice", "mice", "chase", "cat"],
             ["share", "price", "fell", "sharpli", "monday"], ["price", "share", "fall", "again"], []]  # fmt: skip
    assert index.language == "english"
    for query, words in (
        ("Cats chasing the mouse", ["cat", "chase", "mous"]),
        ("share PRICES, price", ["share"] + 2 * ["price"]),
    ):
        np.testing.assert_allclose(index.scores(query), bm25_by_formula(stems, words), rtol=1e-5)
    assert not index.scores("the of unknownword").any()


def test_words_of_scripts_without_spaces_are_pairs_of_characters():
    assert split_words("東京タワー, ABC漢字!") == ["東京", "京タ", "タワ", "ワー", "abc", "漢字"]
    assert split_words("ประเทศ 서울시 人") == ["ปร", "ระ", "ะเ", "เท", "ทศ", "서울", "울시", "人"]
    assert split_words("हिन्दी cafe\u0301 ﬁne C") == ["हिन्दी", "café", "fine"]
    index = LexicalIndex.build(["私は東京に住んでいます", "大阪は楽しい", "京都の寺"])
    assert index.scores("東京の天気").argmax() == 0


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("german", "Die Katze liegt auf dem Dach und schläft, weil es dort warm ist."),
        ("french", "Le chat dort sur le toit parce que la maison est chaude."),
        ("english", "sqlite3 libxml2 gtk4"),
        ("english", "東京は日本の首都です"),
    ],
)
def test_the_language_is_detected_by_its_stop_words(language, text):
    assert detect_language([text]) == language


def test_the_stemmer_of_a_language_is_used():
    index = LexicalIndex.build(["viele Häuser", "eine Katze"], "german")
    assert index.scores("Haus").tolist()[1] == 0
    assert index.scores("Häusern")[0] > 0
    for other in (pickle.loads(pickle.dumps(index)), copy.deepcopy(index)):
        np.testing.assert_array_equal(other.scores("Häusern"), index.scores("Häusern"))
    with pytest.raises(ConfigError, match=r"language='klingon': there is no stemmer for it\. Use one of: .*german"):
        LexicalIndex.build(TEXTS, "klingon")
    with pytest.raises(DataError, match="no words"):
        LexicalIndex.build(["!!!", "?"])


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(0, 12))
def test_best_rows_are_the_first_of_a_stable_sort(scores, count):
    array = np.array(scores, np.float32)
    np.testing.assert_array_equal(best_rows(array, count), np.argsort(-array, kind="stable")[:count])


def test_scores_are_combined_after_standardising():
    dense, lexical = np.array([0.9, 0.5, 0.1]), np.array([0.0, 0.0, 6.0])
    one, other, rows = np.sqrt(1.5), np.sqrt(2), np.array([2, 0])
    expected = [-0.75 * one + 0.25 * other, 0.75 * one - 0.25 / other]
    np.testing.assert_allclose(combine(dense[rows], lexical[rows], 0.25, dense, lexical), expected)
    alone = combine(dense, np.zeros(3), 0.25, dense, np.zeros(3))
    np.testing.assert_allclose(alone, 0.75 * np.array([one, 0, -one]), atol=1e-9)
    assert combine(np.ones(3), np.ones(3), 0.5, np.ones(3), np.ones(3)).tolist() == [0, 0, 0]
    assert combine(*2 * [np.zeros(0)], 0.5, *2 * [np.zeros(0)]).shape == (0,)


def test_ndcg_of_grades():
    ideal = 3 + 1 / math.log2(3)
    assert ndcg(np.array([7, 5, 2]), {2: 3, 5: 1}) == pytest.approx((1 / math.log2(3) + 3 / 2) / ideal)
    assert ndcg(np.array([2, 5]), {2: 3, 5: 1}) == pytest.approx(1)
    assert ndcg(np.array([], int), {2: 3}) == 0


def test_the_weight_is_chosen_on_held_out_queries():
    rng = np.random.default_rng(0)
    relevant = [[row] for row in range(60)]
    noise, signal = rng.normal(size=(60, 200)), rng.normal(size=(60, 200)) + 3 * np.eye(60, 200)
    assert choose_weight(noise, np.maximum(signal, 0), relevant) >= 0.8
    assert choose_weight(signal, np.maximum(noise, 0), relevant) <= DEFAULT_WEIGHT
    assert choose_weight(noise[:2], noise[:2], relevant[:2]) == DEFAULT_WEIGHT  # no weight is better
    assert choose_weight(np.zeros((0, 5)), np.zeros((0, 5)), []) == DEFAULT_WEIGHT


def test_a_hybrid_search_ranks_by_both_halves():
    vectors = normalize(np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32))
    query = normalize(np.random.default_rng(1).normal(size=(1, 8)).astype(np.float32))
    index = SentenceIndex.of(
        pa.table({"sentence": TEXTS}), EncoderRecord("mine", "avg", "float32", 8, "0123"), vectors, "hybrid"
    )
    (hits,) = index.search(query, 5, texts=["falling price of the cat"])
    dense, lexical = vectors @ query[0], index.lexical.scores("falling price of the cat")
    expected = combine(dense, lexical, DEFAULT_WEIGHT, dense, lexical)
    assert [hit.row["sentence"] for hit in hits] == [TEXTS[row] for row in np.argsort(-expected)]
    np.testing.assert_allclose([hit.score for hit in hits], np.sort(expected)[::-1], rtol=1e-4)
    ranks = {hit.row["sentence"]: hit.ranks for hit in hits}
    assert ranks[TEXTS[dense.argmax()]]["dense"] == ranks[TEXTS[lexical.argmax()]]["lexical"] == 1
    assert "lexical" not in ranks["!!!"]


def test_words_are_searched_without_an_encoder(tmp_path):
    SentenceIndex.of(pa.table({"sentence": TEXTS}), mode="lexical").save(tmp_path / "lexical")
    assert not (tmp_path / "lexical/vectors.npy").exists()
    index = SentenceIndex.load(tmp_path / "lexical")
    scores = index.lexical.scores("falling price of the cat")
    hits, *none = index.search(None, 5, texts=["falling price of the cat", "zebra", ""])
    assert [hit.row["sentence"] for hit in hits] == [TEXTS[row] for row in np.argsort(-scores) if scores[row] > 0]
    assert none == [[], []]
