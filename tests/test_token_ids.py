"""Every id that a table of embeddings is read at is checked when a model is loaded."""

import json
import shutil

import pytest
from tiny_model import write_smallest_model

from diffcse_jax import SentenceEncoder
from diffcse_jax.cli import main
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.models.hf import transformer_config
from diffcse_jax.models.tokenizer import (
    check_token_ids,
    has_tokenizer,
    largest_token,
    load_tokenizer,
)

WORDS = ["a", "cat", "dog", "runs"]
ROWS = 5 + len(WORDS)


@pytest.fixture(scope="module")
def smallest(tmp_path_factory):
    return write_smallest_model(tmp_path_factory.mktemp("smallest"), WORDS)


@pytest.fixture
def changed(smallest, tmp_path):
    """Makes a copy of the model whose tokenizer.json is changed in place and read as it stands."""

    def make(change):
        folder = shutil.copytree(smallest, tmp_path / "model")
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
        path = folder / "tokenizer_config.json"
        # BERT's own takes the vocabulary only
        whole = {"tokenizer_class": "PreTrainedTokenizerFast"}
        path.write_text(json.dumps(json.loads(path.read_text()) | whole))
        return folder

    return make


def with_gap(content):
    content["model"]["vocab"]["runs"] = 101


def with_added_token(content):
    added = {"id": 60, "content": "<new>", "special": False, "single_word": False}
    content["added_tokens"].append(added | {"lstrip": False, "rstrip": False, "normalized": False})


def with_template(content):
    names = {"[CLS]": 2, "[SEP]": 70}
    single = ["[CLS]", "A", "[SEP]"]
    parts = [
        {"SpecialToken" if name in names else "Sequence": {"id": name, "type_id": 0}}
        for name in single
    ]
    tokens = {
        name: {"id": name, "ids": [number], "tokens": [name]} for name, number in names.items()
    }
    pair = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    processor = {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": pair,
        "special_tokens": tokens,
    }
    content["post_processor"] = processor


def with_mask_beyond(content):
    content["model"]["vocab"]["[MASK]"] = 40
    next(each for each in content["added_tokens"] if each["content"] == "[MASK]")["id"] = 40


@pytest.mark.parametrize(
    ("change", "largest"),
    [
        (with_gap, "101 ('runs')"),
        (with_added_token, "9 ('<new>')"),
        (with_template, "70 ('[SEP]')"),
        (with_mask_beyond, "40 ('[MASK]')"),
    ],
)
def test_an_id_beyond_the_table_is_refused_at_load(change, largest, changed):
    folder = changed(change)
    with pytest.raises(CheckpointError) as raised:
        SentenceEncoder.from_pretrained(folder, pooler="avg")
    table = f"the model has {ROWS} token embeddings, for the ids 0 to {ROWS - 1}"
    assert f"largest token id is {largest}, but {table}" in str(raised.value)


def test_every_command_says_the_same(changed, tmp_path, capsys):
    folder, text = str(changed(with_gap)), tmp_path / "text.txt"
    text.write_text("a cat runs\na dog runs\n" * 20)
    model = ["--model", folder, "--pooler", "avg"]
    start = [f"--config.model.name_or_path={folder}", f"--config.data.train_file={text}"]
    for command in (
        ["encode", *model, "--input", str(text)],
        ["embed", *model, "--input", str(text), "--output", str(tmp_path / "embeddings")],
        ["search", *model, "--input", str(text), "a cat"],
        [
            "evaluate",
            *model,
            "--tasks",
            f"retrieval:{tmp_path}",
            "--output",
            str(tmp_path / "results.json"),
        ],
        ["train", "--config", "simcse_base", "--workdir", str(tmp_path / "run"), *start],
    ):
        with pytest.raises(SystemExit) as raised:
            main(command)
        assert raised.value.code == 2
        assert (
            f"error: {folder}: the tokenizer's largest token id is 101 ('runs')"
            in capsys.readouterr().err
        )


def test_ids_that_fit_are_read(changed, smallest):
    assert largest_token(load_tokenizer(smallest).backend_tokenizer) == (ROWS - 1, "runs")
    check_token_ids(load_tokenizer(smallest), ROWS, 2, "model")
    assert has_tokenizer(smallest)


def test_another_token_type_than_0_is_refused(changed):
    def second_type(content):
        with_template(content)
        processor = content["post_processor"]
        processor["special_tokens"]["[SEP]"]["ids"] = [3]
        processor["single"][1]["Sequence"]["type_id"] = 1

    folder = changed(second_type)
    SentenceEncoder.from_pretrained(folder, pooler="avg")  # transformers passes no token types here
    path = folder / "tokenizer_config.json"
    names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | names))
    with pytest.raises(
        CheckpointError, match="gives a single text the token type 1, and only type 0"
    ):
        SentenceEncoder.from_pretrained(folder, pooler="avg")


def test_positions_beyond_the_table_are_refused(smallest):
    encoder = SentenceEncoder.from_pretrained(smallest, pooler="avg")
    options = (encoder.config, encoder.params, encoder.tokenizer, encoder.recorded)
    with pytest.raises(ConfigError, match=r"max_length=41: .* reads at most 40 tokens"):
        SentenceEncoder(*options, max_length=41)
    config = json.loads((smallest / "config.json").read_text())
    roberta = config | {"model_type": "roberta", "pad_token_id": 5, "max_position_embeddings": 6}
    with pytest.raises(
        CheckpointError, match=r"max_position_embeddings is 6, but .* pad_token_id \+ 1 = 6"
    ):
        transformer_config(roberta, source="model")
