"""Weights from and to Hugging Face checkpoints, and the networks they make, against PyTorch."""

import fnmatch
import json
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_model import bound, hf_config_of, random_torch_model

from diffcse_jax.batch import TokenRows
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.io import write_sealed, write_tensors
from diffcse_jax.models import files, hf, layers
from diffcse_jax.models.families import nomic_bert
from diffcse_jax.models.families.mpnet import relative_buckets
from diffcse_jax.models.heads import MaskedLMHead, MlpProjector, RecordedHead, ReplacedTokenHead
from diffcse_jax.models.hf import Pretrained, read, to_hf
from diffcse_jax.models.sentence_folder import RecordedPooler, recorded, with_pooler
from diffcse_jax.models.transformer import Transformer
from diffcse_jax.run_folder.start import is_local

VOCAB, HIDDEN, LENGTH = 50, 24, 9
TESTED = sorted({*hf.FAMILIES} - {"camembert", "xlm-roberta"})  # which are RoBERTa
# An activation, a number of blocks and of heads to try.
MODELS = {
    "bert": ("gelu", 2, 4),
    "roberta": ("relu", 1, 8),
    "distilbert": ("gelu_pytorch_tanh", 2, 2),
    "mpnet": ("gelu", 3, 3),
    "modernbert": ("silu", 3, 3),
    "electra": ("gelu_new", 1, 3),
    "nomic_bert": ("silu", 1, 3),
    "gte": ("relu", 2, 3),
}


def small_model(family: str, activation: str = "gelu", blocks: int = 2, heads: int = 4, **values):
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_attention_heads": heads,
        "num_hidden_layers": blocks,
    }
    names = {
        "distilbert": ("activation", "hidden_dim"),
        "modernbert": ("hidden_activation", "intermediate_size"),
    }
    of_activation, of_units = names.get(family, ("hidden_act", "intermediate_size"))
    sizes |= {of_activation: activation, of_units: 40, "max_position_embeddings": LENGTH + 4}
    # with windows that sentences exceed; Ettin's encoders have such a type of positions
    if family == "modernbert":
        sizes |= {"local_attention": 6, "pad_token_id": 0, "position_embedding_type": "sans_pos"}
    if family == "electra":
        sizes |= {"embedding_size": 10}
    return random_torch_model(family, **sizes | values)


