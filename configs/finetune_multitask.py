"""Multi-task fine-tuning: sentiment, paraphrase and similarity with one encoder.

It follows the report on adjusting dropout.

Command:  diffcse finetune --config finetune_multitask --config.init=RUN_OR_MODEL_FOLDER
Data:     the CS 224N sets (SST with 5 classes, Quora, STS) in $DIFFCSE_DATA_DIR/cs224n, or
          --config.finetune.data_dir. They do not include Quora's training file. Its dev file is
          split by a hash of the pairs: a tenth is used for dev scores, the rest for training.
Settings: those of the report. Each task has a head with dropout 0.2 on the sentence embedding. A
          batch holds 32 rows of one set, in the ratio 17 Quora : 4 STS : 2 SST. First the heads
          train (10 epochs, 3e-5, weight decay 1e-3), then everything (10 epochs, 1e-5). The best
          average dev score selects the checkpoint. The report's other setting is
          --config.finetune.stages=together. It mentions neither clipping nor a schedule, so there
          is none.
"""

import os
from dataclasses import asdict
from pathlib import Path

from ml_collections import ConfigDict

from diffcse_jax.config import default_config
from diffcse_jax.losses.finetune import LabelledTask

PAIR = ("sentence1", "sentence2")


def get_config() -> ConfigDict:
    config = default_config()
    config.model.name_or_path = "minilm"
    config.model.pooler = "own"
    config.model.projector = "none"
    config.contrast.weight = 0.0
    config.difference.weight = 0.0
    config.finetune.weight = 1.0
    config.finetune.data_dir = str(Path(os.environ.get("DIFFCSE_DATA_DIR", ".")) / "cs224n")
    config.finetune.stages = "heads_first"
    sst = LabelledTask(
        file="ids-sst-train.csv",
        dev_file="ids-sst-dev.csv",
        test_file="ids-sst-test-student.csv",
        texts=("sentence",),
        label="sentiment",
        id="id",
        ratio=2,
    )
    quora = LabelledTask(
        file="quora-dev.csv",
        texts=PAIR,
        label="is_duplicate",
        id="id",
        ratio=17,
    )
    sts = LabelledTask(
        file="sts-train.csv",
        dev_file="sts-dev.csv",
        test_file="sts-test-student.csv",
        texts=PAIR,
        label="similarity",
        id="id",
        kind="regression",
        ratio=4,
    )
    config.finetune.tasks = {"sst": asdict(sst), "quora": asdict(quora), "sts": asdict(sts)}
    config.data.max_length = 64
    config.train.batch_size = 32
    config.train.epochs = 10
    config.optim.learning_rate = 1e-5
    config.optim.clip_norm = 0.0
    config.optim.schedule = "constant"
    config.eval.every = 500
    config.eval.patience = 5
    return config
