"""Augmented second views (SimCSE Table 1)."""

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.config import DataConfig
from diffcse_jax.data.sampling import Augmentation, begins_word, open_augmentation
from diffcse_jax.errors import DataError

PAD, CLS, SEP, UNK = 0, 1, 2, 3
NAMES = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "run", "##ning", "##s", "fast", "quick", "##ly", "very", "dog", "."]
BEGINS = np.array([not name.startswith("##") for name in NAMES])
LONGEST = 12


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    model = tokenizers.models.WordPiece({name: index for index, name in enumerate(NAMES)}, unk_token="[UNK]")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]")


def words_of(ids: list[int]) -> list[tuple[int, ...]]:
    """Return the words between the first and the last token."""
    words: list[list[int]] = []
    for token in ids[1:-1]:
        if words and not BEGINS[token]:
            words[-1].append(token)
        else:
            words.append([token])
    return [tuple(word) for word in words]


@st.composite
def batches(draw) -> list[list[int]]:
    sentence = st.lists(st.integers(UNK + 1, len(NAMES) - 1), max_size=LONGEST - 2)
    return [[CLS, *tokens, SEP] for tokens in draw(st.lists(sentence, min_size=1, max_size=5))]


def augmented(sentences: list[list[int]], seed: int, kind: str, ratio: float = 0.3, synonyms=None) -> list[list[int]]:
    lengths = np.array([len(sentence) for sentence in sentences])
    input_ids = np.array([sentence + [PAD] * (LONGEST - len(sentence)) for sentence in sentences], np.int32)
    augmentation = Augmentation(kind, ratio, BEGINS, synonyms or {})
    new_ids, new_lengths = augmentation(input_ids, lengths, np.random.default_rng(seed))
    return [ids[:length].tolist() for ids, length in zip(new_ids, new_lengths, strict=True)]


def is_subsequence(part: list, whole: list) -> bool:
    rest = iter(whole)
    return all(item in rest for item in part)


seeds = st.integers(0, 1000)


@given(
    batches(), seeds, st.sampled_from(["crop", "word_deletion", "delete_one_word"]), st.sampled_from([0, 0.1, 0.5, 1])
)
def test_whole_words_are_removed_and_at_least_one_is_kept(sentences, seed, kind, ratio):
    for before, after in zip(sentences, augmented(sentences, seed, kind, ratio), strict=True):
        words, kept = words_of(before), words_of(after)
        assert (after[0], after[-1]) == (CLS, SEP)
        count = len(words)
        removed = {
            "crop": count - max(np.rint((1 - ratio) * count), 1),
            "word_deletion": min(np.rint(ratio * count), count - 1),
            "delete_one_word": min(1, count - 1),
        }[kind]
        assert len(kept) == count - max(removed, 0)
        assert is_subsequence(kept, words)
        if kind == "crop":
            assert any(words[i : i + len(kept)] == kept for i in range(count + 1))


SYNONYMS = {(7,): [(8,), (10, 8, 9)], (4, 5): [(7, 9)]}  # fast: quick, very quickly; running: fastly


@given(batches(), seeds)
def test_one_word_of_the_table_is_replaced(sentences, seed):
    for before, after in zip(sentences, augmented(sentences, seed, "synonyms", synonyms=SYNONYMS), strict=True):
        words = words_of(before)
        possible = [
            [token for word in [*words[:i], synonym, *words[i + 1 :]] for token in word][: LONGEST - 2]
            for i, word in enumerate(words)
            for synonym in SYNONYMS.get(word, ())
        ]
        assert (after[0], after[-1]) == (CLS, SEP)
        assert after[1:-1] in (possible or [before[1:-1]])


def test_where_words_begin():
    np.testing.assert_array_equal(begins_word(tokenizer().backend_tokenizer), BEGINS)
    byte_level = {"<s>": 0, "Ġthe": 1, "##": 2, "re": 3}  # of two-character tokens that no WordPiece made
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_level, []))
    assert begins_word(backend).tolist() == [False, True, False, False]
    word_level = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "##re": 1}, "the"))
    assert begins_word(word_level).tolist() == [True, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast\tquick\nrun\n", r"synonyms\.tsv, line 2: expected a word and its synonyms, separated by tabs"),
        ("fast\tqu\0ick\n", r"synonyms\.tsv, line 1: .* \(NUL byte"),
        ("quick\tswift\n", "does not contain a word and a synonym of the vocabulary"),
        (None, r"cannot read .*synonyms\.tsv"),
    ],
)
def test_a_table_of_synonyms_is_read_in_tokens_or_refused(tmp_path, text, message):
    path = tmp_path / "synonyms.tsv"
    if text is not None:
        path.write_text(text)
    data = DataConfig(augmentation="synonyms", synonyms_file=str(path))
    with pytest.raises(DataError, match=message):
        open_augmentation(data, tokenizer())
    path.write_text("fast\tquick\tvery quickly\n\nrunning\tfastly\nquick\tswift\nswift\tquick\n")
    assert open_augmentation(data, tokenizer()).synonyms == {key: tuple(found) for key, found in SYNONYMS.items()}
