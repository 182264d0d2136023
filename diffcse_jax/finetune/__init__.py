"""Fine-tuning on labelled tasks: `diffcse finetune`, `python -m diffcse_jax.finetune`. See docs/finetuning.md.

`data.py` reads tasks, `run.py` trains them with the machinery of `training/`, `model.py` is an encoder with its heads,
`evaluation.py` scores it, `outputs.py` writes predictions and pictures, `folders.py` the heads.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Imports `TaskModel` when it is first asked for, so that reading a configuration does not start JAX."""
    if name == "TaskModel":
        from diffcse_jax.finetune.model import TaskModel

        return TaskModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
