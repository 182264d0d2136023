"""Fine-tune an encoder on labelled tasks: `diffcse finetune --config finetune_multitask --config.init=RUN`.

`--config.init=MODEL` is short for `--config.model.name_or_path=MODEL`: a run folder, one of its checkpoints, a model
folder or a hub id. The same command resumes a run that was stopped. At the end WORKDIR holds `export` (the encoder),
`tasks` (the heads), `predictions` and `report`. See docs/finetuning.md.
"""

import sys
from pathlib import Path

from diffcse_jax.commands.train import run_configured
from diffcse_jax.config import Config


def main() -> None:
    """Run the command."""
    sys.argv = [long_name(argument) for argument in sys.argv]
    run_configured(__doc__, _run)


def long_name(argument: str) -> str:
    """Return the argument with `--config.init` replaced by the key that it stands for."""
    option, equals, value = argument.partition("=")
    return f"--config.model.name_or_path{equals}{value}" if option == "--config.init" else argument


def _run(config: Config, workdir: Path) -> str:
    from diffcse_jax.apps.finetune.train import run_finetune

    return run_finetune(config, workdir)
