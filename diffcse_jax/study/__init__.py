"""Studies: variants of a configuration, trained with several seeds, fine-tunings of them, and tables of their scores.

A study is a Python file with a function `get_study`; `configs/studies/` has one per table of the papers.
docs/studies.md describes them for users.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diffcse_jax.config import flat, shipped_config

if TYPE_CHECKING:
    from ml_collections import ConfigDict

Settings = Mapping[str, Any]  # values by dotted key: {"optim.learning_rate": 3e-5}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """What is trained and scored, as a study file says it.

    Attributes:
        base: the configuration that all variants start from: the name of a file in `configs/`, or a ConfigDict of what
            differs from the defaults.
        variants: by name, what a variant changes in the base. Differences are taken to the first one.
        grid: keys with several values each: every variant is run at every point of the grid.
        seeds: of every variant.
        seeds_of: the seeds of variants that have others.
        tasks: tasks and groups of tasks, as `eval.py --tasks` takes them, scored on their test splits. Empty: none
            but the dev metric of training.
        start: poolers with which the model that training starts from is scored, too; `own` is the one that it records.
        finetunings: by name, what a fine-tuning on labelled tasks changes in `finetune_base`. Each of them is done from
            the encoder of every row, those of the start included, with the row's seeds, and is a row `ROW, NAME`.
        finetune_base: a configuration of `diffcse finetune`: the name of a file in `configs/`, or the path of a file.
        published: by row, published scores by column: `STS-B dev`, a task's name, `average sts` or `average transfer`;
            of fine-tunings `TASK_accuracy`, `TASK_pearson` or `average`.
        source: where they are published.
    """

    base: "str | ConfigDict"
    variants: Mapping[str, Settings] = dataclasses.field(default_factory=dict)
    grid: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    seeds: Sequence[int] = (1, 2, 3)
    seeds_of: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    tasks: Sequence[str] = ("sts",)
    start: Sequence[str] = ()
    finetunings: Mapping[str, Settings] = dataclasses.field(default_factory=dict)
    finetune_base: str = "finetune_multitask"
    published: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    source: str = ""


def settings_of(name: str) -> dict[str, Any]:
    """All values of the configuration `configs/NAME.py` by dotted key: a variant that has nothing of the base.

    But for empty tables, such as that of a configuration without labelled tasks.
    """
    settings = flat(shipped_config(name).to_dict())
    return {key: value for key, value in settings.items() if key != "train.seed" and value != {}}
