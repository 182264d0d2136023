"""SimCSE, SimCSE with masked LM, and DiffCSE on the seven transfer tasks (DiffCSE Table 2).

Command:   diffcse study --config diffcse_transfer
Model:     BERT-base and RoBERTa-base.
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 1 epoch; 2 epochs for DiffCSE.
"""

from diffcse_jax.apps.study import Study, settings_of
from diffcse_jax.evaluation.results import PUBLISHED


def get_study() -> Study:
    published = (
        "SimCSE-BERT-base",
        "SimCSE-BERT-base with MLM",
        "DiffCSE-BERT-base",
        "DiffCSE-RoBERTa-base",
    )
    return Study(
        base="simcse_base",
        variants={
            "SimCSE-BERT-base": {},
            "SimCSE-BERT-base with MLM": {"mlm.weight": 0.1},
            "DiffCSE-BERT-base": settings_of("diffcse_base_transfer"),
            "SimCSE-RoBERTa-base": settings_of("simcse_roberta_base"),
            "SimCSE-RoBERTa-base with MLM": settings_of("simcse_roberta_base")
            | {"mlm.weight": 0.1},
            "DiffCSE-RoBERTa-base": settings_of("diffcse_roberta_base_transfer"),
        },
        tasks=("transfer",),
        published={name: PUBLISHED[name] for name in published},
        source="DiffCSE Table 2",
    )
