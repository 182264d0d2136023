"""Unsupervised SimCSE, BERT-base (Gao et al. 2021, Table 5).

Command:  python train.py --config configs/simcse_base.py
Data:     10^6 Wikipedia sentences of SimCSE (`wiki1m`), 1 epoch of 15,625 steps of 64.
Expected: STS average 76.25, STS-B test 76.85 (published), with `cls_before_pooler`; transfer
          average 85.81 (published).
"""

from ml_collections import ConfigDict

from diffcse_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.model.projector = "mlp"
    config.difference.objective = "none"
    config.train.epochs = 1
    config.optim.learning_rate = 3e-5
    return config
