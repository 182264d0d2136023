"""SimCSE, SimCSE with masked LM and DiffCSE on the seven transfer tasks, BERT-base (DiffCSE Table 2).

Command:   python -m diffcse_jax.study configs/studies/diffcse_transfer.py
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 1 epoch of 15,625 steps of 64; 2 epochs for DiffCSE.
"""

from diffcse_jax.evaluation.published import scores_of
from diffcse_jax.study import Study, settings_of


def get_study() -> Study:
    return Study(
        base="simcse_base",
        variants={
            "SimCSE": {},
            "SimCSE with MLM": {"mlm.weight": 0.1},
            "DiffCSE": settings_of("diffcse_base_transfer"),
        },
        tasks=("transfer",),
        published={
            "SimCSE": scores_of("SimCSE-BERT-base"),
            "SimCSE with MLM": scores_of("SimCSE-BERT-base with MLM"),
            "DiffCSE": scores_of("DiffCSE-BERT-base"),
        },
        source="DiffCSE Table 2",
    )
