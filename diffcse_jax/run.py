"""A whole run, from a configuration to an exported model: what `diffcse train` and `diffcse_jax.train` both do."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from diffcse_jax.config import Config, flat, unknown_key_message
from diffcse_jax.errors import ConfigError, Interrupted
from diffcse_jax.io import expand_path

if TYPE_CHECKING:
    from diffcse_jax.training.callbacks import Callback


def run(config: Config, workdir: Path, callbacks: "Sequence[Callback]" = ()) -> str:
    """Trains in `workdir`, from the start or from where an earlier run stopped, and exports to `WORKDIR/export`.

    Args:
        config: the run.
        workdir: where it lives.
        callbacks: are told of what happens.

    Returns:
        How the exported model compares with the start, in words.

    Raises:
        UserError: as `diffcse_jax.training.train.train` and `diffcse_jax.export.export`.
        Interrupted: by Ctrl-C, SIGTERM or a callback, with everything saved.
    """
    return in_workdir(config, workdir, partial(_train_and_export, callbacks=callbacks))


def in_workdir(config: Config, workdir: Path, work: Callable[[Config, Path], str]) -> str:
    """Joins the other processes, if there are any, and holds the workdir while the work is done in it.

    Args:
        config: the run.
        workdir: where it lives.
        work: does it, and says what came of it.

    Returns:
        What came of it.

    Raises:
        UserError: the processes cannot be joined, the workdir is in use, or as the work does.
        Interrupted: by Ctrl-C, SIGTERM or a callback, with everything saved.
    """
    from diffcse_jax import hosts  # after the configuration: a mistyped key stops before JAX starts

    if config.distributed:
        hosts.join()  # before anything asks JAX for its devices
    else:
        hosts.require_alone()
    from diffcse_jax.hosts import keep_compiled, terminated_like_interrupted
    from diffcse_jax.run_folder.folder import held

    keep_compiled()
    try:
        with terminated_like_interrupted(), held(workdir):
            return work(config, workdir)
    except Interrupted:
        raise
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; what {workdir} holds is whole: the same command goes on from there") from None


def _train_and_export(config: Config, workdir: Path, callbacks: "Sequence[Callback]") -> str:
    from diffcse_jax import hosts
    from diffcse_jax.evaluation.dev import build_dev_evaluation
    from diffcse_jax.training.train import train

    verdict = train(config, workdir, build_dev_evaluation, callbacks)

    def finish() -> None:
        export_with_curves(config, workdir)
        print(verdict)

    hosts.decided_by_first(finish)  # the others wait for it: their end would be its end
    return verdict


def export_with_curves(config: Config, workdir: Path) -> None:
    """Exports what a run has selected to `WORKDIR/export`, and draws its curves."""
    from diffcse_jax.export import export
    from diffcse_jax.io import disk_errors
    from diffcse_jax.training.curves import draw_curves

    with disk_errors(workdir / "report", safe="The checkpoints are whole."):
        print(f"curves drawn in {draw_curves(workdir, config)}")
    export(workdir, workdir / "export")


def named_workdir(pattern: str | Path | None, name: str, config: Config) -> Path:
    """The folder of a run.

    Args:
        pattern: the folder as the user gives it, in which `{seed}`, `{name}` and every key, as in
            `{optim.learning_rate}`, stand for the run's values, and `~` for the home; None: `runs/NAME`.
        name: of the configuration.
        config: the run.

    Raises:
        ConfigError: there is no such key.
    """
    values = flat(config.to_dict()) | {"name": name, "seed": config.train.seed}

    def value(braces: re.Match[str]) -> str:
        if braces[1] not in values:
            known = "{seed}, {name} and keys of the configuration stand for their values"
            raise ConfigError(f"workdir {pattern}: {unknown_key_message(braces[1])}; {known}")
        return re.sub(r"[^\w.,=+-]+", "-", str(values[braces[1]])).strip("-")

    return Path("runs") / name if pattern is None else expand_path(re.sub(r"\{([\w.]*)\}", value, str(pattern)))
