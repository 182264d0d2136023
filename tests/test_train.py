"""What happens before training: the command line, checks in their order, and the size of batches."""

import pytest
from tiny_networks import config_of

from diffcse_jax import hosts
from diffcse_jax.errors import DataError
from diffcse_jax.training import train as train_module
from diffcse_jax.training.sharding import make_mesh
from diffcse_jax.training.train import train, with_fitting_batch


@pytest.fixture(autouse=True)
def normal_verbosity(monkeypatch):
    monkeypatch.setattr(hosts, "_verbosity", "normal")


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("train_file", {"data": {"train_file": "nowhere.txt"}}),
        ("pairs_file", {"eval": {"metric": "pairs_retrieval", "pairs_file": "nowhere.tsv"}}),
    ],
)
def test_files_are_checked_before_the_model_is_loaded(key, settings, tmp_path, monkeypatch):
    def load(*_, **__):
        raise AssertionError("loaded the model first")

    monkeypatch.setattr(train_module.hf, "read", load)
    text = tmp_path / "text.txt"
    text.write_text("A sentence of some words.\n" * 9)
    with pytest.raises(DataError, match=f"{key}.*nowhere"):
        train(config_of({"data": {"train_file": str(text)}}, settings), tmp_path / "run")


@pytest.mark.parametrize(
    ("examples", "devices", "chunk_size", "expected"),
    [(300, 1, 0, 256), (100, 1, 0, 100), (101, 8, 0, 96), (201, 1, 64, 192), (50, 1, 64, 50), (50, 4, 64, 48)],
)
def test_few_texts_shrink_the_batch(examples, devices, chunk_size, expected, capsys):
    config = config_of({"train": {"batch_size": 256, "chunk_size": chunk_size}, "mesh": {"data": devices}})
    fitting = with_fitting_batch(config, examples, make_mesh(config))
    assert fitting.train.batch_size == expected
    make_mesh(fitting)  # splits evenly
    assert fitting.train.chunks <= config.train.chunks
    assert (f"Training with batches of {expected}" in capsys.readouterr().err) == (expected != 256)


def test_a_single_text_is_too_few():
    config = config_of({"mesh": {"data": 1}})
    with pytest.raises(DataError, match="gives 1 training examples, too few"):
        with_fitting_batch(config, 1, make_mesh(config))
