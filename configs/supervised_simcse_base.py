r"""Supervised SimCSE, BERT-base (Gao et al. 2021, Table 5).

Entailments are positives, and contradictions are hard negatives.

Command:  python train.py --config configs/supervised_simcse_base.py \
          --config.data.train_file=nli_for_simcse.csv
Data:     SNLI and MNLI as triples, a csv with columns sent0, sent1, hard_neg (SimCSE's
          `nli_for_simcse.csv`), 3 epochs.
Expected: STS average 81.57, STS-B test 84.25 (published), with `cls`.

The projector is kept for encoding and exported as Hugging Face's pooler.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("simcse_base")
    config.model.projector_train_only = False
    config.contrast.hard_negative_weight = 1.0
    config.data.train_file = "nli_for_simcse.csv"
    config.data.min_columns = 2
    config.train.batch_size = 512
    config.train.epochs = 3
    config.optim.learning_rate = 5e-5
    return config
