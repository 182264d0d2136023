"""DiffCSE with the two terms of SimCSE++, BERT-base.

It is the row "DiffCSE + SimCSE++" of the main STS table of SimCSE++.

Command:  python train.py --config configs/diffcse_simcsepp_base.py
Data:     10^6 Wikipedia sentences of SimCSE (`wiki1m`), 2 epochs of 15,625 steps of 64.
Expected: STS average 78.69, STS-B test 80.94 (published), with `cls_before_pooler`.

The authors published no code of this combination. Here it is the sum of both losses, each with the
weight of its paper.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("diffcse_base")
    config.contrast.negatives = "off_dropout"
    config.contrast.negative_ratio = 0.9
    config.dcl.weight = 0.1
    config.dcl.temperature = 5.0
    return config
