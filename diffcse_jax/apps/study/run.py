"""One run of a study: its configuration, its folder, and whether it is done."""

import dataclasses
from pathlib import Path
from typing import Any

from diffcse_jax.apps.study.record import LAST_CHECKPOINT, Key, StudyRecord, key_of
from diffcse_jax.config import Config, flat, machine_keys
from diffcse_jax.errors import CheckpointError, ConfigError, InUseError
from diffcse_jax.io import lock, read_sealed
from diffcse_jax.run_folder.finding import CONFIG

NOT_STARTED = "not started"
# In the folder of a run:
RESULTS = "results.json"  # the configuration and the scores by column; the run is done
EVALUATION = "evaluation.json"  # the scores in detail
FAILURE = "failure.txt"  # why the last attempt failed
LOCK = "study.lock"  # held while a study works on the run


@dataclasses.dataclass(frozen=True)
class StudyRun:
    """One training or fine-tuning with its scores, or the starting checkpoint's scores.

    Attributes:
        row: Its row of the table.
        seed: Its seed. None for the starting checkpoint.
        config: Its configuration, with the seed.
        folder: The folder that it owns.
        tasks: Tasks that score it. Empty for a fine-tuning, because its labelled tasks do that.
        dev_tasks: Tasks whose dev split scores it.
        scores_last: Whether the last checkpoint is scored as well.
        pooler: The pooler of the starting checkpoint.
        start: The run whose encoder a fine-tuning starts from.
        record: A record that may have its results.
    """

    row: str
    seed: int | None
    config: Config
    folder: Path
    tasks: tuple[str, ...] = ()
    dev_tasks: tuple[str, ...] = ()
    scores_last: bool = False
    pooler: str | None = None
    start: "StudyRun | None" = None
    record: StudyRecord | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def label(self) -> str:
        """The run's name in messages."""
        return self.row if self.seed is None else f"{self.row}, seed {self.seed}"

    @property
    def asked(self) -> tuple[str, ...]:
        """What is scored, as results record it."""
        dev = [f"{task} dev" for task in self.dev_tasks]
        return (*self.tasks, *dev, *([LAST_CHECKPOINT] if self.scores_last else []))

    @property
    def is_trained(self) -> bool:
        """Return whether the run's encoder is there. Training writes the export last."""
        return self.seed is None or (self.folder / "export").is_dir()

    def look(self) -> tuple[dict[str, Any] | None, str]:
        """Return a run's results, or None, and its state in words.

        Results count if the run is done with the study's tasks.
        """
        if self.record and (results := self.record.find(self.key)):
            return results, "done"
        return self.look_here()

    @property
    def key(self) -> Key:
        """What identifies the run in a record."""
        start = self.start.config if self.start else None
        return key_of(self.row, self.seed, self.config, start, self.asked)

    def look_here(self) -> tuple[dict[str, Any] | None, str]:
        """Return the same by the run's folder alone."""
        try:
            if (self.folder / RESULTS).is_file():
                results = self._read_results()
                if results["asked"] == list(self.asked):
                    return results, "done"
            if (self.folder / LOCK).is_file():
                lock(self.folder / LOCK).close()
        except InUseError as error:
            return None, f"in progress: {error}"
        except CheckpointError as error:
            return None, str(error)
        if (self.folder / FAILURE).is_file():
            failure = (self.folder / FAILURE).read_text(encoding="utf-8", errors="replace")
            reason = failure.strip().partition("\n")[0]
            return None, f"failed: {reason}"
        return None, "started" if (self.folder / CONFIG).is_file() else NOT_STARTED

    def require_same(self) -> None:
        """Refuse a folder with results of another configuration.

        If a run has no results yet, training itself refuses another configuration.
        """
        if not (self.folder / RESULTS).is_file():
            return
        then = flat(Config.from_dict(self._read_results()["config"]).to_dict())
        now = flat(self.config.to_dict())
        # The start is a folder, which may be moved.
        ignored = machine_keys() | ({"model.name_or_path"} if self.start else set())
        if changed := [key for key in now if then.get(key) != now[key] and key not in ignored]:
            values = "\n  ".join(
                f"{key}: {then.get(key)!r} then, {now[key]!r} now" for key in changed
            )
            raise ConfigError(
                f"{self.folder} holds {self.label} with another configuration. Give another "
                f"--workdir, or the same overrides:\n  {values}"
            )

    def _read_results(self) -> dict[str, Any]:
        return read_sealed(
            self.folder / RESULTS, "Run the study without --report to score the run again"
        )
