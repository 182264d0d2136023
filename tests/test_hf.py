"""Weights from and to Hugging Face checkpoints, and the networks they make, against PyTorch."""

import builtins
import json
import re
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_model import hf_config_of

from diffcse_jax.batch import TokenRows
from diffcse_jax.config import Config
from diffcse_jax.errors import CheckpointError
from diffcse_jax.io import write_tensors
from diffcse_jax.models import families, hf, parameters
from diffcse_jax.models.families.mpnet import relative_buckets
from diffcse_jax.models.heads import MaskedLMHead, MlpProjector
from diffcse_jax.models.hf import Pretrained, read, to_hf
from diffcse_jax.models.pooling_modules import RecordedPooler, recorded
from diffcse_jax.models.transformer import Transformer

VOCAB, HIDDEN, LENGTH = 50, 24, 9
MODELS = {
    "bert": (transformers.BertConfig, transformers.BertModel, transformers.BertForMaskedLM),
    "roberta": (transformers.RobertaConfig, transformers.RobertaModel, transformers.RobertaForMaskedLM),
    "distilbert": (transformers.DistilBertConfig, transformers.DistilBertModel, transformers.DistilBertForMaskedLM),
    "xlm-roberta": (transformers.XLMRobertaConfig, transformers.XLMRobertaModel, transformers.XLMRobertaForMaskedLM),
    "camembert": (transformers.CamembertConfig, transformers.CamembertModel, transformers.CamembertForMaskedLM),
    "mpnet": (transformers.MPNetConfig, transformers.MPNetModel, transformers.MPNetForMaskedLM),
}
ARCHITECTURES = [
    ("bert", "gelu", 2, 4),
    ("bert", "gelu_new", 1, 1),
    ("bert", "silu", 3, 2),
    ("roberta", "gelu", 2, 3),
    ("roberta", "relu", 1, 8),
    ("distilbert", "gelu", 2, 4),
    ("distilbert", "gelu_pytorch_tanh", 1, 2),
    ("xlm-roberta", "gelu", 1, 2),
    ("camembert", "gelu", 1, 2),
    ("mpnet", "gelu", 2, 3),
]


