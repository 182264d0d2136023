"""Unsupervised SimCSE, BERT-large (Gao et al. 2021, Table A.1).

Command:  python train.py --config configs/simcse_large.py
Data:     10^6 Wikipedia sentences of SimCSE (`wiki1m`), 1 epoch of 15,625 steps of 64.
Expected: STS average 78.41, STS-B test 79.26 (published), with `cls_before_pooler`.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("simcse_base")
    config.model.name_or_path = "bert-large-uncased"
    config.optim.learning_rate = 1e-5
    return config
