"""Studies: variants of a configuration, each trained with several seeds, in one table.

| file | what it has |
|---|---|
| `definition` | what a study file returns |
| `plan`, `run` | all runs, and one run with its folder |
| `estimate` | what they will take |
| `work`, `score` | doing the runs, and what each one does: training and scoring |
| `record` | scores in a file that outlives the folders |
| `summary`, `table` | the scores of all runs, and their tables and pictures |
| `command` | all of it in order |
"""

from diffcse_jax.apps.study.command import run_study
from diffcse_jax.apps.study.definition import Settings, Study, settings_of

__all__ = ["Settings", "Study", "run_study", "settings_of"]
