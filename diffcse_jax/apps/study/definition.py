"""What a study file returns, and how it is read. See docs/studies.md."""

import dataclasses
import runpy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diffcse_jax.config import SHIPPED, configuration, flat
from diffcse_jax.errors import ConfigError, UserError
from diffcse_jax.io import expand_path

if TYPE_CHECKING:
    from ml_collections import ConfigDict

SHIPPED_STUDIES = SHIPPED / "studies"

Settings = Mapping[str, Any]  # values by dotted key, such as {"optim.learning_rate": 3e-5}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """What to train and score. A study file returns it from `get_study()`.

    Attributes:
        base: The configuration that all variants change: a name in `configs/`, or a ConfigDict.
        variants: What each variant changes in the base, by name. The table compares the others with
            the first.
        seeds: The seeds of each variant.
        seeds_of: The seeds of variants that need other ones.
        tasks: Tasks and groups of tasks, as `--tasks` of `diffcse evaluate` takes them. They are
            scored on their test splits. Without tasks, only the dev metric of training is reported.
        dev_tasks: Tasks that are scored on their dev splits besides, in columns `TASK dev`.
        scores_last: Whether each run's last checkpoint is scored, too, in columns `TASK (last)`.
        start: Poolers to score the starting checkpoint with. `own` is the pooler that the
            checkpoint records.
        finetunings: What each fine-tuning changes in `finetune_multitask`, by name. Each starts
            from the encoder of every row with the row's seeds, and is a row of its own, `ROW,
            NAME`.
        comparisons: Further pairs of rows to compare, `(A, B)`. The table shows B minus A.
        published: Published scores by row and column. Columns are `STS-B dev`, names of tasks,
            `average sts` and `average transfer`; for fine-tunings `TASK_accuracy`, `TASK_pearson`
            and `average`.
        source: Where the scores are published.
    """

    base: "str | ConfigDict"
    variants: Mapping[str, Settings]
    comparisons: Sequence[tuple[str, str]] = ()
    seeds: Sequence[int] = (1, 2, 3)
    seeds_of: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    tasks: Sequence[str] = ("sts",)
    dev_tasks: Sequence[str] = ()
    scores_last: bool = False
    start: Sequence[str] = ()
    finetunings: Mapping[str, Settings] = dataclasses.field(default_factory=dict)
    published: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    source: str = ""

    def with_seeds(self, count: int) -> "Study":
        """Return the study with the seeds 1 to `count`.

        Rows that need other seeds have at most as many of these.
        """
        if count < 1:
            raise ConfigError(f"--seeds: expected at least 1, got {count}")
        fewer = {row: tuple(seeds)[:count] for row, seeds in self.seeds_of.items()}
        return dataclasses.replace(self, seeds=tuple(range(1, count + 1)), seeds_of=fewer)


def settings_of(name: str) -> dict[str, Any]:
    """Return all values of `configs/NAME.py` by key.

    It is for a variant that takes nothing from the base.
    """
    settings = flat(configuration(name, {})[1].to_dict())
    return {key: value for key, value in settings.items() if key != "train.seed" and value != {}}


def read_study(file: str) -> tuple[str, Study]:
    """Return the name and the study of a file, or of a file in `configs/studies/` by its name."""
    shipped = SHIPPED_STUDIES / f"{file}.py"
    path = shipped if shipped.is_file() else expand_path(file)
    if not path.is_file():
        names = ", ".join(sorted(each.stem for each in SHIPPED_STUDIES.glob("*.py")))
        raise ConfigError(
            f"--config: {file!r} is neither a file nor the name of a study. Known names: {names}"
        )
    try:
        study = runpy.run_path(str(path)).get("get_study", lambda: None)()
    except Exception as error:  # whatever the file's own code raises
        message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}: {message}") from error
    if not isinstance(study, Study):
        raise ConfigError(
            f"{path}: define a function get_study() that returns a Study, got {study!r}"
        )
    return path.stem, study
