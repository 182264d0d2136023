"""SimCSE++, BERT-base: off-dropout negatives and dimension-wise contrast (main STS table).

Command:  python train.py --config configs/simcsepp_base.py
Data:     10^6 Wikipedia sentences of SimCSE (`wiki1m`), 1 epoch of 15,625 steps of 64.
Expected: STS average 78.05, STS-B test 79.71 (published), with `cls_before_pooler`.

The command that the authors released trains plain SimCSE, because the new terms are commented out.
These are the settings of the paper, in the form of the authors' earlier, complete code: m = 0.9 on
the positive logit, tau = 5, weight 0.1.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("simcse_base")
    config.contrast.negatives = "off_dropout"
    config.contrast.negative_ratio = 0.9
    config.dcl.weight = 0.1
    config.dcl.temperature = 5.0
    return config
