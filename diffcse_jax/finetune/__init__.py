"""Fine-tuning on labelled tasks: `diffcse finetune`, `python -m diffcse_jax.finetune`. See docs/finetuning.md.

`data.py` reads tasks, `run.py` trains them with the machinery of `training/`, `model.py` is an encoder with its heads,
`evaluation.py` scores it, `outputs.py` writes predictions and pictures, `folders.py` the heads.
"""

from diffcse_jax.finetune.model import TaskModel

__all__ = ["TaskModel"]
