"""The learning rates and weights of `does_difference_help`.

They are chosen with seeds that it does not report.

Command:   diffcse study --config does_difference_help_settings
           --config.data.train_file=sentences.txt
           --record benchmarks/results/does_difference_help_settings.jsonl
Rows:      each method with three learning rates, DiffCSE with three weights of the difference.
"""

import runpy
from pathlib import Path

from diffcse_jax.apps.study import Study

STUDY = runpy.run_path(str(Path(__file__).with_name("does_difference_help.py")))
LEARNING_RATES = (3e-5, 1e-4, 3e-4)
WEIGHTS = (0.005, 0.05, 0.5)
METHODS = ("SimCSE", "SimCSE, BatchNorm", "SimCSE++")


def get_study() -> Study:
    methods = {name: STUDY["ROWS"][name] for name in METHODS}
    for weight in WEIGHTS:
        methods[f"DiffCSE, lambda {weight}"] = {"difference.weight": weight}
    variants = {
        f"{name}, learning rate {rate:.0e}": {**settings, "optim.learning_rate": rate}
        for name, settings in methods.items()
        for rate in LEARNING_RATES
    }
    return Study(base=STUDY["base_config"](), variants=variants, seeds=(101, 102), tasks=())
