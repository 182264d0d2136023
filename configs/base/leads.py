"""`configs/adapt.py` for queries that look like titles or first sentences.

Command:  python train.py --config configs/base/leads.py --config.data.train_file=documents.txt
Pairs:    documents without a title or first sentence are left out. `lead_retrieval` selects the
          checkpoint.
Weights:  those of the best checkpoint. Halfway to the start, such queries would find less
          (docs/records/search.md).
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("adapt")
    config.data.cloze = 0.0
    config.eval.metric = "lead_retrieval"
    config.eval.interpolate = ()
    return config
