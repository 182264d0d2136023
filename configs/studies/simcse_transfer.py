"""SimCSE on the transfer tasks, with and without masked LM (SimCSE Table E.1).

It is unsupervised in some rows and supervised in others.

Command:   diffcse study --config simcse_transfer
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 1 epoch. Supervised rows read triples of
           SNLI and MNLI (SimCSE's `nli_for_simcse.csv`), 3 epochs.

Batch sizes and learning rates are those of Table A.1.
"""

from diffcse_jax.apps.study import Study, settings_of
from diffcse_jax.evaluation.results import PUBLISHED

ROBERTA_BASE = {"model.name_or_path": "roberta-base"}
ROBERTA_LARGE = {"model.name_or_path": "roberta-large"}


def get_study() -> Study:
    supervised = settings_of("supervised_simcse_base")
    models = {
        "SimCSE-BERT-base": {},
        "SimCSE-RoBERTa-base": settings_of("simcse_roberta_base"),
        "SimCSE-RoBERTa-large": settings_of("simcse_roberta_base")
        | ROBERTA_LARGE
        | {"optim.learning_rate": 3e-5},
        "supervised SimCSE-BERT-base": supervised,
        "supervised SimCSE-RoBERTa-base": supervised | ROBERTA_BASE,
        "supervised SimCSE-RoBERTa-large": supervised
        | ROBERTA_LARGE
        | {"optim.learning_rate": 1e-5},
    }
    return Study(
        base="simcse_base",
        variants=models
        | {f"{name} with MLM": settings | {"mlm.weight": 0.1} for name, settings in models.items()},
        tasks=("transfer",),
        published={
            name: PUBLISHED[name] for name in ("SimCSE-BERT-base", "SimCSE-BERT-base with MLM")
        },
        source="SimCSE Table E.1",
    )