def saved(model: transformers.PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def tokens(pad_token_id: int) -> tuple[TokenRows, dict[str, torch.Tensor], np.ndarray]:
    """Random token ids of ragged lengths, for JAX and for PyTorch, and where they are not padding."""
    mask = (np.arange(LENGTH) < np.array([LENGTH, 4, 1, 6])[:, None]).astype(np.int32)
    ids = np.where(
        mask == 1, np.random.default_rng(1).integers(4, VOCAB, mask.shape), pad_token_id
    ).astype(np.int32)
    theirs = {
        "input_ids": torch.tensor(ids, dtype=torch.long),
        "attention_mask": torch.tensor(mask),
    }
    return TokenRows(jnp.asarray(ids), jnp.asarray(mask)), theirs, mask == 1


def hidden_states(checkpoint: Pretrained, rows: TokenRows, **options) -> tuple[jax.Array, ...]:
    return bound(Transformer, checkpoint.config, checkpoint.transformer)(rows, **options)


def assert_close(ours, theirs, where=np.s_[:], **tolerance) -> None:
    assert len(ours) == len(theirs)
    for array, expected in zip(ours, theirs, strict=True):
        expected = expected.detach().numpy()
        np.testing.assert_allclose(
            np.asarray(array)[where], expected[where], **({"rtol": 0, "atol": 1e-5} | tolerance)
        )


def assert_same(checkpoint: Pretrained, expected: Pretrained, **tolerance) -> None:
    for part in ("transformer", "mlm_head"):
        ours, theirs = getattr(checkpoint, part), getattr(expected, part)
        assert ours.keys() == theirs.keys()
        for name, array in ours.items():
            assert array.dtype == np.float32
            np.testing.assert_allclose(
                array, theirs[name], err_msg=name, **({"rtol": 0} | tolerance)
            )


def assert_round_trip(checkpoint: Pretrained, model: transformers.PreTrainedModel) -> None:
    """From Hugging Face to JAX and back, and once more through a file, no bit changes."""
    exported = {}
    for part in ("transformer", "pooler", "mlm_head", "discriminator_head"):
        params = getattr(checkpoint, part)
        exported |= {} if params is None else to_hf(params, part, checkpoint.config)
    stored = load_file(checkpoint.folder / "model.safetensors")
    original = {
        name.removeprefix(f"{model.base_model_prefix}."): tensor.numpy()
        for name, tensor in stored.items()
    }
    assert exported.keys() == original.keys()
    for name, array in exported.items():
        np.testing.assert_array_equal(array, original[name], err_msg=name)
    write_tensors(checkpoint.folder / "model.safetensors", exported)
    assert read(str(checkpoint.folder)).digest() == checkpoint.digest()


@pytest.mark.parametrize("family", TESTED)
def test_hidden_states_gradients_and_pooler_are_those_of_torch(tmp_path, family):
    model = small_model(family, *MODELS[family])
    checkpoint = read(str(saved(model, tmp_path)))
    rows, inputs, real = tokens(model.config.pad_token_id)
    # The loss reads padding too, as replaced-token detection does.
    weights = np.random.default_rng(2).normal(size=(*real.shape, HIDDEN)).astype(np.float32)
    if checkpoint.config.windows:  # padding that sees no token has other values in PyTorch
        weights *= real[..., None]

    def loss(params: layers.Params):
        states = bound(Transformer, checkpoint.config, params)(rows)
        return (states[-1] * weights).mean(), states

    gradients, states = jax.jit(jax.grad(loss, has_aux=True))(checkpoint.transformer)
    output = model(**inputs, output_hidden_states=True)
    (output.last_hidden_state * torch.tensor(weights)).mean().backward()
    assert_close(states, output.hidden_states, real)
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    theirs = load_file(saved(model, tmp_path / "gradients") / "model.safetensors")
    ours = to_hf(gradients, "transformer", checkpoint.config)
    assert ours.keys() == {name for name in theirs if not name.startswith("pooler")}
    assert_close(ours.values(), [theirs[name] for name in ours], rtol=1e-4, atol=1e-6)
    words = next(name for name in ours if re.search(r"(word|tok)_embeddings\.weight", name))
    assert not ours[words][model.config.pad_token_id].any()
    if checkpoint.config.position_offset:
        assert not ours["embeddings.position_embeddings.weight"][model.config.pad_token_id].any()
    if not hf.FAMILIES[family].pooler:
        assert checkpoint.pooler is None
    else:
        pooler = bound(MlpProjector, checkpoint.config, checkpoint.pooler)
        assert_close([pooler(states[-1][:, 0])], [output.pooler_output])
    assert_round_trip(checkpoint, model)


@pytest.mark.parametrize(
    ("family", "kind"), [*((each, "ForMaskedLM") for each in TESTED), ("electra", "ForPreTraining")]
)
def test_masked_lm_and_replaced_token_logits_are_those_of_torch(tmp_path, family, kind):
    # some heads have gelu whatever the blocks have
    model = small_model(family, "relu", blocks=1, head=kind)
    checkpoint = read(str(saved(model, tmp_path)), needs_mlm_head=kind == "ForMaskedLM")
    rows, inputs, real = tokens(model.config.pad_token_id)
    states = hidden_states(checkpoint, rows)[-1]
    if kind == "ForMaskedLM":
        words = jnp.asarray(checkpoint.transformer["embeddings.word.embedding"])
        logits = bound(MaskedLMHead, checkpoint.config, checkpoint.mlm_head)(states, words)
    else:
        two = bound(ReplacedTokenHead, checkpoint.config, checkpoint.discriminator_head)(states)
        logits = two[..., 1] - two[..., 0]
    assert_close(
        [logits], [model(**inputs).logits], real, rtol=1e-5 if kind == "ForMaskedLM" else 0
    )
    assert checkpoint.pooler is None
    assert_round_trip(checkpoint, model)


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_sizes_and_rates_are_those_of_the_config_file(family):
    values = small_model(family, "relu", blocks=3, heads=2).config.to_dict()
    values |= dict.fromkeys(
        ("dropout", "hidden_dropout_prob", "embedding_dropout", "mlp_dropout"), 0.2
    )
    values |= {"attention_dropout": 0.3, "attention_probs_dropout_prob": 0.3}
    if family == "nomic_bert":  # the authors' first names
        assert nomic_bert.as_nomic_bert({"activation_function": "geglu"})["hidden_act"] == "gelu"
        names = nomic_bert.FIRST_KEYS.items()
        values = nomic_bert.as_nomic_bert(
            {first: values.pop(name) for first, name in names if name in values} | values
        )
    config = hf.transformer_config(values, source="test")
    assert (config.family, config.activation, config.num_blocks, config.num_heads) == (
        family,
        "relu",
        3,
        2,
    )
    assert (config.embedding_dropout, config.hidden_dropout, config.attention_dropout) == (
        0.2,
        (0.2,) * 3,
        (0.3,) * 3,
    )
    from_2 = family in ("roberta", "xlm-roberta", "camembert", "mpnet")
    assert config.max_length == LENGTH + 4 - 2 * from_2


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_sizes_that_the_config_file_states_are_those_that_transformers_reads(family):
    values = transformers.CONFIG_MAPPING[family](pad_token_id=1).to_diff_dict()
    stated = hf._stated_sizes(values, hf.FAMILIES[family])
    assert stated == hf._checked_sizes(hf._completed(values), hf.FAMILIES[family])
    del values["vocab_size"]
    assert hf._stated_sizes(values, hf.FAMILIES[family]) is None


def test_gte_checkpoints_of_the_authors_have_other_names_and_another_scaling_of_positions(tmp_path):
    factor, head_size = 8.0, HIDDEN // 3
    values = {
        "type_vocab_size": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0 * factor},
    }
    model = small_model("gte", blocks=2, heads=3, **values)
    # The formula of their code (its comments number it 6 in kexue.fm/archives/9706).
    exponents = torch.arange(0, head_size, 2).float() / head_size
    model.rotary_emb.inv_freq = 1.0 / (20_000.0 * factor) ** exponents / factor ** (2 / head_size)
    file, path = saved(model, tmp_path) / "model.safetensors", tmp_path / "config.json"
    save_file(
        {f"new.{name}": tensor for name, tensor in load_file(file).items()}
        | {"classifier.bias": torch.zeros(2)},
        file,
    )
    config = json.loads(path.read_text()) | {
        "model_type": "new",
        "architectures": ["NewForTokenClassification"],
    }
    del config["rope_parameters"]
    config |= {
        "rope_theta": 20_000,
        "rope_scaling": {"type": "ntk", "factor": factor},
        "unpad_inputs": "true",
    }
    config |= {"position_embedding_type": "rope", "pack_qkv": True, "logn_attention_scale": False}
    path.write_text(json.dumps(config))
    checkpoint = read(str(tmp_path))
    rows, inputs, real = tokens(model.config.pad_token_id)
    assert_close(
        hidden_states(checkpoint, rows),
        model(**inputs, output_hidden_states=True).hidden_states,
        real,
    )
    # What is exported, transformers reads.
    write_tensors(file, to_hf(checkpoint.transformer, "transformer", checkpoint.config))
    path.write_text(json.dumps(checkpoint.hf_config))
    theirs = transformers.AutoModel.from_pretrained(tmp_path)(**inputs, output_hidden_states=True)
    assert_close(hidden_states(checkpoint, rows), theirs.hidden_states, real)
    path.write_text(json.dumps(config | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}))
    assert_refused(tmp_path, "config.json: rope_scaling must be None, not")
    path.write_text(json.dumps(config | {"rope_scaling": {"type": "ntk"}}))
    assert_refused(tmp_path, "config.json is invalid: KeyError.'factor'")


