"""Every setting of a sentence-transformers folder is honoured, without effect, or refused.

`SETTINGS` lists, for each file, what sentence-transformers and the tokenizers write. Each entry is a
change to a folder, and what it does to embeddings and similarities.
"""

import functools
import inspect
import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import (
    Dropout,
    LayerNorm,
    Pooling,
    WeightedLayerPooling,
)
from tiny_model import HIDDEN, write_smallest_model

from diffcse_jax import SentenceEncoder
from diffcse_jax.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings(
    *("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:truncated"),
    *("ignore:.*was trained with prompts", "ignore:.*largely of words"),
)

WORDS = [*"abcdefgh", "cat", "Cat", "dog", "dogs", "##s", "caf", "##e", "##\u00e9", "\u732b"]
TEXTS = ["a b Cat dogs cats c d e f g h " * 3 + "dog", "Cat", "caf\u00e9 cafe", "\u732b\u732b", ""]

HONOURED, NO_EFFECT, REFUSED = "honoured", "without effect", "refused"
MODULE = "sentence_bert_config.json"
TOKENIZER = "tokenizer_config.json"
BACKEND = "tokenizer.json"
MAP = "special_tokens_map.json"
MODEL = "config_sentence_transformers.json"
LIST = "modules.json"
LAYERS = "1_WeightedLayerPooling/config.json"
REMOVED = "(removed)"


def call(**arguments):
    return {"processing_kwargs": {"text": arguments}}


def keys_of(values):
    """Return the keys of arguments of a call, or else those of the settings."""
    arguments = values.get("processing_kwargs", values)
    inside = [*arguments.values()] if isinstance(arguments, dict) else [{}]
    is_call = arguments is not values and isinstance(inside[0], dict)
    return [*values, *(inside[0] if is_call else [])]


def mode(key):
    return {f"pooling_mode_{key}": True, "pooling_mode": REMOVED}


QUERY_EXPANSION = {"query_expansion": {"strategy": "fixed", "length": 8}}
AS_MESSAGE = {"modality_config": {"message": {"method": "forward", "method_output_name": "x"}}}
WHOLE_WORD = {"content": "cat", "special": True, "normalized": False, "single_word": False}
WHOLE_WORD |= {"lstrip": False, "rstrip": False}

