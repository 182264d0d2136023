"""DiffCSE, BERT-base, with more dropout in the first two blocks: 0.3 and 0.2 (a report on adjusting dropout, mask 11).

Command:  python train.py --config configs/dropout_schedule_base.py
Data:     10^6 Wikipedia sentences of SimCSE (`wiki1m`), 2 epochs of 15,625 steps of 64.
Expected: none published in this form; `diffcse_base`, with 0.1 everywhere, has STS average 78.49 (published).

The two views of a sentence differ by dropout alone: a schedule says in which blocks they part. The report's other masks
are tuples of the same kind. It has no published code; here hidden states and attention get the same rates.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config

NUM_BLOCKS = 12


def get_config() -> ConfigDict:
    config = shipped_config("diffcse_base")
    rates = (0.3, 0.2) + (0.1,) * (NUM_BLOCKS - 2)
    config.model.hidden_dropout = rates
    config.model.attention_dropout = rates
    return config
