"""DiffCSE without one of its two objectives, BERT-base (DiffCSE Table 3, on STS-B dev).

Command:   python -m diffcse_jax.study configs/studies/diffcse_objectives.py
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 2 epochs of 15,625 steps of 64; 1 epoch for SimCSE.
"""

from diffcse_jax.study import Study, settings_of


def get_study() -> Study:
    return Study(
        base="diffcse_base",
        variants={
            "DiffCSE": {},
            "without contrast": {"contrast.weight": 0.0},
            "SimCSE": settings_of("simcse_base"),
        },
        tasks=("STSBenchmark",),
        published={
            "DiffCSE": {"STS-B dev": 84.56},
            "without contrast": {"STS-B dev": 54.48},
            "SimCSE": {"STS-B dev": 81.47},
        },
        source="DiffCSE Table 3",
    )
