"""The command `diffcse finetune`: train, export and predict."""

from pathlib import Path

from diffcse_jax import hosts, io
from diffcse_jax.api import export_with_curves, in_workdir
from diffcse_jax.apps.finetune.outputs import write_outputs
from diffcse_jax.apps.finetune.train import tune
from diffcse_jax.config import Config
from diffcse_jax.errors import printable_message


def run_finetune(config: Config, workdir: Path) -> str:
    """Fine-tune, export and predict: the work of `diffcse finetune`.

    Return the verdict of the last stage.
    """

    def finish() -> None:
        export_with_curves(workdir)
        with io.disk_errors(workdir, safe="The checkpoints are complete."):
            write_outputs(workdir, tasks, config.eval.batch_size)
        print(printable_message(verdict))

    with in_workdir(config, workdir):
        tasks, verdict = tune(config, workdir)
        # The other processes wait, because their exit would end the first one.
        hosts.decided_by_first(finish)
    return verdict
