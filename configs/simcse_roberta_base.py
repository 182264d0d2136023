"""Unsupervised SimCSE, RoBERTa-base (Gao et al. 2021, Tables 5 and A.1).

Command:  python train.py --config configs/simcse_roberta_base.py
Data:     10^6 Wikipedia sentences of SimCSE (`wiki1m`), 1 epoch of 1,953 steps of 512.
Expected: STS average 76.57, STS-B test 80.22 (published), with `cls_before_pooler`.

If 512 sentences do not fit into memory, `--config.train.chunk_size=64` computes the same step in
chunks.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("simcse_base")
    config.model.name_or_path = "roberta-base"
    config.train.batch_size = 512
    config.optim.learning_rate = 1e-5
    return config
