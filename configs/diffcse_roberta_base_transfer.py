"""DiffCSE, RoBERTa-base, for the transfer tasks (Chuang et al. 2022, Tables 2 and 13).

The authors give no script.

Command:  python train.py --config configs/diffcse_roberta_base_transfer.py
Data:     10^6 Wikipedia sentences of SimCSE (`wiki1m`), 2 epochs of steps of 128.
Expected: transfer average 87.04 (published), with `cls_before_pooler`.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("diffcse_roberta_base")
    config.difference.weight = 0.05
    config.difference.mask_ratio = 0.15
    config.train.batch_size = 128
    config.optim.learning_rate = 3e-6
    return config
