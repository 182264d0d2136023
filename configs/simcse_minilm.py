"""SimCSE on a BERT of 6 blocks that needs no hub: minutes on two CPU cores, on any text.

Command:  python train.py --config configs/simcse_minilm.py --config.data.train_file=sentences.txt
Encoder:  as in configs/diffcse_minilm.py, so that the two can be compared.
Settings: SimCSE's projector (dense and tanh), which is dropped after training.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("diffcse_minilm")
    config.model.projector = "mlp"
    config.difference.weight = 0.0
    return config
