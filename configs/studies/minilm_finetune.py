"""Labelled tasks on MiniLM, and on SimCSE and DiffCSE trained from it, each fine-tuned in two ways.

Command:   diffcse study --config minilm_finetune --config.data.train_file=sentences.txt
           To start from encoders that `configs/studies/minilm.py` has trained, add
           --workdir runs/studies/minilm
Data:      the labelled sets of CS 224N, read as in `configs/finetune_multitask.py`. On two cores
           use fewer rows, because encoding and scoring all rows takes most of the time. Draw some
           thousand of each set at random (SST's files are sorted by class) and name their folder
           with --finetune.finetune.data_dir=FOLDER
Rows:      MiniLM as it is usually used (mean pooling); SimCSE and DiffCSE of
           `configs/studies/minilm.py`. Each is fine-tuned in two ways: all parameters at once, and
           the heads first.
Steps:     150 steps of 32 at 1e-4 for all parameters. Before them, each head alone takes 1,150
           steps at 1e-3, which cost almost nothing. Sentences have at most 32 tokens. The report
           trains for ten epochs at 1e-5.
"""

from diffcse_jax.apps.study import Study

SHORT = {
    "data.max_length": 32,
    "train.steps": 150,
    "optim.learning_rate": 1e-4,
    "eval.every": 50,
    "finetune.heads_steps": 1150,
    "finetune.heads_learning_rate": 1e-3,
}


def get_study() -> Study:
    return Study(
        base="diffcse_minilm",
        variants={"SimCSE": {"difference.objective": "none"}, "DiffCSE": {}},
        tasks=("STSBenchmark", "geometry"),
        start=("own",),
        finetunings={"together": SHORT | {"finetune.stages": "together"}, "heads first": SHORT},
    )
