"""SimCSE++ on a BERT of 6 blocks that needs no hub: minutes on two CPU cores, on any text.

Command:  python train.py --config configs/simcsepp_minilm.py --config.data.train_file=sentences.txt
Settings: as in configs/simcse_minilm.py, with off-dropout negatives and dimension-wise contrast as
          in configs/simcsepp_base.py.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("simcse_minilm")
    config.contrast.negatives = "off_dropout"
    config.contrast.negative_ratio = 0.9
    config.dcl.weight = 0.1
    config.dcl.temperature = 5.0
    return config
