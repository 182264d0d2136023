"""SimCSE, SimCSE++ and DiffCSE on the seven STS tasks, BERT-base and BERT-large (SimCSE++ Table 3).

Command:   diffcse study --config simcsepp_sts
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 1 epoch of 15,625 steps of 64; 2 epochs
           for DiffCSE.
Published: The scores are for one seed each.
"""

from diffcse_jax.apps.study import Study, settings_of
from diffcse_jax.evaluation.results import PUBLISHED

OFF_DROPOUT = {"contrast.negatives": "off_dropout", "contrast.negative_ratio": 0.9}
DCL = {"dcl.weight": 0.1, "dcl.temperature": 5.0}


def get_study() -> Study:
    return Study(
        base="simcse_base",
        variants={
            "SimCSE": {},
            "off-dropout": OFF_DROPOUT,
            "DCL": DCL,
            "SimCSE++": OFF_DROPOUT | DCL,
            "DiffCSE": settings_of("diffcse_base"),
            "DiffCSE + SimCSE++": settings_of("diffcse_simcsepp_base"),
            "SimCSE-BERT-large": settings_of("simcse_large"),
            "SimCSE++-BERT-large": settings_of("simcsepp_large"),
        },
        published={
            "SimCSE": PUBLISHED["SimCSE-BERT-base"],
            "off-dropout": PUBLISHED["off-dropout only, BERT-base"],
            "DCL": PUBLISHED["DCL only, BERT-base"],
            "SimCSE++": PUBLISHED["SimCSE++-BERT-base"],
            "DiffCSE": PUBLISHED["DiffCSE-BERT-base"],
            "DiffCSE + SimCSE++": PUBLISHED["DiffCSE + SimCSE++, BERT-base"],
            "SimCSE-BERT-large": PUBLISHED["SimCSE-BERT-large"],
            "SimCSE++-BERT-large": PUBLISHED["SimCSE++-BERT-large"],
        },
        source="SimCSE++ Table 3",
    )