SETTINGS = {
    MODEL: [
        (NO_EFFECT, {"__version__": {"sentence_transformers": "4.0.0"}}),
        (NO_EFFECT, {"requirements": {"transformers": ">=4"}}),
        (NO_EFFECT, {"prompts": {"query": "dog "}}),
        (HONOURED, {"prompts": {"query": "dog "}, "default_prompt_name": "query"}),
        (HONOURED, {"similarity_fn_name": "manhattan"}),
        (HONOURED, {"truncate_dim": 8}),
        (REFUSED, {"model_type": "SparseEncoder"}),
    ],
    MODULE: [
        (HONOURED, {"max_seq_length": 16}),
        (HONOURED, {"max_seq_length": 40}),
        (HONOURED, {"do_lower_case": True}),
        (HONOURED, call(max_length=16)),
        (HONOURED, call(max_length=40)),
        (HONOURED, {"processing_kwargs": {"common": {"max_length": 16}}}),
        (HONOURED, {"processing_kwargs": {"text": {"max_length": 16}}, "max_seq_length": 40}),
        *((NO_EFFECT, call(padding=value)) for value in (True, "longest", "max_length")),
        (NO_EFFECT, call(padding_side="right")),
        (REFUSED, call(padding_side="left")),  # with absolute positions, it moves each text
        (NO_EFFECT, call(pad_to_multiple_of=8)),
        (NO_EFFECT, call(stride=2)),
        (NO_EFFECT, call(verbose=False)),
        (NO_EFFECT, call(logits_to_keep=2)),
        (NO_EFFECT, call(return_token_type_ids=False)),
        *((NO_EFFECT, call(truncation=value)) for value in (True, "longest_first", "only_first")),
        *((REFUSED, call(truncation=value)) for value in (False, "do_not_truncate", "only_second")),
        (NO_EFFECT, call(add_special_tokens=True)),
        (REFUSED, call(add_special_tokens=False)),
        (REFUSED, {"processing_kwargs": {"common": {"add_special_tokens": False}}}),
        (REFUSED, call(is_split_into_words=True)),
        (REFUSED, call(split_special_tokens=True)),
        (NO_EFFECT, call(return_tensors="pt")),
        (REFUSED, call(return_tensors="np")),
        (REFUSED, call(return_attention_mask=False)),
        (REFUSED, call(return_overflowing_tokens=True)),
        (REFUSED, call(return_special_tokens_mask=True)),
        (REFUSED, call(return_offsets_mapping=True)),
        (REFUSED, call(return_length=True)),
        (REFUSED, call(truncation_side="left")),  # not an argument
        (REFUSED, call(max_length=1)),
        (REFUSED, call(max_length="16")),
        (REFUSED, {"processing_kwargs": {"words": {"max_length": 16}}}),
        (REFUSED, {"processing_kwargs": [1]}),
        *(
            (NO_EFFECT, {"processing_kwargs": {kind: {"max_length": 3}}})
            for kind in ("audio", "image", "video", "chat_template")
        ),
        (NO_EFFECT, {"transformer_task": "feature-extraction"}),
        (REFUSED, {"transformer_task": "fill-mask"}),
        (NO_EFFECT, {"module_output_name": "token_embeddings"}),
        (REFUSED, {"module_output_name": "sentence_embedding"}),
        (REFUSED, AS_MESSAGE),
        (NO_EFFECT, {"unpad_inputs": False}),
        (NO_EFFECT, {"backend": "onnx"}),
        *((REFUSED, {key: 16}) for key in ("query_length", "document_length")),
        *((NO_EFFECT, {key: None}) for key in ("query_length", "document_length")),
        (REFUSED, QUERY_EXPANSION),
        (REFUSED, {"tokenizer_name_or_path": "another"}),
        *((NO_EFFECT, {key: {}}) for key in ("model_args", "tokenizer_args", "config_args")),
        (REFUSED, {"model_args": {"dtype": "float16"}}),
        (REFUSED, {"model_kwargs": {"dtype": "float16"}}),
        (REFUSED, {"tokenizer_args": {"truncation_side": "left"}}),
        (REFUSED, {"processor_kwargs": {"truncation_side": "left"}}),
        (REFUSED, {"config_args": {"num_hidden_layers": 1}}),
        (REFUSED, {"config_kwargs": {"num_hidden_layers": 1}}),
        (REFUSED, {"a_later_setting": 1}),
    ],
    TOKENIZER: [
        (HONOURED, {"truncation_side": "left"}),
        (HONOURED, {"model_max_length": 16}),
        (HONOURED, {"model_max_length": REMOVED, "max_len": 16}),
        (REFUSED, {"split_special_tokens": True}),
        (HONOURED, {"do_lower_case": True}),
        (HONOURED, {"strip_accents": True}),
        (HONOURED, {"tokenize_chinese_chars": False}),
        (HONOURED, {"cls_token": "[MASK]"}),
        (HONOURED, {"sep_token": "[MASK]"}),
        (NO_EFFECT, {"unk_token": "[MASK]"}),
        (NO_EFFECT, {"pad_token": "[MASK]"}),
        (NO_EFFECT, {"mask_token": "[PAD]"}),
        (HONOURED, {"extra_special_tokens": ["dog"]}),
        (HONOURED, {"additional_special_tokens": ["dog"]}),
        (HONOURED, {"added_tokens_decoder": {"13": WHOLE_WORD}}),
        (NO_EFFECT, {"padding_side": "left"}),  # of a text alone
        (NO_EFFECT, {"model_input_names": ["input_ids", "attention_mask"]}),
        (NO_EFFECT, {"pad_token_type_id": 1}),
        *(
            (NO_EFFECT, {key: 8})
            for key in ("max_length", "stride", "pad_to_multiple_of")  # of the file that was read
        ),
        (NO_EFFECT, {"truncation_strategy": "only_second"}),
        (NO_EFFECT, {"clean_up_tokenization_spaces": True}),
        (NO_EFFECT, {"chat_template": "{{ messages }}"}),
        (NO_EFFECT, {"tokenizer_class": "BertTokenizerFast"}),
        *(
            (NO_EFFECT, {key: True})
            for key in ("do_basic_tokenize", "is_local", "local_files_only", "verbose")
        ),
        *((NO_EFFECT, {key: "x"}) for key in ("name_or_path", "never_split", "processor_class")),
        (NO_EFFECT, {"backend": "tokenizers"}),
    ],
    BACKEND: [
        (HONOURED, {"truncation": {"direction": "Left"}}),
        (NO_EFFECT, {"truncation": {"max_length": 8}}),
        (NO_EFFECT, {"truncation": {"stride": 4}}),
        (NO_EFFECT, {"truncation": {"strategy": "OnlyFirst"}}),
        (NO_EFFECT, {"padding": {"strategy": {"Fixed": 32}}}),
        (NO_EFFECT, {"padding": {"direction": "Left"}}),
        (NO_EFFECT, {"padding": {"pad_to_multiple_of": 8}}),
        (NO_EFFECT, {"padding": {"pad_id": 4, "pad_token": "[MASK]", "pad_type_id": 1}}),
    ],
    MAP: [
        (HONOURED, {"cls_token": "[MASK]"}),
        (NO_EFFECT, {"unk_token": "[MASK]"}),
        (NO_EFFECT, {"pad_token": "[MASK]"}),
    ],
    LIST: [
        (NO_EFFECT, {"idx": 7}),
        (NO_EFFECT, {"name": "first"}),
        (REFUSED, {"name": "1"}),  # also the name of another module
        (NO_EFFECT, {"kwargs": ["task"]}),
        (REFUSED, {"path": ".."}),
        (REFUSED, {"type": "sentence_transformers.models.Router"}),
    ],
    "1_Pooling/config.json": [
        (NO_EFFECT, {"embedding_dimension": 99}),
        (HONOURED, {"pooling_mode": "max"}),
        (HONOURED, mode("cls_token")),
        (HONOURED, mode("max_tokens")),
        (NO_EFFECT, mode("mean_tokens")),
        (HONOURED, mode("mean_sqrt_len_tokens")),
        (HONOURED, mode("weightedmean_tokens")),
        (HONOURED, mode("lasttoken")),
        (REFUSED, {"pooling_mode": "median"}),
        (REFUSED, {"include_prompt": False}),
    ],
    "2_Dense/config.json": [
        (HONOURED, {"activation_function": "torch.nn.modules.activation.ReLU"}),
        (REFUSED, {"activation_function": "another.library.ReLU"}),
        (REFUSED, {"in_features": 8}),
        (REFUSED, {"out_features": 8}),
        (REFUSED, {"bias": "yes"}),
        (REFUSED, {"module_input_name": "token_embeddings"}),
        (REFUSED, {"module_output_name": "token_embeddings"}),
        (REFUSED, {"use_residual": True}),
    ],
    "3_LayerNorm/config.json": [(REFUSED, {"dimension": 8})],
    "4_Dropout/config.json": [(NO_EFFECT, {"dropout": 0.9})],
    "5_Normalize/config.json": [
        (REFUSED, {"module_input_name": "token_embeddings"}),
        (REFUSED, {"module_output_name": "token_embeddings"}),
    ],
}
ENTRIES = [(name, *entry) for name, entries in SETTINGS.items() for entry in entries]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A folder with every module that is read, whose tokenizer does not put text into lower case."""
    plain = write_smallest_model(tmp_path_factory.mktemp("plain"), WORDS)
    folder = tmp_path_factory.mktemp("start")
    torch.manual_seed(0)
    tail = [Dense(HIDDEN, HIDDEN), LayerNorm(HIDDEN), Dropout(0.1), Normalize()]
    modules = [Transformer(str(plain)), Pooling(HIDDEN, "mean"), *tail]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder))
    change(folder, TOKENIZER, {"do_lower_case": False, "model_max_length": 24})
    limits = {"direction": "Right", "max_length": 512, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}
    change(folder, BACKEND, {"truncation": limits, "padding": padding})
    return folder


def change(folder, name, values):
    """Change a JSON file in place: entries that are objects are merged."""
    path = folder / name
    content = json.loads(path.read_text()) if path.is_file() else {}
    settings = content[0] if name == LIST else content
    for key, value in values.items():
        if value == REMOVED:
            del settings[key]
        elif name == BACKEND and settings[key]:
            settings[key] |= value
        else:
            settings[key] = value
    path.write_text(json.dumps(content))


@functools.cache
def by_both(folder):
    """Return embeddings and similarities by both libraries, each text encoded alone."""
    theirs = SentenceTransformer(str(folder), device="cpu")
    expected = np.stack([theirs.encode(text) for text in TEXTS])
    similarities = theirs.similarity(expected, expected).numpy()
    encoder = SentenceEncoder.from_pretrained(folder)
    computed = np.stack([encoder.encode(text) for text in TEXTS])
    ours = np.concatenate([computed, encoder.similarity(computed, computed)], 1)
    return ours, np.concatenate([expected, similarities], 1)


@pytest.mark.parametrize(
    ("name", "outcome", "values"), ENTRIES, ids=lambda value: json.dumps(value, default=str)
)
def test_a_setting_does_what_the_list_says(name, outcome, values, start, tmp_path):
    folder = shutil.copytree(start, tmp_path / "model")
    change(folder, name, values)
    if outcome == REFUSED:
        key = [*keys_of(values)][-1] if name == MODULE else name.partition("/")[0]
        with pytest.raises(CheckpointError, match=key):
            SentenceEncoder.from_pretrained(folder)
        return
    ours, theirs = by_both(folder)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    before, _ = by_both(start)
    is_same = ours.shape == before.shape and np.allclose(ours, before, atol=1e-4)
    assert is_same == (outcome == NO_EFFECT)


def test_the_list_has_every_setting_that_is_written(start):
    listed = {name: {key for _, values in SETTINGS[name] for key in values} for name in SETTINGS}
    of_call = {key for _, values in SETTINGS[MODULE] for key in keys_of(values)}
    written = {MODEL: set(SentenceTransformer(str(start), device="cpu")._get_model_config())}
    constructor = set(inspect.signature(Transformer.__init__).parameters)
    written[MODULE] = {*Transformer.config_keys, *constructor} - {"self", "model_name_or_path"}
    written[LIST] = {*json.loads((start / LIST).read_text())[0]}
    written[TOKENIZER] = {*json.loads((start / TOKENIZER).read_text())}
    for place, module in enumerate((Pooling, Dense, LayerNorm, Dropout, Normalize), 1):
        written[f"{place}_{module.__name__}/config.json"] = {*module.config_keys}
    for name, keys in written.items():
        assert keys <= listed[name], (name, keys - listed[name])
    pair = {"text", "text_pair", "text_target", "text_pair_target", "tokenizer_kwargs"}
    arguments = inspect.signature(transformers.PreTrainedTokenizerBase.__call__).parameters
    assert {*arguments} - {"self", "kwargs"} - pair <= of_call
    assert {
        "text", "common", "audio", "image", "video", "chat_template"
    } == Transformer._VALID_PROCESSING_KWARGS_KEYS  # fmt: skip


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        (LAYERS, {"embedding_dimension": 99}, ""),
        (LAYERS, {"layer_start": 1}, "these layer weights are not supported"),
        (LAYERS, {"num_hidden_layers": 2}, "no floating-point tensor layer_weights"),
        ("config.json", {"output_hidden_states": False}, "output_hidden_states is not true"),
    ],
)
def test_settings_of_a_mean_of_layers(file, values, message, start, tmp_path):
    folder = tmp_path / "model"
    plain = Transformer(str(start), config_kwargs={"output_hidden_states": True})
    weights = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    layers = WeightedLayerPooling(HIDDEN, 1, 0, weights)
    modules = [plain, layers, Pooling(HIDDEN, "mean")]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder))
    change(folder, file, values)
    if not message:
        np.testing.assert_allclose(*by_both(folder), atol=1e-4)
        return
    with pytest.raises(CheckpointError, match=message):
        SentenceEncoder.from_pretrained(folder)
