"""Reading the pooler of a sentence-transformers folder; writing is in test_export.py."""

import json

import pytest

from diffcse_jax.errors import CheckpointError
from diffcse_jax.storage import sentence_transformers_folder


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
def test_both_ways_to_write_a_pooling_mode_are_read(pooling, pooler, tmp_path):
    write_modules(tmp_path, "Pooling", "Normalize", pooling=pooling)
    assert sentence_transformers_folder.read(tmp_path) == sentence_transformers_folder.RecordedPooler(pooler, None)


@pytest.mark.parametrize(
    ("names", "pooling", "message"),
    [
        (["Pooling", "LSTM"], {"pooling_mode": "mean"}, "cannot follow the modules Transformer, Pooling, LSTM"),
        (["Normalize"], None, "cannot follow the modules"),
        (["Pooling"], {"pooling_mode_max_tokens": True}, "cannot follow max_tokens pooling"),
        (["Pooling"], {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}, "cannot follow mean_tokens"),
        (["Pooling", "Dense"], {"pooling_mode": "cls"}, "only a dense layer with tanh"),
    ],
)
def test_modules_that_are_no_pooler_of_ours_are_refused(names, pooling, message, tmp_path):
    write_modules(tmp_path, *names, pooling=pooling, activation="torch.nn.modules.linear.Identity")
    with pytest.raises(CheckpointError, match=message):
        sentence_transformers_folder.read(tmp_path)
