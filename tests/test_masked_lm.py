"""Pre-training a masked LM: from `diffcse init` to an exported folder, and how it is measured."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import stop_first_run

from diffcse_jax import SentenceEncoder, api
from diffcse_jax.apps.init import init
from diffcse_jax.batch import TokenRows, Vocabulary
from diffcse_jax.commands import InitOptions
from diffcse_jax.config import Config, shipped_config
from diffcse_jax.errors import CheckpointError, ConfigError, Interrupted
from diffcse_jax.evaluation.masked_lm import (
    MaskedAccuracy,
    TrainingTokens,
    guess_after,
    guess_most_frequent,
    mask,
)
from diffcse_jax.models import hf
from diffcse_jax.models.forward import Computation, Networks
from diffcse_jax.models.heads import MaskedLMHead
from diffcse_jax.models.layers import definition, prefixed
from diffcse_jax.models.tokenizer import load_tokenizer
from diffcse_jax.models.transformer import Transformer
from diffcse_jax.run_folder.records import read_metrics

VOCABULARY = Vocabulary(size=12, mask_id=4, special_ids=(0, 1, 2, 3, 4))
CLS, SEP, MASK = 2, 3, 4
SIZES = {"blocks": 2, "hidden_size": 16, "heads": 2, "vocabulary_size": 200}
WORDS = [
    "the",
    "old",
    "new",
    "cat",
    "dog",
    "bird",
    "house",
    "tree",
    "river",
    "sees",
    "finds",
    "near",
    "with",
    "red",
]


def sentences(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, 14)) + "." for _ in range(count)]


# The metric


def test_masks_are_the_same_in_each_call_and_never_special_tokens():
    texts = [[CLS, *range(5, 12), 5, 6, 7, SEP], [CLS, 8, SEP], [CLS, SEP]]
    blanks = mask(texts, VOCABULARY)
    again = mask(texts, VOCABULARY)
    assert blanks.token_ids == again.token_ids
    assert [int(np.sum(blanks.text == number)) for number in range(3)] == [2, 1, 0]
    for text, position, target in zip(blanks.text, blanks.position, blanks.target, strict=True):
        assert texts[text][position] == target >= 5
        assert blanks.token_ids[text][position] == MASK
    changed = sum(
        a != b
        for one, other in zip(texts, blanks.token_ids, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    assert changed == len(blanks.text)


def test_guesses_by_frequency_are_those_of_counting():
    ids = np.array([CLS, 5, 6, 7, SEP, CLS, 5, 6, 9, SEP, CLS, 6, 9, 7, SEP], np.uint16)
    assert guess_most_frequent(ids, VOCABULARY.special_ids) == 6
    # After CLS: 5 twice, 6 once. After 6: 9 twice, 7 once. MASK and 11 do not occur. After 7 only
    # SEP does.
    previous = np.array([CLS, 6, MASK, 11, 7])
    assert guess_after(previous, ids, VOCABULARY.special_ids).tolist() == [5, 9, 6, 6, 6]


def test_accuracy_counts_masked_tokens_and_its_interval_draws_texts():
    texts = [[CLS, *[5 + number % 7] * 10, SEP] for number in range(30)]
    store = SimpleNamespace(token_ids=np.concatenate([np.array(text) for text in texts]))
    metric = MaskedAccuracy(
        "masked_accuracy", 8, texts, TrainingTokens(None, VOCABULARY, lambda: store)
    )
    assert metric.units == "60 masked tokens of 30 texts"

    def encoder(answer):
        return SimpleNamespace(
            fill_masks=lambda token_ids, batch_size: [
                np.full(len(each), answer) for each in token_ids
            ]
        )

    measured = metric.measure(encoder(5))
    assert measured.scores["masked_accuracy"] == pytest.approx(100 * 10 / 60)  # 5 texts of 30
    assert measured.scores["masked_accuracy_unigram"] == pytest.approx(100 * 10 / 60)
    # a token follows itself, unless that is masked as well
    assert measured.scores["masked_accuracy_bigram"] > 60
    low, high = metric.interval(metric.measure(encoder(0)).outcomes, measured.outcomes)
    assert 0 < low < 100 * 10 / 60 < high
    assert "unigram 16.67" in metric.remark


# The start


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n".join(sentences(300)) + "\n")
    return file


@pytest.fixture(scope="module")
def start(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return init(InitOptions(output=tmp_path_factory.mktemp("start"), inputs=(str(text),), **SIZES))


def test_the_same_text_sizes_and_seed_give_the_same_files(text, start, tmp_path):
    again = init(InitOptions(output=tmp_path / "again", inputs=(str(text),), **SIZES))
    other = init(InitOptions(output=tmp_path / "other", inputs=(str(text),), **SIZES, seed=1))
    names = sorted(path.name for path in start.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (start / name).read_bytes() == (again / name).read_bytes(), name
    assert (start / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    model = hf.read(str(start), needs_mlm_head=True)
    assert (model.config.num_blocks, model.config.hidden_size, model.config.num_heads) == (2, 16, 2)
    for array in (
        model.transformer["blocks.1.intermediate.kernel"],
        model.transformer["embeddings.word.embedding"],
    ):
        assert array.std() == pytest.approx(0.02, rel=0.1)
    tokenizer = load_tokenizer(start)
    assert tokenizer.all_special_ids == [0, 1, 2, 3, 4] or set(tokenizer.all_special_ids) == {
        0,
        1,
        2,
        3,
        4,
    }
    assert tokenizer.tokenize("The OLD cat") == ["the", "old", "cat"]
    assert len(tokenizer) == model.config.vocab_size <= 200


def test_the_first_blocks_of_a_checkpoint_keep_their_weights_and_head(start, tmp_path):
    cut = hf.read(str(init(InitOptions(output=tmp_path / "cut", model=str(start), blocks=1))))
    whole = hf.read(str(start))
    assert cut.config == dataclasses.replace(
        whole.config, num_blocks=1, hidden_dropout=(0.1,), attention_dropout=(0.1,)
    )
    assert {name.split(".")[1] for name in cut.transformer if name.startswith("blocks")} == {"0"}
    for name, array in cut.transformer.items():
        np.testing.assert_array_equal(array, whole.transformer[name])
    for name, array in cut.mlm_head.items():
        np.testing.assert_array_equal(array, whole.mlm_head[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"give --input for a new model of random weights, or --model"),
        ({"model": "minilm", "blocks": 7}, r"--blocks=7: minilm has 6 blocks"),
        ({"model": "minilm", "blocks": 3, "heads": 2}, r"--heads is that of --model"),
        ({"inputs": ("-",)}, r"the text is read twice"),
        (
            {"inputs": ("{text}",), "vocabulary_size": 10},
            r"--vocabulary_size=10: the text has \d+ characters",
        ),
        (
            {"inputs": ("{text}",), "hidden_size": 15},
            r"4 attention heads cannot share a hidden size of 15",
        ),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(
    options: dict[str, Any], message, text, tmp_path
):
    if "inputs" in options:
        options = options | {"inputs": tuple(each.format(text=text) for each in options["inputs"])}
    with pytest.raises((ConfigError, CheckpointError), match=message):
        init(InitOptions(output=tmp_path / "out", **{"blocks": 4} | options))
    assert not (tmp_path / "out").exists()


def test_a_folder_with_content_is_not_replaced(start):
    with pytest.raises(CheckpointError, match=r"is not an empty folder"):
        init(InitOptions(output=start, model="minilm", blocks=1))


# The run


def run(workdir: Path, start: Path, text: Path, **others: Any) -> str:
    config = shipped_config("masked_lm")
    config.update_from_flattened_dict(
        {
            "model.name_or_path": str(start), "data.train_file": str(text), "data.cache_dir": str(text.parent / "cache"),
            "data.max_length": 24, "data.held_out": 0.1, "train.batch_size": 16, "train.chunk_size": 8, "train.steps": 6,
            "eval.every": 3, "optim.learning_rate": 1e-2, "optim.warmup_steps": 2, "train.recompute": "off", **others,
        }
    )  # fmt: skip
    return api.run(Config.from_dict(config.to_dict()), workdir)


@pytest.fixture(scope="module")
def trained(start: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("trained")
    verdict = run(workdir, start, text)
    better = f"Training helped: the trained model is better than {start} as a masked LM.\n"
    assert verdict.startswith(f"{better}  masked_accuracy ")
    assert "Guesses by frequency get unigram" in verdict
    assert verdict.endswith("This metric does not compare sentence embeddings.")
    return workdir


@pytest.mark.slow
def test_the_rows_show_loss_accuracy_and_both_guesses(trained):
    rows = read_metrics(trained)
    steps = [row for row in rows if "loss" in row]
    assert steps[-1]["loss_mlm"] < steps[0]["loss_mlm"]
    assert 0 <= steps[-1]["mlm_accuracy"] <= 1
    assert "similarity_positive" not in steps[-1]
    measured = [row for row in rows if "dev/masked_accuracy" in row]
    assert [row["step"] for row in measured] == [0, 3, 6]
    names = {"dev/masked_accuracy_unigram", "dev/masked_accuracy_bigram"}
    assert all(names <= row.keys() for row in measured)
    assert len({row["dev/masked_accuracy_bigram"] for row in measured}) == 1


@pytest.mark.slow
def test_an_interrupted_run_ends_as_an_uninterrupted_one(
    trained, start, text, tmp_path, monkeypatch
):
    stop_first_run(monkeypatch)
    with pytest.raises(Interrupted):
        run(tmp_path, start, text)
    run(tmp_path, start, text)
    assert (tmp_path / "export/model.safetensors").read_bytes() == (
        trained / "export/model.safetensors"
    ).read_bytes()
    losses = [
        [row["loss"] for row in read_metrics(workdir) if "loss" in row]
        for workdir in (trained, tmp_path)
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_export_is_a_masked_lm_of_transformers_with_equal_logits(trained):
    import torch
    import transformers

    folder = trained / "export"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    model, loading = transformers.AutoModelForMaskedLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    tokenizer = load_tokenizer(folder)
    ids = tokenizer("the old cat sees the [MASK] near the [MASK] tree.")["input_ids"]
    with torch.inference_mode():
        logits = model.eval()(torch.tensor([ids])).logits[0].numpy()

    exported = hf.read(str(folder), needs_mlm_head=True)
    builds = {
        "transformer": partial(Transformer, exported.config),
        "mlm_head": partial(MaskedLMHead, exported.config),
    }
    networks = Networks(VOCABULARY, {name: definition(build) for name, build in builds.items()})
    params = jax.device_put(
        prefixed(exported.transformer, "transformer") | prefixed(exported.mlm_head, "mlm_head")
    )
    computation = Computation(networks, params, devices=1)
    rows = TokenRows(jnp.array([ids], jnp.int32), jnp.ones((1, len(ids)), jnp.int32))
    states = computation.network("transformer")(rows)[-1]
    ours = computation.network("mlm_head")(
        states[0], params["transformer.embeddings.word.embedding"]
    )
    np.testing.assert_allclose(ours, logits, atol=1e-5)

    (filled,) = SentenceEncoder.from_pretrained(folder).fill_masks([ids])
    masked = np.array(ids) == tokenizer.mask_token_id
    np.testing.assert_array_equal(filled, np.where(masked, logits.argmax(axis=-1), 0))
    assert masked.sum() == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*largely of words")  # of STS, which the tiny vocabulary lacks
def test_the_export_continues_and_generates(trained, text, tmp_path):
    exported = hf.read(str(trained / "export"), needs_mlm_head=True)
    run(
        tmp_path / "more",
        trained / "export",
        text,
        **{"train.steps": 1, "optim.learning_rate": 1e-9},
    )
    more = hf.read(str(tmp_path / "more/export"))
    for name, array in more.mlm_head.items():  # its own head, and not a new one
        np.testing.assert_allclose(array, exported.mlm_head[name], atol=1e-6)
    both = {
        "model.name_or_path": str(trained / "export"),
        "generator.name_or_path": str(trained / "export"),
    }
    small = {"train.steps": 1, "train.batch_size": 8, "data.max_length": 24, "eval.every": 0}
    found = api.train(
        str(text), "diffcse_base", workdir=tmp_path / "diffcse", overrides=both | small
    )
    (row,) = [row for row in found.history if "loss" in row]
    assert 0 < row["rtd_share_kept"] < 1
    assert row["loss"] > 0


@pytest.mark.slow
def test_the_card_says_what_the_model_is_for(trained):
    card = (trained / "export/README.md").read_text()
    assert "pipeline_tag: fill-mask" in card
    assert "A masked LM of the class `BertForMaskedLM`" in card
    assert "Its sentence embeddings are a start, not a result." in card
    assert "diffcse train --config masked_lm" in card
    assert "devlin2019bert" in card
    assert "SentenceTransformer" not in card
    assert "simcse" not in card.lower()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.pairs": "lead"}, r"data.pairs='lead' makes pairs, but mlm compares no texts"),
        ({"data.augmentation": "crop"}, r"data.augmentation='crop' changes second views"),
        (
            {"mlm.tied": False},
            r"eval.metric='masked_accuracy' needs a masked LM. Set mlm.weight > 0 and mlm.tied=True",
        ),
        ({"data.held_out": 0.0}, r"eval.metric='masked_accuracy' needs held-out documents"),
    ],
)
def test_settings_that_cannot_work_are_named(changes, message):
    config = shipped_config("masked_lm")
    config.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=message):
        Config.from_dict(config.to_dict())
