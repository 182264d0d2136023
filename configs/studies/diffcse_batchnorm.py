"""DiffCSE and SimCSE with and without BatchNorm in the projector (DiffCSE Table 5).

Command:   diffcse study --config diffcse_batchnorm
Model:     BERT-base, scored on STS-B dev.
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 2 epochs of 15,625 steps of 64; 1 epoch
           for SimCSE.

Without BatchNorm the projector is that of SimCSE, dense + tanh. Both SimCSE rows have SimCSE's
optimizer settings.
"""

from diffcse_jax.apps.study import Study, settings_of


def get_study() -> Study:
    return Study(
        base="diffcse_base",
        variants={
            "DiffCSE": {},
            "DiffCSE without BatchNorm": {"model.projector": "mlp"},
            "SimCSE with BatchNorm": settings_of("simcse_base") | {"model.projector": "batchnorm"},
            "SimCSE": settings_of("simcse_base"),
        },
        tasks=("STSBenchmark",),
        published={
            "DiffCSE": {"STS-B dev": 84.56},
            "DiffCSE without BatchNorm": {"STS-B dev": 83.23},
            "SimCSE with BatchNorm": {"STS-B dev": 82.22},
            "SimCSE": {"STS-B dev": 81.47},
        },
        source="DiffCSE Table 5",
    )
