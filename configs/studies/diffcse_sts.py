"""SimCSE and DiffCSE on the seven STS tasks, BERT-base and RoBERTa-base (DiffCSE Table 1).

Command:   diffcse study --config diffcse_sts
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 2 epochs; 1 epoch for SimCSE.
Start:     The first row is BERT-base before training, with the mean of the embedding output and the
           last layer.
"""

from diffcse_jax.apps.study import Study, settings_of
from diffcse_jax.evaluation.results import PUBLISHED


def get_study() -> Study:
    trained = (
        "SimCSE-BERT-base",
        "DiffCSE-BERT-base",
        "SimCSE-RoBERTa-base",
        "DiffCSE-RoBERTa-base",
    )
    return Study(
        base="simcse_base",
        variants={
            "SimCSE-BERT-base": {},
            "DiffCSE-BERT-base": settings_of("diffcse_base"),
            "SimCSE-RoBERTa-base": settings_of("simcse_roberta_base"),
            "DiffCSE-RoBERTa-base": settings_of("diffcse_roberta_base"),
        },
        start=("avg_first_last",),
        published={name: PUBLISHED[name] for name in trained}
        | {"start (avg_first_last)": PUBLISHED["BERT-base first-last average"]},
        source="DiffCSE Table 1",
    )