def test_buckets_of_relative_positions_are_those_of_torch():
    count = 300  # beyond 128 positions, all distances share a bucket
    positions = torch.arange(count)
    of_torch = transformers.models.mpnet.modeling_mpnet.MPNetEncoder.relative_position_bucket
    np.testing.assert_array_equal(
        relative_buckets(count), of_torch(positions[None] - positions[:, None]).numpy()
    )


# --- other ways to store the same tensors ---


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    """A small BERT with its masked-LM head."""
    return saved(small_model("bert", blocks=2, head="ForMaskedLM"), tmp_path_factory.mktemp("bert"))


@pytest.fixture
def folder(bert, tmp_path) -> Path:
    """A copy of it to spoil."""
    return shutil.copytree(bert, tmp_path / "model")


def rewrite(folder: Path, change) -> None:
    """Stores the checkpoint's tensors as `change` returns them."""
    file = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file)


def assert_refused(folder: Path, message: str, **options) -> str:
    with pytest.raises(CheckpointError, match=message) as raised:
        read(str(folder), **options)
    return str(raised.value)


def test_a_family_that_transformers_does_not_know_is_told_to_convert_its_configuration(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(hf.FAMILIES, "mine", hf.FAMILIES["bert"])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine"}))
    message = assert_refused(tmp_path, r"does not know the model_type 'mine'")
    assert message.endswith(
        "add a function to CONVERTED in diffcse_jax/models/hf.py (docs/extending.md)"
    )


def test_a_sharded_checkpoint_is_read(bert, tmp_path):
    transformers.BertForMaskedLM.from_pretrained(bert).save_pretrained(
        tmp_path, max_shard_size="10KB"
    )
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert_same(read(str(tmp_path)), read(str(bert)))
    # transformers would save it so, too
    shutil.copy(bert / "model.safetensors", tmp_path / "model.safetensors")
    next(tmp_path.glob("model-00002*.safetensors")).unlink()
    assert_same(read(str(tmp_path)), read(str(bert)))
    (tmp_path / "model.safetensors").unlink()
    assert_refused(tmp_path, r"index.json names 'model-00002-of.*', which is not a file")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"w": "../model/config.json"}}'
    )
    assert_refused(
        tmp_path, "index.json names '../model/config.json', which is not a file of its folder"
    )


