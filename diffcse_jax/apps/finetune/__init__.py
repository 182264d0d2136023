"""Fine-tuning on labelled tasks: `diffcse finetune`. See docs/finetuning.md.

`tasks.py` reads the rows of tasks, `train.py` trains the encoder and the heads (`heads.py` the heads alone), and
`model.py` predicts, scores and writes heads and predictions.
"""

from diffcse_jax.apps.finetune.model import TaskModel

__all__ = ["TaskModel"]
