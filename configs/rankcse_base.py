"""RankCSE, BERT-base (Liu et al. 2023).

Its losses are contrast, ranking consistency, and ListMLE distillation from two teachers.

Command:  python train.py --config configs/rankcse_base.py
Data:     10^6 Wikipedia sentences of SimCSE (`wiki1m`), one epoch of 7,812 steps of 128.
Expected: STS average 80.36 (published).

The formulas are those of the paper. The settings (teachers and their weights, temperatures, batch
size, learning rate) are those of the only public implementation, which is not by the authors. The
teachers are pooled at position 0, without a head.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("simcse_base")
    config.consistency.weight = 1.0
    config.distillation.weight = 1.0
    config.distillation.teachers = (
        "voidism/diffcse-bert-base-uncased-sts",
        "princeton-nlp/unsup-simcse-bert-large-uncased",
    )
    config.distillation.poolers = ("cls_before_pooler", "cls_before_pooler")
    config.distillation.shares = (1 / 3, 2 / 3)
    config.train.batch_size = 128
    config.train.epochs = 1
    config.optim.learning_rate = 3e-5
    return config
