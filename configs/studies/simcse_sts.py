"""Unsupervised and supervised SimCSE on the seven STS tasks (SimCSE Tables 5 and A.1).

Table 5 has the scores, and Table A.1 the settings.

Command:   diffcse study --config simcse_sts
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 1 epoch. Supervised rows read triples of
           SNLI and MNLI (SimCSE's `nli_for_simcse.csv`), 3 epochs.
Start:     The first row is BERT-base before training, with the mean of the embedding output and the
           last layer.
"""

from diffcse_jax.apps.study import Study, settings_of
from diffcse_jax.evaluation.results import PUBLISHED

ROBERTA_BASE = {"model.name_or_path": "roberta-base"}
ROBERTA_LARGE = {"model.name_or_path": "roberta-large"}


def get_study() -> Study:
    supervised = settings_of("supervised_simcse_base")
    return Study(
        base="simcse_base",
        variants={
            "SimCSE-BERT-base": {},
            "SimCSE-BERT-large": settings_of("simcse_large"),
            "SimCSE-RoBERTa-base": settings_of("simcse_roberta_base"),
            "SimCSE-RoBERTa-large": settings_of("simcse_roberta_base")
            | ROBERTA_LARGE
            | {"optim.learning_rate": 3e-5},
            "supervised SimCSE-BERT-base": supervised,
            "supervised SimCSE-RoBERTa-base": supervised | ROBERTA_BASE,
            "supervised SimCSE-RoBERTa-large": supervised
            | ROBERTA_LARGE
            | {"optim.learning_rate": 1e-5},
        },
        start=("avg_first_last",),
        published={
            "start (avg_first_last)": PUBLISHED["BERT-base first-last average"],
            "SimCSE-BERT-base": PUBLISHED["SimCSE-BERT-base"],
            "SimCSE-BERT-large": PUBLISHED["SimCSE-BERT-large"],
            "SimCSE-RoBERTa-base": PUBLISHED["SimCSE-RoBERTa-base"],
            "supervised SimCSE-BERT-base": PUBLISHED["supervised SimCSE-BERT-base"],
        },
        source="SimCSE Table 5, and SimCSE++ Table 3 for BERT-large",
    )
