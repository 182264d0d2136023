"""SimCSE++, BERT-large (SimCSE++, main STS table).

Command:  python train.py --config configs/simcsepp_large.py
Data:     10^6 Wikipedia sentences of SimCSE (`wiki1m`), 1 epoch of 15,625 steps of 64.
Expected: STS average 79.30, STS-B test 80.37 (published), with `cls_before_pooler`.

The learning rate is that of the paper. Everything else is as for BERT-base.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("simcsepp_base")
    config.model.name_or_path = "bert-large-uncased"
    config.optim.learning_rate = 8e-6
    return config
