"""Texts of words that a tokenizer does not know: every command says so, and searches count words."""

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import write_smallest_model
from tiny_run import run_settings

from diffcse_jax import SentenceEncoder, train
from diffcse_jax.cli import main
from diffcse_jax.evaluation.backends import TorchEncoder
from diffcse_jax.models.unread import (
    Reader,
    UnknownTokens,
    added_up,
    mostly_unknown,
    report_unread,
    unreported,
)
from diffcse_jax.run_folder.records import read_baseline
from diffcse_jax.run_folder.summary import read_summary

THAI = [
    "\u0e01\u0e32\u0e23\u0e04\u0e37\u0e19\u0e2a\u0e34\u0e19\u0e04\u0e49\u0e32",
    "\u0e01\u0e32\u0e23\u0e08\u0e31\u0e14\u0e2a\u0e48\u0e07",
    "\u0e27\u0e34\u0e18\u0e35\u0e0a\u0e33\u0e23\u0e30\u0e40\u0e07\u0e34\u0e19",
    "\u0e40\u0e27\u0e25\u0e32\u0e17\u0e33\u0e01\u0e32\u0e23",
]
KNOWN = ["a cat runs", "a dog runs"]
LONG_WORD = "a" * 101
MESSAGE = "{} of {} texts consist mostly of words that {} does not know: use a multilingual encoder"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    words = ["a", "cat", "dog", "runs", ":", "query"]
    return write_smallest_model(tmp_path_factory.mktemp("smallest"), words)


@pytest.fixture
def encoder(folder):
    return SentenceEncoder.from_pretrained(folder, pooler="avg")


def test_texts_with_more_unknown_words_than_others_are_counted():
    tokens = [[9], [9, 4], [9, 9, 4], [4], [], [9, 9, 5, 5]]
    offsets = np.cumsum([0, *map(len, tokens)])
    flat = np.concatenate(tokens).astype(int)

    def counted(unknown, others=0):
        return mostly_unknown(flat, offsets, UnknownTokens(*unknown), others).tolist()

    assert counted([9]) == [True, False, True, False, False, False]
    assert counted([9], np.array([0] * 5 + [2])) == [True, False, True, False, False, True]
    assert counted([9, 5]) == [True, False, True, False, False, True]
    assert not any(counted([None]))


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=6))
def test_counts_are_those_of_each_text_alone(tokens):
    flat = np.array([token for text in tokens for token in text], int)
    counted = mostly_unknown(flat, np.cumsum([0, *map(len, tokens)]), UnknownTokens(3), 0)
    assert counted.tolist() == [2 * text.count(3) > len(text) for text in tokens]


def test_sentencepiece_gives_unknown_words_a_token_for_the_space():
    model = tokenizers.models.Unigram([("<unk>", 0.0), ("\u2581", -1.0), ("\u2581cat", -1.0)], 0)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    tokens = tokenizer([*THAI[:2], "cat", f"cat {THAI[0]}"])["input_ids"]
    assert tokens == [[1, 0], [1, 0], [2], [2, 1, 0]]
    offsets = np.cumsum([0, *map(len, tokens)])
    unknown = mostly_unknown(np.concatenate(tokens), offsets, UnknownTokens.of(tokenizer), 0)
    assert unknown.tolist() == [True, True, False, False]


@pytest.mark.parametrize("prompt", ["", "query: a cat "])
def test_encode_warns_once(encoder, prompt):
    texts = [*THAI, *KNOWN, LONG_WORD, "a cat " + LONG_WORD]
    with pytest.warns(UserWarning, match=MESSAGE.format(5, 8, encoder.name)) as caught:
        encoder.encode(texts, prompt=prompt)
    assert len(caught) == 1
    encoder.encode(["a cat " + THAI[0]], prompt=prompt)  # warnings are errors
    assert encoder.mostly_unknown(texts).tolist() == [True] * 4 + [False, False, True, False]


def test_another_library_is_told_the_same(folder):
    encoder = TorchEncoder(str(folder), "avg")
    with pytest.warns(UserWarning, match=MESSAGE.format(4, 6, folder)) as caught:
        encoder.encode([*THAI, *KNOWN])
    assert len(caught) == 1


def test_a_search_by_both_finds_unknown_words_by_words(encoder):
    texts = [*THAI, *KNOWN]
    with pytest.warns(UserWarning, match=MESSAGE.format(4, 6, encoder.name)) as caught:
        encoder.build_index(texts, mode="hybrid", weight=0.1)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=MESSAGE.format(4, 5, encoder.name)) as caught:
        hits = encoder.search_hits([*THAI, KNOWN[0]])
    assert len(caught) == 1
    assert [each[0].text for each in hits] == [*THAI, KNOWN[0]]
    assert [[*each[0].ranks] for each in hits] == [["lexical"]] * 4 + [["dense", "lexical"]]
    note = "Found by words only: the model does not know most words of this query."
    assert [each.note for each in hits] == [note] * 4 + [""]


def test_several_calls_are_added_up():
    @added_up()
    def encode_twice():
        for _ in range(2):
            with added_up():
                report_unread(Reader("minilm", 8), texts=2, cut=1, unknown=1)

    with pytest.warns(UserWarning, match="minilm|truncated") as caught:
        encode_twice()
    with unreported():  # warnings are errors
        encode_twice()
    assert [str(each.message).partition(":")[0] for each in caught] == [
        "truncated 2 of 4 texts to 8 tokens, the most that the model reads",
        "2 of 4 texts consist mostly of words that minilm does not know",
    ]


def test_commands_warn_once(folder, tmp_path, capsys):
    text, output = tmp_path / "text.txt", tmp_path / "output"
    text.write_text("\n".join([*THAI, *KNOWN]), encoding="utf-8")
    model = ["--model", str(folder), "--pooler", "avg"]
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{line}\t{line}!\n" for line in [*THAI, *KNOWN]), encoding="utf-8")
    tasks = f"pairs_retrieval:{pairs}"
    for command in (
        ["encode", *model, "--input", str(text), "--output", str(tmp_path / "vectors.npy")],
        ["embed", *model, "--input", str(text), "--output", str(output)],
        ["evaluate", *model, "--tasks", tasks, "--output", str(tmp_path / "results.json")],
    ):
        with pytest.warns(UserWarning, match="mostly of words") as caught:
            main(command)
        assert len(caught) == 1, command


def test_a_run_records_the_share_and_its_card_and_report_name_it(
    folder, tmp_path, minilm_dir, capfd
):
    groups = {
        "difference": {"weight": 0.0},
        "generator": {"name_or_path": ""},
        "eval": {"every": 0},
    }
    settings = run_settings(tmp_path, minilm_dir, train={"steps": 1}, **groups)
    lines = (tmp_path / "text.txt").read_text().splitlines()
    (tmp_path / "text.txt").write_text("\n".join([*THAI, *lines]), encoding="utf-8")
    share = len(THAI) / (len(THAI) + len(lines))
    train(config=settings, workdir=tmp_path / "run")
    assert f"{len(THAI)} of {len(THAI) + len(lines)} texts consist mostly" in capfd.readouterr().err
    assert read_baseline(tmp_path / "run").unknown == pytest.approx(share)
    card = (tmp_path / "run/export/README.md").read_text()
    assert f"most words of {100 * share:.2g}% of the training sentences" in card
    (warning,) = (each for each in read_summary(tmp_path / "run").warnings if "mostly" in each)
    assert warning.startswith(f"{share:.2%} of the training sentences")
