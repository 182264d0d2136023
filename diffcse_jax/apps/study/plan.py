"""The runs of a study, each with its configuration and its folder."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffcse_jax.apps.study.definition import Settings, Study
from diffcse_jax.apps.study.record import StudyRecord
from diffcse_jax.apps.study.run import StudyRun
from diffcse_jax.config import OWN_POOLER, Config, configuration, read_overrides
from diffcse_jax.errors import ConfigError
from diffcse_jax.evaluation import runner

if TYPE_CHECKING:
    from ml_collections import ConfigDict

FINETUNING = "finetune_multitask"  # the configuration that fine-tunings change


@dataclasses.dataclass(frozen=True)
class Plan:
    """All runs of a study, in the order of the table."""

    name: str
    study: Study
    runs: list[StudyRun]

    @property
    def rows(self) -> dict[str, list[StudyRun]]:
        """The runs of each row of the table."""
        rows: dict[str, list[StudyRun]] = {}
        for run in self.runs:
            rows.setdefault(run.row, []).append(run)
        return rows

    def with_record(self, record: StudyRecord) -> "Plan":
        """Return the plan, whose runs are done if the record has their results."""
        return dataclasses.replace(
            self, runs=[dataclasses.replace(run, record=record) for run in self.runs]
        )

    def selected(self, variants: Sequence[str]) -> list[StudyRun]:
        """Return the runs of these variants (without any: of all), in the order of seeds."""
        for value in variants:
            if value not in self.rows:
                known = ", ".join(self.rows)
                raise ConfigError(f"--variants: {self.name} has no {value!r}. It has: {known}")
        return [
            run
            for run in sorted(self.runs, key=lambda run: run.seed or 0)
            if not variants or run.row in variants
        ]


def make_plan(name: str, study: Study, overrides: Sequence[str], workdir: Path) -> Plan:
    """Build the configuration of every run.

    Every variant gets the overrides `--config.KEY=VALUE` last, and every fine-tuning the
    `--finetune.KEY=VALUE`.
    """
    _check_variants(name, study)
    _check_tasks(name, study)
    of_tunings = [
        argument for argument in overrides if argument.lstrip("-").startswith("finetune.")
    ]
    if of_tunings and not study.finetunings:
        raise ConfigError(f"{of_tunings[0]}: {name} has no fine-tunings")
    values = read_overrides(argument for argument in overrides if argument not in of_tunings)
    encoders = [*_encoders(name, study, values, workdir)]
    tuned = [*_tuned(name, study, read_overrides(of_tunings, "finetune"), encoders, workdir)]
    runs = encoders + tuned
    for pair in study.comparisons:
        if isinstance(pair, str) or len(pair) != 2:
            raise ConfigError(
                f"{name}: comparisons: write each as a pair of rows, ('A', 'B'), not {pair!r}"
            )
    named = {
        "seeds_of": (study.seeds_of, encoders),
        "published": (study.published, runs),
        "comparisons": (itertools.chain(*study.comparisons), runs),
    }
    for field, (names, of) in named.items():
        rows = dict.fromkeys(run.row for run in of)
        if unknown := set(names) - rows.keys():
            raise ConfigError(
                f"{name}: {field} names {min(unknown)!r}. The study has: {', '.join(rows)}"
            )
    folders: dict[str, StudyRun] = {}
    for run in runs:
        if (other := folders.setdefault(str(run.folder).casefold(), run)) is not run:
            raise ConfigError(
                f"{name}: {other.label!r} and {run.label!r} would share a folder. Rename one"
            )
    return Plan(name, study, runs)


def _check_variants(name: str, study: Study) -> None:
    """Refuse a study without variants, and variants that are not settings."""
    if not study.variants:
        raise ConfigError(f"{name}: a study needs variants")
    for row, settings in study.variants.items():
        if not isinstance(settings, Mapping):
            raise ConfigError(
                f"{name}: variant {row!r}: expected a dict of keys and values, not {settings!r:.60}"
            )


def _check_tasks(name: str, study: Study) -> None:
    """Refuse tasks that no encoder can be scored on, before hours are spent on training."""
    for field, mode in (("tasks", "test"), ("dev_tasks", "dev")):
        try:
            runner.expand_groups(getattr(study, field), mode)
        except ConfigError as error:
            raise ConfigError(f"{name}: {field}: {error}") from error


def _encoders(
    name: str, study: Study, values: Mapping[str, Any], workdir: Path
) -> Iterator[StudyRun]:
    """Yield the starting checkpoints, with each pooler, and the runs of all variants."""
    tasks, dev_tasks = tuple(study.tasks), tuple(study.dev_tasks)
    for pooler in study.start:
        row = "start" if pooler == OWN_POOLER else f"start ({pooler})"
        config = _changed(name, study.base, values)
        yield StudyRun(
            row,
            None,
            config,
            _folder_of(row, None, workdir),
            tasks=tasks,
            dev_tasks=dev_tasks,
            pooler=pooler,
        )
    for row, settings in study.variants.items():
        config = _changed(f"{name}: variant {row!r}", study.base, {**settings, **values})
        for seed in study.seeds_of.get(row, study.seeds):
            yield StudyRun(
                row,
                seed,
                _seeded(config, seed),
                _folder_of(row, seed, workdir),
                tasks=tasks,
                dev_tasks=dev_tasks,
                scores_last=study.scores_last,
            )


def _tuned(
    name: str, study: Study, values: Mapping[str, Any], encoders: Sequence[StudyRun], workdir: Path
) -> Iterator[StudyRun]:
    """Yield the fine-tunings of all encoders."""
    for encoder, (tuning, settings) in itertools.product(encoders, study.finetunings.items()):
        trained = str(encoder.folder.absolute())
        start = {
            "model.name_or_path": encoder.config.model.name_or_path if encoder.pooler else trained
        }
        if encoder.pooler and encoder.pooler != OWN_POOLER:
            start["model.pooler"] = encoder.pooler
        config = _changed(
            f"{name}: fine-tuning {tuning!r}", FINETUNING, {**settings, **values, **start}
        )
        row = f"{encoder.row}, {tuning}"
        for seed in (
            study.seeds_of.get(encoder.row, study.seeds) if encoder.seed is None else [encoder.seed]
        ):
            yield StudyRun(
                row, seed, _seeded(config, seed), _folder_of(row, seed, workdir), start=encoder
            )


def _folder_of(row: str, seed: int | None, workdir: Path) -> Path:
    folder = workdir / re.sub(r"[^\w.,=+-]+", "-", row).strip("-.")
    return folder if seed is None else folder / f"seed-{seed}"


def _seeded(config: Config, seed: int) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))


def _changed(where: str, base: "str | ConfigDict", settings: Settings) -> Config:
    """Return a configuration with changed values. Errors begin with the place."""
    try:
        if "train.seed" in settings:
            raise ConfigError(
                "train.seed: a study file sets `seeds` and `seeds_of`, and --seeds chooses among "
                "them"
            )
        config = configuration(base, settings)[1]
        if config.distributed:
            raise ConfigError(
                "distributed=True: a run of a study uses one host. Several hosts may share a study"
            )
    except ConfigError as error:
        raise ConfigError(f"{where}: {str(error).removeprefix('--config: ')}") from error
    return config
