"""DiffCSE, BERT-base, for semantic similarity (Chuang et al. 2022, Tables 1 and 12).

This is the paper's main run.

Command:  python train.py --config configs/diffcse_base.py
Data:     10^6 Wikipedia sentences of SimCSE (`wiki1m`), 2 epochs of 15,625 steps of 64.
Expected: STS average 78.49, STS-B test 80.59, STS-B dev 84.56 (published), with
          `cls_before_pooler`.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.model.name_or_path = "bert-base-uncased"
    config.model.projector = "batchnorm"
    config.generator.name_or_path = "distilbert-base-uncased"
    config.difference.weight = 0.005
    config.difference.mask_ratio = 0.30
    config.data.train_file = "wiki1m"
    config.data.max_length = 32
    config.train.batch_size = 64
    config.train.epochs = 2
    config.optim.learning_rate = 7e-6
    config.eval.every = 125
    return config
