"""DiffCSE with the twelve dropout schedules of the report on adjusting dropout (its Table 1), BERT-base.

Command:   python -m diffcse_jax.study configs/studies/dropout_masks.py
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 2 epochs of 15,625 steps of 64.

A schedule is a rate per block; blocks that it does not name have 0.1. The report has no published code and other text,
learning rate and generator than DiffCSE; here all else is `diffcse_base`, and hidden states and attention get the same
rates, as in `configs/dropout_schedule_base.py`.
"""

from diffcse_jax.study import Study

NUM_BLOCKS = 12
DEFAULT = 0.1
FIRST_BLOCKS = {
    "mask 1": (0.2,) * 4,
    "mask 2": (0.3,) * 4,
    "mask 3": (0.4,) * 4,
    "mask 4": (0.5,) * 4,
    "mask 5": (0.2,) * 6,
    "mask 6": (0.3,) * 6,
    "mask 7": (0.4,) * 6,
    "mask 8": (0.5,) * 6,
    "mask 9": (0.5, 0.4, 0.3, 0.2),
    "mask 10": (0.4, 0.3, 0.2),
    "mask 11": (0.3, 0.2),
    "mask 12": (0.2,),
}


def get_study() -> Study:
    variants: dict[str, dict] = {"0.1 everywhere": {}}
    for name, first in FIRST_BLOCKS.items():
        rates = first + (DEFAULT,) * (NUM_BLOCKS - len(first))
        variants[name] = {"model.hidden_dropout": rates, "model.attention_dropout": rates}
    return Study(base="diffcse_base", variants=variants)
