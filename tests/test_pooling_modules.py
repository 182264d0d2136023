"""Reading the pooler of a sentence-transformers folder; writing is in test_export.py."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from diffcse_jax.errors import CheckpointError
from diffcse_jax.models import pooling_modules


def write_modules(folder, *names, pooling=None, activation=None):
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(["Transformer", *names])
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for module in modules[1:]:
        (folder / module["path"]).mkdir()
        config = pooling if module["path"].endswith("Pooling") else {"activation_function": activation}
        (folder / module["path"] / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("pooling", "pooler"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "avg"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "cls_before_pooler"),
        ({"embedding_dimension": 16, "pooling_mode": "mean"}, "avg"),
        ({"embedding_dimension": 16, "pooling_mode": "cls"}, "cls_before_pooler"),
    ],
)
def test_both_forms_of_a_pooling_mode_are_read(pooling, pooler, tmp_path):
    write_modules(tmp_path, "Pooling", "Normalize", pooling=pooling)
    assert pooling_modules.read(tmp_path) == pooling_modules.RecordedPooler(pooler, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (5, "modules.json is not a list of modules with `type` and `path`"),
        ([5], "modules.json is not a list of modules"),
        ([{"type": "a.Pooling"}], "modules.json is not a list of modules"),
        ([{"type": ["a"], "path": ""}], "modules.json is not a list of modules"),
        ([{"type": "a.Pooling", "path": "../x"}], "modules.json: '../x' is not a folder inside"),
        ([{"type": "a.Pooling", "path": "/etc"}], "modules.json: '/etc' is not a folder inside"),
        ([{"type": "a.Pooling", "path": "absent"}], "cannot read .*absent/config.json: no such file"),
        ([{"type": "a.Pooling", "path": "a"}], "a/config.json is not a JSON object"),
        ([{"type": "a.Pooling", "path": "b"}, {"type": "a.Dense", "path": "b"}], "b: only a dense layer with tanh"),
        ([{"type": "a.Pooling", "path": "b"}, {"type": "a.Dense", "path": "c"}], "no .* linear.weight with 2"),
        (
            [{"type": "a.Pooling", "path": "b"}, {"type": "a.WeightedLayerPooling", "path": "c"}],
            "no floating-point tensor layer_weights with 1 axes",
        ),
        (
            [{"type": "a.Pooling", "path": "b"}, {"type": "a.WeightedLayerPooling", "path": "b"}],
            "cannot read .*b/model.safetensors: no such file",
        ),
    ],
)
def test_malformed_modules_are_named(content, message, tmp_path):
    (tmp_path / "modules.json").write_text(json.dumps(content))
    configs = {"a": 3, "b": {"pooling_mode": "mean"}, "c": {"activation_function": "torch.nn.modules.activation.Tanh"}}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    save_file({"linear.weight": np.zeros(3, np.float32)}, tmp_path / "c/model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        pooling_modules.read(tmp_path)


@pytest.mark.parametrize(
    ("names", "pooling", "message"),
    [
        (["Pooling", "LSTM"], {"pooling_mode": "mean"}, "the modules Transformer, Pooling, LSTM are not supported"),
        (["Normalize"], None, "the modules .* are not supported"),
        (["Pooling"], {"pooling_mode_max_tokens": True}, "max_tokens pooling with"),
        (["Pooling"], {f"pooling_mode_{kind}_tokens": True for kind in ("max", "mean")}, r"mean_tokens\+max_tokens"),
        (["Pooling", "Dense"], {"pooling_mode": "cls"}, "only a dense layer with tanh"),
        (["Pooling", "Dense", "Dense"], {"pooling_mode": "cls"}, "two modules Dense are not supported"),
    ],
)
def test_unsupported_modules_are_refused(names, pooling, message, tmp_path):
    write_modules(tmp_path, *names, pooling=pooling, activation="torch.nn.modules.linear.Identity")
    with pytest.raises(CheckpointError, match=message):
        pooling_modules.read(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], r"config_sentence_transformers\.json is not a JSON object"),
        ({"truncate_dim": "64"}, r"config_sentence_transformers\.json: truncate_dim: expected a whole number .*'64'"),
        ({"truncate_dim": 0}, "truncate_dim: expected a whole number from 1"),
        ({"truncate_dim": True}, "truncate_dim: expected a whole number from 1"),
    ],
)
def test_malformed_settings_are_named(content, message, tmp_path):
    write_modules(tmp_path, "Pooling", pooling={"pooling_mode": "mean"})
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        pooling_modules.read(tmp_path)
