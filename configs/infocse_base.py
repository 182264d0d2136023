"""InfoCSE, BERT-base (Wu et al. 2022).

Its losses are contrast, and reconstruction of masked tokens from the sentence embedding.

Command:  python train.py --config configs/infocse_base.py
Data:     10^6 Wikipedia sentences of SimCSE (`wiki1m`), 2 epochs of 15,625 steps of 64.
Expected: STS average 78.85 (published; 79.39 for the model that the authors call `rtd`), from
          another starting point.

Two trained blocks read the states of BERT's frozen sixth block, with the sentence embedding at
position 0. The authors start from Condenser (`Luyu/condenser`), which has such a pretrained head.
Here the blocks start as BERT's last two.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("diffcse_base")
    config.difference.objective = "none"
    config.reconstruction.weight = 1e-5
    config.reconstruction.layer = 6
    config.generator.name_or_path = "start"
    return config
