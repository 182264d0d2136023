"""`configs/adapt.py` with titles and first sentences alone, as in the measurements of docs/records/adaptation.md.

Command:  python train.py --config configs/base/leads.py --config.data.train_file=documents.txt
Pairs:    documents without a title or first sentence are left out. `lead_retrieval` selects the checkpoint.
"""

from ml_collections import ConfigDict

from diffcse_jax.config import shipped_config


def get_config() -> ConfigDict:
    config = shipped_config("adapt")
    config.data.cloze = 0.0
    config.eval.metric = "lead_retrieval"
    return config
