"""DiffCSE, RoBERTa-base, for semantic similarity (Chuang et al. 2022, Tables 1 and 12).

Command:  python train.py --config configs/diffcse_roberta_base.py
Data:     10^6 Wikipedia sentences of SimCSE (`wiki1m`), 2 epochs.
Expected: STS average 78.21, STS-B test 82.38 (published), with `cls_before_pooler`.

The generator must have RoBERTa's vocabulary, so it is distilroberta-base. (With its default,
distilbert-base-uncased, the original code fails with an index out of range.)
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("diffcse_base")
    config.model.name_or_path = "roberta-base"
    config.generator.name_or_path = "distilroberta-base"
    config.difference.mask_ratio = 0.20
    config.optim.learning_rate = 1e-5
    return config
