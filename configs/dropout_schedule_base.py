"""DiffCSE, BERT-base, with more dropout in the first two blocks: 0.3 and 0.2 (a report on adjusting dropout, mask 11).

Command:  python train.py --config configs/dropout_schedule_base.py
Data:     10^6 Wikipedia sentences of SimCSE (`wiki1m`), 2 epochs of 15,625 steps of 64.
Expected: none published in this form; `diffcse_base`, with 0.1 everywhere, has STS average 78.49 (published).

The two views of a sentence differ by dropout alone: a schedule says in which blocks they part. The report's other masks
are `mask1` to `mask12`. It gives one rate per block and has no published code; here hidden states and attention have it
alike.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("diffcse_base")
    config.model.dropout_schedule = "mask11"
    return config
