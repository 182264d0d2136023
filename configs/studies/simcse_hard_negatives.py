"""Supervised SimCSE with and without hard negatives of several weights (SimCSE Table 7).

Command:   diffcse study --config simcse_hard_negatives
Model:     BERT-base, scored on STS-B dev.
Data:      SNLI and MNLI as triples (SimCSE's `nli_for_simcse.csv`), 3 epochs of steps of 512.

The paper has another row, with neutral sentences. The triples do not contain them, so it needs a
file that has them in one more column (`hard_neg_2`).
"""

from diffcse_jax.apps.study import Study


def get_study() -> Study:
    return Study(
        base="supervised_simcse_base",
        variants={
            "alpha=1": {},
            "alpha=0.5": {"contrast.hard_negative_weight": 0.5},
            "alpha=2": {"contrast.hard_negative_weight": 2.0},
            "no hard negatives": {"data.columns": ("sent0", "sent1")},
        },
        tasks=("STSBenchmark",),
    )
