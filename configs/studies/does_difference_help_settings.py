"""The learning rates and weights of `does_difference_help`.

They are chosen with a seed that it does not report.

Command:   diffcse study --config does_difference_help_settings
           --config.data.train_file=sentences.txt
           --record benchmarks/results/does_difference_help_settings.jsonl
Rows:      each method with three learning rates. Then, with a rate of 1e-4, DiffCSE with larger
           weights of the difference, with SimCSE's projector, and with more masked tokens.
"""

import runpy
from pathlib import Path

from diffcse_jax.apps.study import Settings, Study

STUDY = runpy.run_path(str(Path(__file__).with_name("does_difference_help.py")))
LEARNING_RATES = (3e-5, 1e-4, 3e-4)
METHODS: dict[str, Settings] = {
    **{name: STUDY["ROWS"][name] for name in ("SimCSE", "SimCSE, BatchNorm", "SimCSE++")},
    "DiffCSE, lambda 0.005": {},
}
WITH_MLP: dict[str, object] = {"model.projector": "mlp"}
CHANGES: dict[str, Settings] = {
    **{
        f"DiffCSE, lambda {weight:g}, learning rate 1e-04": {"difference.weight": weight}
        for weight in (0.05, 0.5, 5.0)
    },
    "DiffCSE, SimCSE's projector, lambda 0.5": WITH_MLP | {"difference.weight": 0.5},
    **{
        f"DiffCSE, SimCSE's projector, lambda {weight:g}, mask ratio 0.6": {
            **WITH_MLP,
            "difference.weight": weight,
            "difference.mask_ratio": 0.6,
        }
        for weight in (0.5, 5.0)
    },
}


def get_study() -> Study:
    with_rates = {
        f"{name}, learning rate {rate:.0e}": {**settings, "optim.learning_rate": rate}
        for name, settings in METHODS.items()
        for rate in LEARNING_RATES
    }
    return Study(base=STUDY["base_config"](), variants=with_rates | CHANGES, seeds=(101,), tasks=())