class Command:
    """The content of a hostile pickle: a call to make when it is read."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_a_pickle_is_read_without_running_code(bert, folder, monkeypatch):
    path, marker = folder / "pytorch_model.bin", folder / "was_here"
    torch.save(load_file(folder / "model.safetensors"), path)
    (folder / "model.safetensors").unlink()
    assert_same(read(str(folder)), read(str(bert)))
    sparse = {"a": torch.eye(2).to_sparse()}
    for state in ({"weight": Command(marker)}, [1, 2], {"model": {"weight": 1}}, sparse):
        torch.save(state, path)
        assert_refused(folder, r"cannot read .*pytorch_model\.bin.* convert it to safetensors")
    assert not marker.exists()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        CheckpointError,
        match=r"pytorch_model\.bin.*pip install .diffcse_jax\[torch\].*convert it to safetensors",
    ):
        files.read_tensors(folder)


def old_name(name: str) -> str:
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
        "LayerNorm.bias", "LayerNorm.beta"
    )


WORDS = "embeddings.word_embeddings.weight"
UNUSED = {
    "bert.embeddings.position_ids": torch.arange(LENGTH)[None],
    "cls.seq_relationship.weight": torch.zeros(2, HIDDEN),
    "cls.predictions.decoder.bias": torch.zeros(VOCAB),
}


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {old_name(name): tensor for name, tensor in tensors.items()},
        lambda tensors: {name.removeprefix("bert."): tensor for name, tensor in tensors.items()},
        lambda tensors: tensors | UNUSED | {WORDS: tensors[f"bert.{WORDS}"].clone()},
        lambda tensors: {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()},
    ],
    ids=[
        "tensorflow's names of norms",
        "no prefix",
        "unused and repeated tensors",
        "half precision",
    ],
)
def test_the_same_tensors_in_other_forms_are_read(bert, folder, change):
    (folder / "pytorch_model.bin").write_bytes(b"not read")  # safetensors come first
    rewrite(folder, change)
    assert_same(read(str(folder)), read(str(bert)), rtol=2**-7, atol=1e-6)


# --- checkpoints of the training code of SimCSE and DiffCSE ---


@pytest.mark.parametrize(
    ("family", "kind", "left_out"),
    [
        ("bert", "diffcse", "aux_bert, electra_head, generator, lm_head, mlp"),
        # its masked-LM head has RoBERTa's names
        ("roberta", "diffcse", "aux_bert, electra_head, generator, mlp"),
        ("bert", "simcse", "nothing"),
    ],
)
def test_the_encoder_of_a_training_model_is_read(tmp_path, capsys, family, kind, left_out):
    model, encoder, folder = torch.nn.Module(), small_model(family, blocks=1), tmp_path / "mine"
    encoder.pooler, model.mlp = None, torch.nn.Module()
    setattr(model, family, encoder)
    if kind == "simcse":
        model.mlp.dense = torch.nn.Linear(HIDDEN, HIDDEN)
    else:
        model.mlp.net = torch.nn.Sequential(
            torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.BatchNorm1d(HIDDEN)
        )
        model.aux_bert, model.generator = (
            small_model(family, blocks=1),
            small_model("distilbert", head="ForMaskedLM"),
        )
        model.aux_bert.pooler, model.electra_head = None, torch.nn.Linear(HIDDEN, 2)
        with_head = small_model(family, blocks=1, head="ForMaskedLM")
        model.lm_head = with_head.lm_head if family == "roberta" else with_head.cls.predictions
    folder.mkdir()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "config.json").write_text(
        json.dumps(encoder.config.to_dict() | {"architectures": ["BertForCL"]})
    )
    checkpoint = read(str(folder))
    assert capsys.readouterr().err == (
        f"notice: {folder} was saved by the training code of SimCSE or DiffCSE. Reading its encoder; left out: "
        f"{left_out}\n"
    )
    rows, inputs, real = tokens(encoder.config.pad_token_id)
    states = hidden_states(checkpoint, rows)
    assert_close(states, encoder(**inputs, output_hidden_states=True).hidden_states, real)
    if kind == "simcse":  # its projector is the pooler
        head, cls = bound(MlpProjector, checkpoint.config, checkpoint.pooler), states[-1][:, 0]
        assert_close([head(cls)], [torch.tanh(model.mlp.dense(torch.tensor(np.asarray(cls))))])
    else:
        assert recorded(checkpoint) == RecordedPooler("cls_before_pooler")
        assert checkpoint.pooler is None
        assert (checkpoint.mlm_head is None) == (family == "bert")


def test_published_checkpoints_are_pooled_as_their_authors_do():
    for name, pooler in (
        ("princeton-nlp/sup-simcse-roberta-base@main", "cls"),
        ("/models/unsup-simcse-roberta-large/", "cls_before_pooler"),
        ("voidism/diffcse-roberta-base-trans", "cls_before_pooler"),
        ("princeton-nlp/unsup-simcse-bert-base-uncased-mine", ""),
    ):
        assert (
            hf.published_pooler(name, ["embeddings.LayerNorm.weight", "pooler.dense.weight"])
            == pooler
        )


# --- checkpoints that cannot be used ---


def test_every_wrong_tensor_is_named_in_one_error(folder):
    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del tensors["bert.encoder.layer.1.attention.self.query.weight"]
        del tensors["cls.predictions.transform.dense.bias"]
        query = "bert.encoder.layer.0.attention.self.query.weight"
        return tensors | {
            "bert.embeddings.LayerNorm.weight": torch.zeros(7),
            "bert.encoder.layer.0.output.dense.weight": torch.zeros(40, HIDDEN),
            "bert.encoder.layer.2.output.dense.weight": torch.zeros(HIDDEN, 40),
            query: tensors[query].to(torch.int8),
            "bert.encoder.layer.0.attention.self.key.bias": torch.full((HIDDEN,), torch.nan),
            # without a projector, this is not a model of the training code
            "generator.weight": torch.zeros(1),
        }

    rewrite(folder, spoil)
    first, *problems = assert_refused(folder, "does not hold a bert encoder").splitlines()
    assert str(folder) in first
    assert sorted(problem.strip() for problem in problems) == [
        "missing: cls.predictions.transform.dense.bias",
        "missing: encoder.layer.1.attention.self.query.weight",
        "not finite: encoder.layer.0.attention.self.key.bias holds values that are NaN or infinite",
        "unknown: encoder.layer.2.output.dense.weight",
        "unknown: generator.weight",
        "unsupported: encoder.layer.0.attention.self.query.weight holds int8. Quantised weights cannot be read",
        "wrong shape: embeddings.LayerNorm.weight is (7,), config.json says (24,)",
        "wrong shape: encoder.layer.0.output.dense.weight is (40, 24), config.json says (24, 40)",
    ]
    rewrite(
        folder,
        lambda tensors: tensors | {f"bert.more.{number}": torch.zeros(1) for number in range(80)},
    )
    assert len(assert_refused(folder, r"and 38 more$").splitlines()) == 52


def test_a_table_may_be_stored_under_the_name_of_the_decoder(folder):
    before = read(str(folder))
    table = "bert.embeddings.word_embeddings.weight"
    decoder = "cls.predictions.decoder.weight"
    rewrite(
        folder,
        lambda tensors: {
            decoder if name == table else name: value for name, value in tensors.items()
        },
    )
    assert_same(read(str(folder), needs_mlm_head=True), before)


def test_a_masked_lm_head_is_needed_only_for_a_generator(folder, capsys):
    rewrite(
        folder,
        lambda tensors: tensors | {"cls.predictions.decoder.weight": torch.zeros(VOCAB, HIDDEN)},
    )
    assert read(str(folder)).mlm_head is None  # it would choose other words
    said = "is not used. unsupported: cls.predictions.decoder.weight is not the word-embedding"
    assert said in capsys.readouterr().err
    assert_refused(folder, r"decoder\.weight is not the word-embedding table", needs_mlm_head=True)
    rewrite(
        folder,
        lambda tensors: {
            name: value for name, value in tensors.items() if name.startswith("bert.")
        },
    )
    assert read(str(folder)).mlm_head is None
    assert_refused(folder, "missing: the masked-LM head", needs_mlm_head=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "t5"},
            "architecture 't5' is not supported; supported: bert, camembert, distilbert, electra, ",
        ),
        (
            {"hidden_act": "quick_gelu"},
            "config.json: activation must be one of gelu, .*, not 'quick_gelu'",
        ),
        (
            {"hidden_size": "24"},
            "config.json: Validation error for field 'hidden_size': .* expected int, got str",
        ),
        (
            {"intermediate_size": 0},
            "config.json: intermediate_size must be from 1 to 10,000,000, not 0",
        ),
        (
            {"num_hidden_layers": 10**30},
            "config.json: num_hidden_layers must be a whole number from 1 to 256, not 1",
        ),
        ({"num_attention_heads": 5}, "5.*heads"),
        (
            {"layer_norm_eps": -1.0},
            "config.json: layer_norm_eps or norm_eps must be above 0, not -1.0",
        ),
        ({"type_vocab_size": -1}, "config.json: type_vocab_size must be at least 0, not -1"),
        (
            {"hidden_dropout_prob": 1.5},
            "config.json: dropout rates must be from 0 to below 1, not 1.5",
        ),
        (
            {"pad_token_id": 10**6},
            "config.json: pad_token_id must be a token id up to 30521, not 1000000",
        ),
        (
            hf_config_of("gte") | {"rope_theta": -1.0},
            "config.json: rope_theta must be above 0, not -1.0",
        ),
        (
            hf_config_of("nomic_bert") | {"rotary_scaling_factor": 2},
            "rotary_scaling_factor must be None, not 2",
        ),
        (
            hf_config_of("gte") | {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "'yarn' is not supported",
        ),
        (
            hf_config_of("modernbert") | {"num_attention_heads": 16},
            "heads of 1 features cannot have rotary positions",
        ),
        (
            hf_config_of("modernbert") | {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types",
        ),
    ],
)
def test_unusable_config_is_explained(changes, message, capfd):
    with pytest.raises(CheckpointError, match=f"^model: .*{message}"):
        hf.transformer_config(hf_config_of("bert") | changes, source="model")
    assert "[transformers]" not in capfd.readouterr().err


def test_what_is_read_does_not_change_with_the_file(folder):
    checkpoint = read(str(folder))
    arrays = [*checkpoint.transformer.values(), *checkpoint.mlm_head.values()]
    assert {array.base for array in arrays if array.base is not None} == set()


def test_missing_and_damaged_files_are_named(folder):
    rewrite(
        folder,
        lambda tensors: {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()},
    )
    assert_refused(folder, r"(holds float8|cannot read .*model\.safetensors)")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    assert_refused(folder, r"cannot read .*model\.safetensors")
    file.unlink()
    assert_refused(folder, r"holds neither model\.safetensors nor pytorch_model\.bin")
    (folder / "config.json").unlink()
    assert_refused(folder, r"has no config\.json, so it is neither a Hugging Face model nor a run")


@pytest.mark.parametrize("name", ["./nowhere", "~nobody-of-this-name", "a/b/c", ""])
def test_a_missing_path_is_not_looked_up_in_the_hub(name, monkeypatch):
    monkeypatch.setattr(files, "_download", lambda name: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match=f"^model folder not found: {name[:200]}$"):
        read(name)


@pytest.mark.parametrize("name", ["/" + "a" * 5000, "a" * 5000, "a\0b"])
def test_a_name_that_no_path_can_have_is_refused(name):
    with pytest.raises(ConfigError, match="cannot be used as a path"):
        read(name)


@pytest.mark.parametrize("name", ["organisation/model"])
def test_a_hub_model_offline_says_what_to_do(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError) as raised:
        read(name)
    message = (
        f"{re.escape(repr(name[:200]))} is neither a local folder nor a model that can be downloaded now .*"
        "Without network, give the path of a folder with config.json, model.safetensors and tokenizer.json\\. .*"
    )
    assert re.fullmatch(message, str(raised.value))
    assert len(str(raised.value)) < 1000


def test_a_folder_named_minilm_comes_before_the_package(bert, tmp_path, monkeypatch, capsys):
    shutil.copytree(bert, tmp_path / "minilm")
    monkeypatch.chdir(tmp_path)
    assert_same(read("minilm"), read("./minilm"))
    assert is_local("minilm")
    line = f"notice: minilm is the folder {tmp_path / 'minilm'} here, and not the encoder in the package"
    assert capsys.readouterr().err.count(line) == 1
    shutil.rmtree(tmp_path / "minilm")
    assert read("minilm").config.hidden_size == 384
    assert not is_local("minilm")


def test_a_pooler_by_its_other_name_is_the_recorded_one():
    head = RecordedHead("avg", (), {}, "dot")
    record = RecordedPooler("avg", None, None, head)
    assert with_pooler(record, "mean", "a folder") is record


def test_all_that_an_export_names_is_fetched(bert, tmp_path, monkeypatch):
    hub, fetched = tmp_path / "hub", tmp_path / "fetched"
    shutil.copytree(bert, hub)
    (hub / "onnx").mkdir()
    (hub / "onnx/model.onnx").write_bytes(b"ONNX")
    write_sealed(hub / files.EXPORT_CHECK, {}, hub.rglob("*"))

    def download(name, *, revision, allow_patterns):
        if name != "sentence-transformers/model":
            raise OSError("not found")
        for path in filter(Path.is_file, hub.rglob("*")):
            place = path.relative_to(hub)
            if any(fnmatch.fnmatch(str(place), pattern) for pattern in allow_patterns):
                (fetched / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, fetched / place)
        return str(fetched)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert_same(read("model"), read(str(bert)))  # as sentence-transformers finds this name
    assert (fetched / "onnx/model.onnx").is_file()
    with pytest.raises(CheckpointError, match=r"'mine/model' is neither .* \(OSError: not found\)"):
        read("mine/model")


def test_a_hub_model_is_read_at_its_revision(bert, monkeypatch):
    download = mock.Mock(return_value=str(bert))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert_same(read("organisation/model@v1.0"), read(str(bert)))
    download.assert_called_once_with("organisation/model", revision="v1.0", allow_patterns=mock.ANY)
