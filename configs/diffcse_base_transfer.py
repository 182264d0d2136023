"""DiffCSE, BERT-base, for the transfer tasks (Chuang et al. 2022, Tables 2 and 13).

The authors give no script.

Command:  python train.py --config configs/diffcse_base_transfer.py
Data:     10^6 Wikipedia sentences of SimCSE (`wiki1m`), 2 epochs of 15,625 steps of 64.
Expected: transfer average 86.86 (published), with `cls_before_pooler`.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("diffcse_base")
    config.difference.weight = 0.05
    config.difference.mask_ratio = 0.15
    config.optim.learning_rate = 2e-6
    return config
