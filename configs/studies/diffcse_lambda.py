"""DiffCSE with other weights lambda of replaced-token detection (DiffCSE Table 8).

Command:   diffcse study --config diffcse_lambda
Model:     BERT-base, scored on STS-B dev.
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 2 epochs of 15,625 steps of 64.

With lambda = 0 it is SimCSE with the projector and the optimizer settings of DiffCSE.
"""

from diffcse_jax.apps.study import Study

WEIGHTS = (0.0, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1)


def get_study() -> Study:
    return Study(
        base="diffcse_base",
        variants={
            f"difference.weight={weight}": {"difference.weight": weight} for weight in WEIGHTS
        },
        tasks=("STSBenchmark",),
        published={
            "difference.weight=0.0": {"STS-B dev": 82.22},
            "difference.weight=0.005": {"STS-B dev": 84.56},
            "difference.weight=0.1": {"STS-B dev": 83.66},
        },
        source="DiffCSE Table 8",
    )
