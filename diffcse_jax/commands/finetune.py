"""Fine-tunes an encoder on labelled tasks: `python -m diffcse_jax.finetune --config configs/finetune_multitask.py`.

`--config.init=RUN` is short for `--config.model.name_or_path=RUN`: the workdir of a run, one checkpoint in it, a model
folder or a hub id. Started again with the same workdir it goes on where it stopped. At its end WORKDIR holds `export`
(the encoder), `tasks` (the heads), `predictions` and `report`. See docs/finetuning.md.
"""

import sys
from pathlib import Path

from diffcse_jax.commands.train import run_configured
from diffcse_jax.config import Config
from diffcse_jax.run import export_with_curves, in_workdir

INIT, NAME = "--config.init", "--config.model.name_or_path"


def main() -> None:
    """The command line."""
    sys.argv = [with_name(argument) for argument in sys.argv]
    run_configured(__doc__, run)


def with_name(argument: str) -> str:
    """The argument, in which `--config.init` has become the key that it stands for."""
    option, equals, value = argument.partition("=")
    return f"{NAME}{equals}{value}" if option == INIT else argument


def run(config: Config, workdir: Path) -> str:
    """Fine-tunes in `workdir`, exports and predicts."""
    return in_workdir(config, workdir, finetune_and_export)


def finetune_and_export(config: Config, workdir: Path) -> str:
    """Runs the fine-tuning and writes what it gives; returns its verdict."""
    from diffcse_jax import hosts
    from diffcse_jax.finetune.folders import write_heads
    from diffcse_jax.finetune.model import TaskModel
    from diffcse_jax.finetune.outputs import write_outputs
    from diffcse_jax.finetune.run import finetune
    from diffcse_jax.io import disk_errors
    from diffcse_jax.run_folder.folder import HEADS
    from diffcse_jax.run_folder.saved_encoder import read_encoder
    from diffcse_jax.training.curves import draw_curves

    verdict, tasks = finetune(config, workdir)

    def finish() -> None:
        export_with_curves(config, workdir)
        model, saved = TaskModel.from_run(workdir), read_encoder(workdir)
        for name, told in write_heads(model, saved, workdir / "tasks").items():
            print(f"task {name}: {workdir / 'tasks' / name}, {told}")
        with disk_errors(workdir, safe="The checkpoints are whole."):
            if (workdir / HEADS).is_dir():
                draw_curves(workdir / HEADS, config)
            files = write_outputs(model, tasks, workdir, config.finetune.predictions, config.eval.batch_size)
        for file in files:
            print(f"written: {file}")
        print(verdict)

    hosts.decided_by_first(finish)  # the others wait for it: their end would be its end
    return verdict
