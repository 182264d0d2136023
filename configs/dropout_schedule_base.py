"""DiffCSE, BERT-base, with more dropout in the first two blocks: 0.3 and 0.2.

This is mask 11 of a report on adjusting dropout.

Command:  python train.py --config configs/dropout_schedule_base.py
Data:     10^6 Wikipedia sentences of SimCSE (`wiki1m`), 2 epochs of 15,625 steps of 64.
Expected: not published. `diffcse_base`, with 0.1 everywhere, has STS average 78.49 (published).

The two views of a sentence differ only by dropout, so the schedule decides in which blocks they
differ most. All twelve masks are in `configs/studies/dropout_masks.py`, which also says how far
`diffcse_base` is from the report. That gives one rate per block and no code. Here the rate applies
to hidden states and attention, and the embedding layer keeps the checkpoint's rate.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config

MASK_11 = (0.3, 0.2) + (0.1,) * 10


def get_config() -> ConfigDict:
    config = shipped_config("diffcse_base")
    config.model.hidden_dropout = config.model.attention_dropout = MASK_11
    return config
