"""The losses side by side on a 6-block BERT that needs no hub.

A run takes minutes on two CPU cores, with any text.

Command:   diffcse study --config minilm --config.data.train_file=sentences.txt
Encoder:   MiniLM, trained as in `configs/diffcse_minilm.py`: steps of 32, learning rate 3e-5, its
           own masked-LM head. All rows have its pooler and its projector.
Steps:     150 with three seeds, or 100 with one seed; the names of the rows say which. Compare rows
           of 100 steps only with one another.
Start:     The first two rows are MiniLM as it is usually used (mean pooling), and with the pooler
           that is trained here. MiniLM is a sentence encoder already. Training begins from the
           second row.

The dropout schedules `mask 4` and `mask 11` (`configs/studies/dropout_masks.py`) are made for
twelve blocks. Each of the six blocks has the mean rate of the two blocks that it stands for.
RankCSE learns from MiniLM with mean pooling. The weight of Barlow Twins is our choice. Supervised
SimCSE reads other text, so it is in `minilm_supervised.py`.
"""

from diffcse_jax.apps.study import Settings, Study

SIMCSE = {"difference.objective": "none"}
OFF_DROPOUT = {"contrast.negatives": "off_dropout", "contrast.negative_ratio": 0.9}
DCL = {"dcl.weight": 0.1, "dcl.temperature": 5.0}
RANKCSE = {
    "consistency.weight": 1.0,
    "distillation.weight": 1.0,
    "distillation.teachers": ("minilm",),
    "distillation.poolers": ("avg",),
}
MASK_4 = (0.5, 0.5, 0.1, 0.1, 0.1, 0.1)  # of twelve: 0.5 in blocks 1 to 4
MASK_11 = (0.25, 0.1, 0.1, 0.1, 0.1, 0.1)  # of twelve: 0.3 and 0.2 in blocks 1 and 2
SHORT: dict[str, Settings] = {
    "off-dropout": SIMCSE | OFF_DROPOUT,
    "DCL": SIMCSE | DCL,
    "without contrast": {"contrast.weight": 0.0},
    "conditional MLM": {"difference.objective": "conditional_mlm"},
    "corrective LM": {"difference.objective": "corrective_lm"},
    "insert": {"difference.edit": "insert"},
    "delete": {"difference.edit": "delete"},
    "Barlow Twins": SIMCSE | {"barlow_twins.weight": 0.005},
    "RankCSE": SIMCSE | RANKCSE,
    "mask 4": {"model.hidden_dropout": MASK_4, "model.attention_dropout": MASK_4},
    "mask 11": {"model.hidden_dropout": MASK_11, "model.attention_dropout": MASK_11},
}


def get_study() -> Study:
    short = {
        f"{name}, 100 steps": {**settings, "train.steps": 100} for name, settings in SHORT.items()
    }
    return Study(
        base="diffcse_minilm",
        variants={
            "SimCSE": SIMCSE,
            "SimCSE++": SIMCSE | OFF_DROPOUT | DCL,
            "DiffCSE": {},
            "DiffCSE + SimCSE++": OFF_DROPOUT | DCL,
            **short,
        },
        seeds=(1, 2, 3),
        seeds_of=dict.fromkeys(short, (1,)),
        tasks=("STSBenchmark",),
        start=("own", "cls_before_pooler"),
    )
