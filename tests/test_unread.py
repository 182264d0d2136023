"""Texts of words that a tokenizer does not know: every command says so, and searches count words."""

import pytest
import tokenizers
import transformers
from tiny_model import write_smallest_model
from tiny_run import run_settings

from diffcse_jax import SentenceEncoder, train
from diffcse_jax.cli import main
from diffcse_jax.evaluation.backends import TorchEncoder
from diffcse_jax.models.tokenizer import cutting_tokenizer, load_tokenizer, tokenise
from diffcse_jax.models.unread import (
    Reader,
    added_up,
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
MESSAGE = (
    "{} of {} texts consist largely of words that {} does not know: use a multilingual encoder"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    words = ["a", "cat", "dog", "runs", ":", "query"]
    return write_smallest_model(tmp_path_factory.mktemp("smallest"), words)


@pytest.fixture(scope="module")
def minilm_tokens(minilm_dir):
    tokenizer = load_tokenizer(minilm_dir)

    def tokens(texts, prompts=("",), max_length=64, side="right"):
        tokenizer.truncation_side = side
        backend = cutting_tokenizer(tokenizer, max_length)
        return tokenise(backend, texts, tokenizer.unk_token_id, prompts)

    return tokens


@pytest.fixture
def encoder(folder):
    return SentenceEncoder.from_pretrained(folder, pooler="avg")


@pytest.mark.parametrize(
    ("text", "is_unknown"),
    [
        ("iPhone 15 \u0e23\u0e32\u0e04\u0e32\u0e40\u0e17\u0e48\u0e32", True),
        ("iPhone 15 Pro \u0e23\u0e32\u0e04\u0e32", True),
        ("iPhone 15 \u178f\u1798\u17d2\u179b\u17c3", True),  # Khmer
        ("iPhone 15 Pro \u4ef7\u683c", True),
        ("iPhone 15 \u4e2d\u53e4 \u4fa1\u683c", True),
        ("\u4fa1\u683c\u306f\u3044\u304f\u3089\u3067\u3059\u304b", False),  # it knows Kana
        ("iPhone 15 \u0643\u0645 \u0627\u0644\u0633\u0639\u0631", False),  # and Arabic letters
        ("the word \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 means hello in Thai", False),
        ("price is 5 \u2603 today", False),
        ("great phone \U0001f44d\U0001f44d\U0001f44d", False),
        ("\U0001f44d\U0001f44d\U0001f44d", True),
        (LONG_WORD, True),
        ("", False),
    ],
)
@pytest.mark.parametrize("prompt", ["", "Represent this sentence for searching: "])
def test_unknown_words_are_measured_by_their_letters(minilm_tokens, text, is_unknown, prompt):
    tokens = minilm_tokens([text], [prompt])
    assert tokens.unknown == [is_unknown]


def test_only_the_part_that_is_read_counts(minilm_tokens):
    texts = ["a dog runs " * 10 + THAI[0], THAI[0] + " a dog" * 10]
    assert minilm_tokens(texts, max_length=12).unknown == [False, True]
    assert minilm_tokens(texts, max_length=12, side="left").unknown == [True, False]


def test_sentencepiece_gives_unknown_words_a_token_for_the_space():
    model = tokenizers.models.Unigram([("<unk>", 0.0), ("\u2581", -1.0), ("\u2581cat", -1.0)], 0)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    texts = [*THAI[:2], "cat", "cat " * 12 + THAI[1]]
    tokens = tokenise(cutting_tokenizer(tokenizer, 16), texts, tokenizer.unk_token_id)
    assert tokens.ids == [[1, 0], [1, 0], [2], [2] * 12 + [1, 0]]
    assert tokens.unknown == [True, True, False, False]


@pytest.mark.parametrize("prompt", ["", "query: a cat "])
def test_encode_warns_once(encoder, prompt):
    known = "a cat runs " * 5
    texts = [*THAI, *KNOWN, LONG_WORD, known + THAI[0]]
    with pytest.warns(UserWarning, match=MESSAGE.format(5, 8, encoder.name)) as caught:
        encoder.encode(texts, prompt=prompt)
    assert len(caught) == 1
    encoder.encode([known + THAI[0]], prompt=prompt)  # warnings are errors
    assert encoder.largely_unknown(texts) == [True] * 4 + [False, False, True, False]


def test_another_library_is_told_the_same(folder):
    pytest.importorskip("torch")
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
    note = "Found by words only: the model does not know many words of this query."
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
        "2 of 4 texts consist largely of words that minilm does not know",
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
        with pytest.warns(UserWarning, match="largely of words") as caught:
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
    assert (
        f"{len(THAI)} of {len(THAI) + len(lines)} texts consist largely" in capfd.readouterr().err
    )
    assert read_baseline(tmp_path / "run").unknown == pytest.approx(share)
    card = (tmp_path / "run/export/README.md").read_text()
    assert f"many words of {100 * share:.2g}% of the training sentences" in card
    (warning,) = (each for each in read_summary(tmp_path / "run").warnings if "largely" in each)
    assert warning.startswith(f"{share:.2%} of the training sentences")
