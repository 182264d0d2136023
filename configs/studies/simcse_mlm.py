"""Supervised SimCSE with an auxiliary masked LM of several weights (SimCSE Table D.2).

Command:   diffcse study --config simcse_mlm
Model:     BERT-base, scored on dev sets.
Data:      SNLI and MNLI as triples (SimCSE's `nli_for_simcse.csv`), 3 epochs of steps of 512.

The paper does not name the model of this table. Its score on STS-B without masked LM is that of
supervised SimCSE in the other tables. Its transfer scores are for dev sets. `python eval.py --mode
dev --tasks transfer` gives them for a run's folder.
"""

from diffcse_jax.apps.study import Study
from diffcse_jax.evaluation.results import PUBLISHED


def get_study() -> Study:
    return Study(
        base="supervised_simcse_base",
        variants={
            f"mlm.weight={weight}": {"mlm.weight": weight} for weight in (0.0, 0.01, 0.1, 1.0)
        },
        tasks=("STSBenchmark", "transfer"),
        published={"mlm.weight=0.0": PUBLISHED["supervised SimCSE-BERT-base"]},
        source="SimCSE Table 5",
    )
