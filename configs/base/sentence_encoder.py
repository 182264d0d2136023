"""Settings for a start that is a sentence encoder already (it records its pooler): improve it, or leave it as it is.

Command:  python train.py --config configs/base/sentence_encoder.py --config.data.train_file=sentences.txt
Settings: the pooler that the checkpoint records, no projector (the vector that is trained is the one that is used),
          learning rate 2e-5, temperature 0.05. General quality is shown at every evaluation, and if nothing beats the
          start by more than chance, the start is exported.
A base for files of one's own (`shipped_config`), such as configs/adapt.py.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.model.name_or_path = "minilm"
    config.model.pooler = "own"
    config.model.projector = "none"
    config.difference.weight = 0.0
    config.contrast.temperature = 0.05
    config.optim.learning_rate = 2e-5
    config.eval.every = 20
    config.eval.keep_start = True
    config.eval.guard = True
    return config
