"""Where the noise between seeds comes from: new heads, the order of the data, or dropout.

Command:   diffcse study --config seed_noise --config.data.train_file=sentences.txt
Settings:  SimCSE with both projectors, as in `configs/studies/does_difference_help.py`. In each
           row, the seed changes one thing alone, and seed 42 draws the rest. DiffCSE is left out:
           with the same seed, its scores are those of SimCSE with BatchNorm, within 0.1 point.
Result:    the standard deviation of each row (docs/studies.md). With five seeds, its 95% interval
           is 0.60 to 2.87 times the estimate, so only large differences count.
"""

import runpy
from pathlib import Path

from diffcse_jax.apps.study import Study
from diffcse_jax.config.groups import SEEDED

STUDY = runpy.run_path(str(Path(__file__).with_name("does_difference_help.py")))


def get_study() -> Study:
    variants = {
        f"{row}, {what}": {**STUDY["ROWS"][row], "train.seed_changes": (what,)}
        for row in ("SimCSE", "SimCSE, BatchNorm")
        for what in SEEDED
    }
    return Study(
        base=STUDY["base_config"](),
        variants=variants,
        seeds=tuple(range(1, 6)),
        tasks=("STSBenchmark", "STS14"),
    )
