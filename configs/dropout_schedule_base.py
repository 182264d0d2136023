"""DiffCSE, BERT-base, with more dropout in the first two blocks: 0.3 and 0.2 (a report on adjusting dropout, mask 11).

Command:  python train.py --config configs/dropout_schedule_base.py
Data:     10^6 Wikipedia sentences of SimCSE (`wiki1m`), 2 epochs of 15,625 steps of 64.
Expected: not published. `diffcse_base`, with 0.1 everywhere, has STS average 78.49 (published).

The two views of a sentence differ only by dropout, so the schedule decides in which blocks they differ most. The other
schedules are `mask1` to `mask12`. The report gives one rate per block and no code. Here the rate applies to hidden
states and attention.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("diffcse_base")
    config.model.dropout_schedule = "mask11"
    return config
