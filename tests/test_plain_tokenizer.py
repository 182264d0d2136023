"""Tokenizers that are read without transformers are those that transformers makes of the folder."""

import json
import shutil

import pytest
import transformers
from tiny_model import SPECIAL, hf_config_of, write_bpe_tokenizer, write_smallest_model

from diffcse_jax.models.plain_tokenizer import read_as_it_stands
from diffcse_jax.models.tokenizer import Tokenizer, load_tokenizer, read_tokenizer

ENDS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
WORD_PIECES = {word: number for number, word in enumerate([*SPECIAL, "a", "caf", "##e"])}
OF_MPNET = {word: number for number, word in enumerate([*ENDS, "[UNK]", "a", "caf", "##e"])}
BYTES = {word: number for number, word in enumerate([*ENDS, "a", "b", "ab", "\u0120"])}
PIECES = [*((word, 0.0) for word in ENDS), ("\u2581", -1.0), ("a", -2.0), ("\u2581a", -3.0)]
CLASSES = {
    "bert": (transformers.BertTokenizer, {"vocab": WORD_PIECES}),
    "cased": (
        transformers.BertTokenizer,
        {"vocab": WORD_PIECES, "do_lower_case": False, "strip_accents": True},
    ),
    "distilbert": (transformers.DistilBertTokenizer, {"vocab": WORD_PIECES}),
    "mpnet": (transformers.MPNetTokenizer, {"vocab": OF_MPNET}),
    "roberta": (transformers.RobertaTokenizer, {"vocab": BYTES, "merges": [("a", "b")]}),
    "xlm-roberta": (transformers.XLMRobertaTokenizer, {"vocab": PIECES}),
}


def assert_same(folder):
    assert read_as_it_stands(folder) is not None
    ours, theirs = read_tokenizer(folder), Tokenizer.of(load_tokenizer(folder))
    assert ours.source == folder
    # Indexes record a hash of this text.
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    for name in ("truncation_side", "unk_token_id", "mask_token_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert [*ours.model_input_names] == [*theirs.model_input_names]
    assert len(ours) == len(theirs)


@pytest.mark.parametrize("name", CLASSES)
def test_the_tokenizer_of_a_class_is_the_same(name, tmp_path):
    kind, options = CLASSES[name]
    kind(**options, truncation_side="left").save_pretrained(tmp_path)
    family = "bert" if name == "cased" else name
    (tmp_path / "config.json").write_text(json.dumps(hf_config_of(family)))
    assert_same(tmp_path)


def test_tokenizers_of_other_releases_and_of_no_class_are_the_same(minilm_dir, tmp_path):
    assert_same(minilm_dir)  # of release 4.8
    write_bpe_tokenizer(tmp_path / "bpe", "a text of a few words " * 9)
    (tmp_path / "bpe" / "config.json").write_text(json.dumps(hf_config_of("modernbert")))
    assert_same(tmp_path / "bpe")


NEW = {"content": "dog", "single_word": False, "lstrip": False, "rstrip": False}
NEW |= {"normalized": False, "special": True}


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Whitespace"}}),
        ("tokenizer.json", {"post_processor": None}),
        ("tokenizer.json", {"added_tokens": []}),
        ("tokenizer_config.json", {"do_lower_case": False}),
        ("tokenizer_config.json", {"unk_token": "[MASK]"}),
        ("tokenizer_config.json", {"extra_special_tokens": ["dog"]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": NEW}}),
        ("tokenizer_config.json", {"truncation_side": "above"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["code.Mine", None]}}),
        ("tokenizer_config.json", {"tokenizer_class": "AnotherTokenizer"}),
        ("special_tokens_map.json", {"cls_token": "[MASK]"}),
        ("added_tokens.json", {"dog": 9}),
    ],
)
def test_transformers_reads_what_it_would_change(file, change, smallest, tmp_path):
    folder = shutil.copytree(smallest, tmp_path / "model")
    assert read_as_it_stands(folder) is not None
    path = folder / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | change))
    assert read_as_it_stands(folder) is None


@pytest.fixture(scope="module")
def smallest(tmp_path_factory):
    return write_smallest_model(tmp_path_factory.mktemp("smallest"), ["a", "cat"])
