"""Fine-tuning on labelled tasks: `diffcse finetune`. See docs/finetuning.md.

`tasks.py` reads the rows of tasks, `train.py` trains the encoder and the heads, `model.py` predicts and scores, and
`outputs.py` writes predictions, pictures and heads.
"""

from diffcse_jax.apps.finetune.model import TaskModel

__all__ = ["TaskModel"]
