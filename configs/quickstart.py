"""Adapt MiniLM to the docstrings of the installed Python packages.

It needs no hub and no data, and takes minutes on two CPU cores.

Command:   make quickstart      (or: python train.py --config configs/quickstart.py)
Text:      docstrings of the standard library, numpy, scipy, jax and other installed packages.
Settings:  as in configs/adapt.py, with half of its batch and one evaluation at the end, to save
           time. A docstring's first sentence and its rest are a pair.
Dev score: retrieval on held-out functions: given a docstring's first sentence, find its rest.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("base/leads")  # a docstring has a first sentence
    config.data.train_file = "docstrings"
    config.data.held_out = 0.0  # `docstrings` holds functions out by itself
    config.train.batch_size = 128
    config.eval.every = 0
    config.eval.metric = "pairs_retrieval"
    config.eval.pairs_file = "docstrings"
    return config
