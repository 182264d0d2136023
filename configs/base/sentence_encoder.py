r"""Settings for a sentence encoder that records its pooler: improve it, or leave it as it is.

Command:  python train.py --config configs/base/sentence_encoder.py \
          --config.data.train_file=sentences.txt
Settings: the recorded pooler, no projector (the trained embedding is the one that is used),
          learning rate 2e-5, temperature 0.05. Rows with an equal text are not negatives of one
          another. Each evaluation also scores general quality. If no checkpoint is significantly
          better, the starting checkpoint is exported.

Use it as a base for your own configuration files (`shipped_config`), as configs/adapt.py does.
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
    config.contrast.mask_duplicates = "text"
    config.optim.learning_rate = 2e-5
    config.eval.every = 20
    config.eval.keep_start = True
    config.eval.guard = True
    return config
