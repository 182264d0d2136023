"""Supervised SimCSE with other temperatures, and with dot products (SimCSE Table D.1).

Command:   diffcse study --config simcse_temperature
Model:     BERT-base, scored on STS-B dev.
Data:      SNLI and MNLI as triples (SimCSE's `nli_for_simcse.csv`), 3 epochs of steps of 512.

The paper does not name the model of this table. Its score at 0.05 is that of supervised SimCSE in
the other tables.
"""

from diffcse_jax.apps.study import Study


def get_study() -> Study:
    return Study(
        base="supervised_simcse_base",
        variants={
            "tau=0.05": {},
            **{f"tau={tau}": {"contrast.temperature": tau} for tau in (0.001, 0.01, 0.1, 1.0)},
            "dot product": {"contrast.similarity": "dot", "contrast.temperature": 1.0},
        },
        tasks=("STSBenchmark",),
    )
