"""Fine-tuning on labelled tasks: `diffcse finetune`. See docs/finetuning.md.

`tasks.py` reads the rows of tasks, `train.py` trains the encoder and the heads, and `model.py` predicts, scores and
writes heads and predictions.
"""

from diffcse_jax.apps.finetune.model import TaskModel

__all__ = ["TaskModel"]
