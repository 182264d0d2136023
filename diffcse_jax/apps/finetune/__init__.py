"""Fine-tuning on labelled tasks. See docs/finetuning.md.

| file | what it has |
|---|---|
| `tasks` | classes and rows, read from tables |
| `model` | an encoder with a head for each task |
| `metric` | the average score of the tasks |
| `heads` | training the heads alone |
| `mixture` | steps of several tasks |
| `train` | training the encoder and the heads |
| `outputs` | heads and predictions as files |
| `command` | all of it in order |
"""

from diffcse_jax.apps.finetune.command import run_finetune
from diffcse_jax.apps.finetune.model import TaskModel

__all__ = ["TaskModel", "run_finetune"]
