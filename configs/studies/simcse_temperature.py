"""SimCSE with other temperatures, BERT-base (after SimCSE Table D.1).

Command:   python -m diffcse_jax.study configs/studies/simcse_temperature.py
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 1 epoch of 15,625 steps of 64.
"""

from diffcse_jax.study import Study


def get_study() -> Study:
    return Study(
        base="simcse_base",
        grid={"contrast.temperature": (0.05, 0.001, 0.01, 0.1, 1.0)},
        tasks=("STSBenchmark",),
    )
