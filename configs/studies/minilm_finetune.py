"""Labelled tasks on MiniLM, and on SimCSE and DiffCSE trained from it, each fine-tuned in two ways.

Command:   diffcse study --config minilm_finetune --config.data.train_file=sentences.txt
           with encoders that `configs/studies/minilm.py` has trained: the same with --encoders runs/studies/minilm
Data:      CS 224N's labelled sets as `configs/finetune_multitask.py` reads them. On two
           cores take fewer rows, for vectors and dev scores of all take most of the time: some thousand of each, drawn
           at random (SST's files are in the order of the classes), by --finetune.finetune.data_dir=FOLDER
Rows:      MiniLM as it is used (mean pooling); SimCSE and DiffCSE of `configs/studies/minilm.py`; each fine-tuned with
           everything at once, and with the heads first.
Steps:     everything is trained for 150 steps of 32 at 1e-4, and heads alone before that for 1,150 at 1e-3, which cost
           next to nothing; sentences have 32 tokens at most. The report trains for ten epochs at 1e-5.
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