def small_model(
    family: str, activation: str = "gelu", blocks: int = 2, heads: int = 4, *, mlm: bool = False
) -> transformers.PreTrainedModel:
    """A small PyTorch model whose every weight is random: initial biases and norms would hide swapped ones."""
    make_config, plain, with_mlm_head = MODELS[family]
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": LENGTH + 4}
    if family == "distilbert":
        sizes |= {"dim": HIDDEN, "hidden_dim": 40, "n_layers": blocks, "n_heads": heads, "activation": activation}
    else:
        sizes |= {"hidden_size": HIDDEN, "intermediate_size": 40, "hidden_act": activation}
        sizes |= {"num_hidden_layers": blocks, "num_attention_heads": heads}
    model = (with_mlm_head if mlm else plain)(make_config(**sizes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model


def saved(model: transformers.PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def tokens(pad_token_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Random token ids of ragged lengths, and their mask."""
    lengths = np.array([LENGTH, 4, 1, 6])
    mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.int32)
    ids = np.random.default_rng(1).integers(4, VOCAB, mask.shape)
    return np.where(mask == 1, ids, pad_token_id).astype(np.int32), mask


def transformer_of(checkpoint: Pretrained, params: parameters.Params) -> Transformer:
    definition = parameters.definition(partial(Transformer, checkpoint.config))
    return parameters.bind(definition, jax.tree.map(jnp.asarray, params))


def forward(
    checkpoint: Pretrained, ids: np.ndarray, mask: np.ndarray, condition: np.ndarray | None = None
) -> list[np.ndarray]:
    condition = None if condition is None else jnp.asarray(condition)
    module = transformer_of(checkpoint, checkpoint.transformer)
    return list(
        map(np.asarray, module(TokenRows(jnp.asarray(ids), jnp.asarray(mask)), condition=condition)["hidden_states"])
    )


def torch_inputs(ids: np.ndarray, mask: np.ndarray) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor(ids, dtype=torch.long), "attention_mask": torch.tensor(mask)}


def torch_forward(model: transformers.PreTrainedModel, ids: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
    with torch.no_grad():
        states = model(**torch_inputs(ids, mask), output_hidden_states=True).hidden_states
    return [layer.numpy() for layer in states]


def assert_close_on_tokens(ours: list[np.ndarray], theirs: list[np.ndarray], mask: np.ndarray) -> None:
    assert len(ours) == len(theirs)
    for layer, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(layer[mask == 1], expected[mask == 1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("family", "activation", "blocks", "heads"), ARCHITECTURES)
def test_hidden_states_and_gradients_are_those_of_torch(tmp_path, family, activation, blocks, heads):
    model = small_model(family, activation, blocks, heads)
    checkpoint = read(str(saved(model, tmp_path)))
    ids, mask = tokens(model.config.pad_token_id)
    # The loss reads padding too, as replaced-token detection does.
    weights = np.random.default_rng(2).normal(size=(*ids.shape, HIDDEN)).astype(np.float32)

    def loss(params: parameters.Params) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        states = transformer_of(checkpoint, params)(TokenRows(jnp.asarray(ids), jnp.asarray(mask)))["hidden_states"]
        return (states[-1] * weights).mean(), states

    gradients, states = jax.grad(loss, has_aux=True)(checkpoint.transformer)
    output = model(**torch_inputs(ids, mask), output_hidden_states=True)
    (output.last_hidden_state * torch.tensor(weights)).mean().backward()

    assert_close_on_tokens(
        [np.asarray(layer) for layer in states], [layer.detach().numpy() for layer in output.hidden_states], mask
    )
    theirs = {name: parameter.grad for name, parameter in model.named_parameters() if not name.startswith("pooler")}
    ours = to_hf(gradients, "transformer", checkpoint.config)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        np.testing.assert_allclose(gradient, theirs[name].numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
    assert not ours["embeddings.word_embeddings.weight"][model.config.pad_token_id].any()
    if checkpoint.config.position_offset:
        assert not ours["embeddings.position_embeddings.weight"][model.config.pad_token_id].any()


def test_hidden_states_of_a_real_model_are_those_of_torch(minilm_dir):
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_dir)
    texts = ["A short one.", "Überlange Wörter are split (electroencephalographically) into pieces.", "", "no"]
    batch = tokenizer(texts, padding=True, return_tensors="np")
    ids, mask = batch["input_ids"].astype(np.int32), batch["attention_mask"].astype(np.int32)
    model = transformers.AutoModel.from_pretrained(minilm_dir).eval()
    assert_close_on_tokens(forward(read("minilm"), ids, mask), torch_forward(model, ids, mask), mask)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "mpnet"])
def test_the_condition_replaces_position_0_of_the_embedding_output(tmp_path, family):
    model = small_model(family)
    checkpoint = read(str(saved(model, tmp_path)))
    ids, mask = tokens(model.config.pad_token_id)
    condition = np.random.default_rng(3).normal(size=(len(ids), HIDDEN)).astype(np.float32)

    def replace(module: torch.nn.Module, arguments: tuple, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.tensor(condition)[:, None], output[:, 1:]], dim=1)

    model.embeddings.register_forward_hook(replace)
    ours = forward(checkpoint, ids, mask, condition)
    np.testing.assert_array_equal(ours[0][:, 0], condition)
    assert_close_on_tokens(ours, torch_forward(model, ids, mask), mask)


@pytest.mark.parametrize("family", MODELS)
def test_masked_lm_logits_are_those_of_torch(tmp_path, family):
    model = small_model(family, "relu", blocks=1, mlm=True)  # some heads have gelu whatever the activation of blocks
    checkpoint = read(str(saved(model, tmp_path)), needs_mlm_head=True)
    ids, mask = tokens(model.config.pad_token_id)
    definition = parameters.definition(partial(MaskedLMHead, checkpoint.config))
    head = parameters.bind(definition, jax.tree.map(jnp.asarray, checkpoint.mlm_head))
    hidden_states = forward(checkpoint, ids, mask)[-1]
    logits = head(jnp.asarray(hidden_states), jnp.asarray(checkpoint.transformer["embeddings.word.embedding"]))
    with torch.no_grad():
        expected = model(**torch_inputs(ids, mask)).logits.numpy()
    np.testing.assert_allclose(np.asarray(logits)[mask == 1], expected[mask == 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "roberta", "mpnet"])
def test_pooler_output_is_that_of_torch(tmp_path, family):
    model = small_model(family, blocks=1)
    checkpoint = read(str(saved(model, tmp_path)))
    ids, mask = tokens(model.config.pad_token_id)
    definition = parameters.definition(partial(MlpProjector, checkpoint.config))
    pooler = parameters.bind(definition, jax.tree.map(jnp.asarray, checkpoint.pooler))
    with torch.no_grad():
        output = model(**torch_inputs(ids, mask))
    ours = pooler(jnp.asarray(output.last_hidden_state[:, 0].numpy()))
    np.testing.assert_allclose(ours, output.pooler_output.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mlm", [False, True], ids=["encoder", "masked_lm"])
@pytest.mark.parametrize("family", MODELS)
def test_a_round_trip_is_bit_identical(tmp_path, family, mlm):
    model = small_model(family, mlm=mlm)
    folder = saved(model, tmp_path)
    checkpoint = read(str(folder))
    exported = {}
    for part in ("transformer", "pooler", "mlm_head"):
        if getattr(checkpoint, part) is not None:
            exported |= to_hf(getattr(checkpoint, part), part, checkpoint.config)
    stored = load_file(folder / "model.safetensors")
    original = {name.removeprefix(f"{model.base_model_prefix}."): tensor.numpy() for name, tensor in stored.items()}
    assert exported.keys() == original.keys()
    for name, array in exported.items():
        np.testing.assert_array_equal(array, original[name], err_msg=name)
    assert (checkpoint.mlm_head is not None) == mlm
    assert (checkpoint.pooler is not None) == (not mlm and family != "distilbert")


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_what_is_written_loads_in_transformers(tmp_path, family):
    model = small_model(family)
    checkpoint = read(str(saved(model, tmp_path)))
    (tmp_path / "model.safetensors").unlink()
    written = to_hf(checkpoint.transformer, "transformer", checkpoint.config)
    written |= to_hf(checkpoint.pooler, "pooler", checkpoint.config)
    write_tensors(tmp_path / "model.safetensors", written)
    again = transformers.AutoModel.from_pretrained(tmp_path).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again[name]), name


def test_transposed_arrays_are_written_as_they_are(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    write_tensors(tmp_path / "model.safetensors", {"a": array})
    np.testing.assert_array_equal(load_file(tmp_path / "model.safetensors")["a"].numpy(), array)


@pytest.mark.parametrize("family", MODELS)
def test_sizes_and_rates_are_those_of_the_config_file(tmp_path, family):
    model = small_model(family, "relu", blocks=3, heads=2)
    if family == "distilbert":
        model.config.dropout, model.config.attention_dropout = 0.2, 0.3
    else:
        model.config.hidden_dropout_prob, model.config.attention_probs_dropout_prob = 0.2, 0.3
    config = read(str(saved(model, tmp_path))).config
    assert (config.family, config.activation, config.num_blocks, config.num_heads) == (family, "relu", 3, 2)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (VOCAB, HIDDEN, 40)
    assert (config.embedding_dropout, config.hidden_dropout, config.attention_dropout) == (0.2, (0.2,) * 3, (0.3,) * 3)
    assert config.max_length == LENGTH + 4 - (0 if family in ("bert", "distilbert") else 2)


def test_every_family_is_compared_with_torch():
    assert families.FAMILIES.keys() == MODELS.keys()


def test_buckets_of_relative_positions_are_those_of_torch():
    count = 300  # beyond 128 positions, all distances share a bucket
    positions = torch.arange(count)
    of_torch = transformers.models.mpnet.modeling_mpnet.MPNetEncoder.relative_position_bucket
    np.testing.assert_array_equal(relative_buckets(count), of_torch(positions[None] - positions[:, None]).numpy())


# --- other ways to store the same tensors ---


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    """A small BERT with its masked-LM head."""
    return saved(small_model("bert", mlm=True), tmp_path_factory.mktemp("bert"))


@pytest.fixture
def folder(bert, tmp_path) -> Path:
    """A copy of it to spoil."""
    return shutil.copytree(bert, tmp_path / "model")


def rewrite(folder: Path, change) -> None:
    """Stores the checkpoint's tensors as `change` returns them."""
    file = folder / "model.safetensors"
    tensors = change(load_file(file))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def assert_refused(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(str(folder))


def assert_same(checkpoint: Pretrained, expected: Pretrained, **tolerance) -> None:
    for part in ("transformer", "mlm_head"):
        ours, theirs = getattr(checkpoint, part), getattr(expected, part)
        assert ours.keys() == theirs.keys()
        for name, array in ours.items():
            assert array.dtype == np.float32
            np.testing.assert_allclose(array, theirs[name], err_msg=name, **({"rtol": 0} | tolerance))


def test_a_sharded_checkpoint_is_read(bert, tmp_path):
    transformers.BertForMaskedLM.from_pretrained(bert).save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert_same(read(str(tmp_path)), read(str(bert)))
    next(tmp_path.glob("model-00002*.safetensors")).unlink()
    assert_refused(tmp_path, r"index.json names 'model-00002-of.*', which is not a file")


def pickled(folder: Path, state: object) -> Path:
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


class Command:
    """The content of a hostile pickle: a call to make when it is read."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_a_pickle_is_read_without_running_code(bert, folder, monkeypatch):
    tensors = load_file(folder / "model.safetensors")
    assert_same(read(str(pickled(folder, tensors))), read(str(bert)))
    marker = folder / "was_here"
    torch.save({"weight": Command(marker)}, folder / "pytorch_model.bin")
    assert_refused(folder, r"cannot read .*pytorch_model\.bin")
    assert not marker.exists()

    import_module = builtins.__import__

    def without_torch(name: str, *arguments, **options):
        if name == "torch":
            raise ImportError("No module named 'torch'")
        return import_module(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    assert_refused(folder, r"pytorch_model\.bin.*pip install torch.*convert it to safetensors")


@pytest.mark.parametrize("state", [[1, 2], {"model": {"weight": 1}}, {"a": torch.eye(2).to_sparse()}])
def test_a_pickle_of_something_else_is_refused(folder, state):
    assert_refused(pickled(folder, state), r"pytorch_model\.bin.* convert it to safetensors")


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float16, 2**-10), (torch.bfloat16, 2**-7)])
def test_half_precision_is_widened(bert, folder, dtype, rtol):
    rewrite(folder, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    checkpoint = read(str(folder))
    assert_same(checkpoint, read(str(bert)), rtol=rtol, atol=1e-6)
    stored = load_file(folder / "model.safetensors")["cls.predictions.bias"]
    np.testing.assert_array_equal(checkpoint.mlm_head["bias"], stored.float().numpy())


def old_name(name: str) -> str:
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


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
        lambda tensors: tensors | UNUSED,
    ],
    ids=["tensorflow's names of norms", "no prefix", "unused tensors"],
)
def test_the_same_tensors_under_other_names_are_read(bert, folder, change):
    (folder / "pytorch_model.bin").write_bytes(b"not read")  # safetensors come first
    rewrite(folder, change)
    assert_same(read(str(folder)), read(str(bert)))


def test_minilm_is_the_encoder_of_the_package(minilm_dir):
    checkpoint = read("minilm")
    assert checkpoint.folder.samefile(minilm_dir)
    assert (checkpoint.config.num_blocks, checkpoint.config.hidden_size) == (6, 384)
    assert checkpoint.hf_config["vocab_size"] == 30522
    assert checkpoint.mlm_head is None


# --- checkpoints of the training code of SimCSE and DiffCSE ---


def training_model(family: str, projector: torch.nn.Module, *, difference: bool) -> torch.nn.Module:
    """The modules that the training code saves as one, by its names."""
    model = torch.nn.Module()
    encoder, model.aux_bert, generator = small_model(family), small_model(family), small_model("distilbert", mlm=True)
    encoder.pooler = model.aux_bert.pooler = None
    setattr(model, family, encoder)
    model.lm_head = small_model("bert", mlm=True).cls.predictions
    if family == "roberta":
        model.lm_head = small_model("roberta", mlm=True).lm_head
    model.mlp = projector
    if difference:
        model.generator, model.electra_head = generator, torch.nn.Linear(HIDDEN, 2)
    else:
        del model.aux_bert, model.lm_head
    return model


def saved_by_training_code(model: torch.nn.Module, encoder: transformers.PreTrainedModel, folder: Path) -> Path:
    folder.mkdir()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    config = encoder.config.to_dict() | {"architectures": ["BertForCL"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class DenseTanh(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(HIDDEN, HIDDEN)


def batchnorm_projector() -> torch.nn.Module:
    module = torch.nn.Module()
    module.net = torch.nn.Sequential(
        torch.nn.Linear(HIDDEN, 2 * HIDDEN, bias=False),
        torch.nn.BatchNorm1d(2 * HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False),
        torch.nn.BatchNorm1d(HIDDEN, affine=False),
    )
    return module


@pytest.mark.parametrize(("family", "lm_head"), [("bert", ", lm_head"), ("roberta", "")])
def test_the_encoder_of_a_diffcse_training_model_is_read(tmp_path, capsys, family, lm_head):
    model = training_model(family, batchnorm_projector(), difference=True)
    encoder = getattr(model, family)
    folder = saved_by_training_code(model, encoder, tmp_path / "mine")
    checkpoint = read(str(folder))
    assert capsys.readouterr().err == (
        f"notice: {folder} was saved by the training code of SimCSE or DiffCSE. Reading its encoder; left out: "
        f"mlp{lm_head}, aux_bert, electra_head, generator. Its authors evaluate it with the pooler cls_before_pooler.\n"
    )
    assert recorded(checkpoint) == RecordedPooler("cls_before_pooler", None)
    assert checkpoint.pooler is None
    assert (checkpoint.mlm_head is None) == (family == "bert")
    ids, mask = tokens(encoder.config.pad_token_id)
    assert_close_on_tokens(forward(checkpoint, ids, mask), torch_forward(encoder, ids, mask), mask)


def test_the_head_of_a_simcse_training_model_is_the_pooler(tmp_path, capsys):
    model = training_model("bert", DenseTanh(), difference=False)
    folder = saved_by_training_code(model, model.bert, tmp_path / "mine")
    checkpoint = read(str(folder))
    assert recorded(checkpoint) is None
    printed = capsys.readouterr().err
    assert "Reading its encoder and its dense + tanh head. They evaluate unsupervised" in printed
    head = parameters.bind(parameters.definition(partial(MlpProjector, checkpoint.config)), checkpoint.pooler)
    vectors = np.random.default_rng(0).normal(size=(3, HIDDEN)).astype(np.float32)
    with torch.no_grad():
        expected = torch.tanh(model.mlp.dense(torch.tensor(vectors))).numpy()
    np.testing.assert_allclose(head(jnp.asarray(vectors)), expected, atol=1e-6)
    supervised = read(str(folder.rename(tmp_path / "sup-simcse-bert-base-uncased")))
    assert recorded(supervised).pooler == "cls"
    assert recorded(supervised).head is supervised.pooler


@pytest.mark.parametrize(
    ("name", "pooler"),
    [
        ("princeton-nlp/unsup-simcse-bert-large-uncased", "cls_before_pooler"),
        ("princeton-nlp/sup-simcse-roberta-base@main", "cls"),
        ("/models/unsup-simcse-roberta-large/", "cls_before_pooler"),
        ("voidism/diffcse-roberta-base-trans", "cls_before_pooler"),
        ("princeton-nlp/unsup-simcse-bert-base-uncased-mine", None),
        ("runs/diffcse_base", None),
        ("minilm", None),
    ],
)
def test_published_checkpoints_are_pooled_as_their_authors_do(name, pooler):
    assert hf.published_pooler(name, ["embeddings.LayerNorm.weight", "pooler.dense.weight"]) == pooler


def test_tensors_that_training_code_does_not_save_are_unknown(folder):
    rewrite(folder, lambda tensors: tensors | {"generator.weight": torch.zeros(1)})
    assert_refused(folder, r"unknown: generator\.weight")
    rewrite(folder, lambda tensors: tensors | {f"mlp.dense.{name}": torch.zeros(1) for name in ("weight", "bias", "x")})
    assert_refused(folder, r"wrong shape: pooler\.dense\.weight(?s:.*)unknown: pooler\.dense\.x")


def test_a_run_is_read_from_its_export(bert, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints/7").mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(Config().to_dict()))
    for name, kind in (
        (run, "the workdir of a run that has no export yet"),
        (run / "checkpoints/7", "a checkpoint of"),
    ):
        command = f"diffcse export --model {name} --output DIR"
        assert_refused(name, f"^{name} is {kind}.* `{command}`, and name DIR")
    shutil.copytree(bert, run / "export")
    assert read(str(run)).folder == run / "export"
    assert_same(read(str(run)), read(str(bert)))


# --- checkpoints that cannot be used ---


def test_every_wrong_tensor_is_named_in_one_error(folder):
    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del tensors["bert.encoder.layer.1.attention.self.query.weight"]
        del tensors["cls.predictions.transform.dense.bias"]
        tensors["bert.embeddings.LayerNorm.weight"] = torch.zeros(7)
        tensors["bert.encoder.layer.0.output.dense.weight"] = torch.zeros(40, HIDDEN)
        tensors["bert.encoder.layer.2.output.dense.weight"] = torch.zeros(HIDDEN, 40)
        tensors["surprise"] = torch.zeros(1)
        return tensors

    rewrite(folder, spoil)
    with pytest.raises(CheckpointError) as raised:
        read(str(folder))
    first, *problems = str(raised.value).splitlines()
    assert str(folder) in first
    assert sorted(problem.strip() for problem in problems) == [
        "missing: cls.predictions.transform.dense.bias",
        "missing: encoder.layer.1.attention.self.query.weight",
        "unknown: encoder.layer.2.output.dense.weight",
        "unknown: surprise",
        "wrong shape: embeddings.LayerNorm.weight is (7,), config.json says (24,)",
        "wrong shape: encoder.layer.0.output.dense.weight is (40, 24), config.json says (24, 40)",
    ]


def test_a_missing_masked_lm_head_is_an_error_only_where_it_is_needed():
    assert read("minilm").mlm_head is None
    with pytest.raises(CheckpointError, match="missing: the masked-LM head"):
        read("minilm", needs_mlm_head=True)


def test_an_untied_decoder_is_refused_as_a_generator(folder):
    rewrite(folder, lambda tensors: tensors | {"cls.predictions.decoder.weight": torch.zeros(VOCAB, HIDDEN)})
    with pytest.raises(CheckpointError, match=r"decoder\.weight is not the word-embedding table"):
        read(str(folder), needs_mlm_head=True)
    read(str(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "t5"}, "architecture 't5' is not supported; supported: bert, camembert, distilbert, mpnet, "),
        ({"model_type": ...}, "architecture '?' is not supported; supported: bert, camembert, distilbert, mpnet, "),
        ({"hidden_act": "quick_gelu"}, "activation 'quick_gelu' is not supported; supported: gelu, gelu_new"),
        ({"position_embedding_type": "relative_key"}, 'position_embedding_type must be "absolute", not "relative_key"'),
        ({"is_decoder": True}, "config.json: is_decoder must be false, not true"),
        ({"hidden_size": ...}, "config.json has no 'hidden_size'"),
        ({"hidden_size": "24"}, 'config.json: hidden_size must be a whole number from 1 to 10,000,000, not "24"'),
        ({"num_hidden_layers": 0}, "config.json: num_hidden_layers must be a whole number from 1 to 256, not 0"),
        ({"num_attention_heads": 5}, "config.json: 5 attention heads cannot share a hidden size of 24"),
        ({"hidden_dropout_prob": 1}, "config.json: hidden_dropout_prob must be a number from 0 to below 1, not 1"),
        ({"layer_norm_eps": None}, "config.json: layer_norm_eps must be a number from 0 to below 1, not null"),
        (
            {"num_hidden_layers": 10**9},
            "config.json: num_hidden_layers must be a whole number from 1 to 256, not 1000000000",
        ),
        ({"hidden_size": 10**30}, "config.json: hidden_size must be a whole number from 1 to 10,000,000, not 1000"),
        ({"hidden_act": ["gelu"]}, 'config.json: hidden_act must be a string, not ["gelu"]'),
        ({"model_type": ["bert"]}, "architecture ['bert'] is not supported"),
        ({"model_type": {"a": 1}}, "architecture {'a': 1} is not supported"),
        ({"pad_token_id": None}, "config.json: pad_token_id must be a whole number from 0 to 10,000,000, not null"),
        ({"pad_token_id": 10**6}, "config.json: pad_token_id 1000000 is not among "),
    ],
)
def test_unusable_config_is_explained(folder, changes, message):
    edit_config(folder, **changes)
    assert_refused(folder, f"^{re.escape(str(folder))}.*{re.escape(message)}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"relative_attention_num_buckets": 64}, "relative_attention_num_buckets must be 32, not 64"),
        ({"pad_token_id": 0}, "pad_token_id must be 1, not 0"),
        ({"is_decoder": True}, "is_decoder must be false, not true"),
    ],
)
def test_settings_that_mpnet_ignores_in_transformers_are_refused(changes, message):
    with pytest.raises(CheckpointError, match=f"^model: config.json: {message}$"):
        hf.transformer_config(hf_config_of("mpnet") | changes, source="model")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"model_type": "bert",', "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[1, 2]", r"is not a JSON object: \[1, 2\]"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_broken_json_is_named(folder, name, content, message):
    (folder / name).write_bytes(content)
    assert_refused(folder, f"{re.escape(name)} {message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(({"weight_map": map_}, "has no weight_map from tensors to") for map_ in (None, ["a.safetensors"])),
        *(
            ({"weight_map": {"w": file}}, f"names {file[:60]!r}, which is not a file of its folder")
            for file in ("../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a" * 30_000)
        ),
    ],
)
def test_an_index_without_files_or_outside_its_folder_is_refused(folder, content, message):
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    assert_refused(folder, re.escape(f"index.json {message}"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn])
def test_weights_that_are_integers_or_quantised_are_refused(folder, dtype):
    name = "encoder.layer.0.attention.self.query.weight"
    rewrite(folder, lambda tensors: tensors | {f"bert.{name}": tensors[f"bert.{name}"].to(dtype)})
    assert_refused(folder, rf"(unsupported: {re.escape(name)} holds|cannot read .*model\.safetensors)")


def test_a_tensor_stored_twice_must_be_the_same(bert, folder):
    name = "embeddings.word_embeddings.weight"
    rewrite(folder, lambda tensors: tensors | {name: tensors[f"bert.{name}"].clone()})
    assert_same(read(str(folder)), read(str(bert)))
    rewrite(folder, lambda tensors: tensors | {name: tensors[name] + 1})
    assert_refused(folder, f"stored twice with different values: {re.escape(name)}, once as")


def test_many_problems_are_counted(folder):
    unknown = {f"surprise.{number}": torch.zeros(1) for number in range(80)}
    rewrite(folder, lambda tensors: tensors | unknown)
    with pytest.raises(CheckpointError, match=r"and 30 more$") as raised:
        read(str(folder))
    assert len(str(raised.value).splitlines()) == 52


def test_missing_and_damaged_files_are_named(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    assert_refused(folder, r"cannot read .*model\.safetensors")
    file.unlink()
    assert_refused(folder, r"holds neither model\.safetensors nor pytorch_model\.bin")
    (folder / "config.json").unlink()
    assert_refused(folder, r"has no config\.json; is it a Hugging Face model folder\?")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/model", "~/nowhere", "~nobody-of-this-name", "a/b/c", ""])
def test_a_missing_path_is_not_looked_up_in_the_hub(name, monkeypatch):
    monkeypatch.setattr(hf, "_download", lambda name: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match=f"^model folder not found: {name}$"):
        read(name)


@pytest.mark.parametrize("name", ["a" * 5000, "/" + "a" * 5000, "a\0b"])
def test_an_impossible_file_name_is_refused(name):
    with pytest.raises(CheckpointError, match="model") as raised:
        read(name)
    assert len(str(raised.value)) < 1000


def test_a_hub_model_offline_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError) as raised:
        read("some-organisation/some-model")
    message = str(raised.value)
    assert message.startswith("'some-organisation/some-model' is neither a local folder nor a model that can be downl")
    assert "give the path of a folder with config.json, model.safetensors and tokenizer.json, or `minilm`" in message
    assert "\n" not in message


@pytest.mark.parametrize(("hub_id", "revision"), [("organisation/model", None), ("organisation/model@v1.0", "v1.0")])
def test_a_hub_model_is_read_at_its_revision(bert, monkeypatch, hub_id, revision):
    download = mock.Mock(return_value=str(bert))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert_same(read(hub_id), read(str(bert)))
    download.assert_called_once_with("organisation/model", revision=revision, allow_patterns=mock.ANY)


def test_a_misspelt_minilm_is_recognised(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="Did you mean `minilm`"):
        read("minilmm")
