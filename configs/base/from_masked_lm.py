r"""Settings for a masked LM (BERT, RoBERTa, ...).

Its sentence embeddings say little until they are trained.

Command:  python train.py --config configs/base/from_masked_lm.py \
          --config.data.train_file=sentences.txt
Settings: unsupervised SimCSE for BERT-base (Gao et al. 2021): position 0 through a dense + tanh
          projector that is dropped after training, learning rate 3e-5, temperature 0.05, 64
          sentences of 32 tokens. Equal sentences are not negatives of one another.

Use it as a base for your own configuration files (`shipped_config`). The papers' runs have their
own settings.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.model.pooler = "cls"
    config.model.projector = "mlp"
    config.difference.weight = 0.0
    config.contrast.temperature = 0.05
    config.contrast.mask_duplicates = "text"
    config.optim.learning_rate = 3e-5
    config.train.epochs = 1
    return config
