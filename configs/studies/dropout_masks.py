"""The report on adjusting dropout: twelve schedules for SimCSE and DiffCSE.

Each model is then fine-tuned in both of the report's ways.

Command:   diffcse study --config dropout_masks
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 2 epochs of 15,625 steps of 64; then the
           labelled sets of CS 224N, read as in `configs/finetune_multitask.py`.
Rows:      BERT-base before training; both methods with dropout 0.1 in all blocks and with masks 1
           to 12 (the report's Table 1). Each is fine-tuned in two ways: all parameters at once, and
           the heads first.

The report comes without code, and we do not have its scores. It trains on about 300,000 sentences
from the domains of its tasks, of up to 200 words, at a learning rate of 3e-5. Its generator is the
frozen encoder with its own head. Here everything except the schedule is as in `diffcse_base`. To
come closer to the report, set `data.max_length=256`, `optim.learning_rate=3e-5` and an empty
`generator.name_or_path`, and use your own text.
"""

from diffcse_jax.apps.study import Settings, Study

OBJECTIVES: dict[str, Settings] = {"SimCSE": {"difference.objective": "none"}, "DiffCSE": {}}
MASKS = {  # one rate for each of the twelve blocks
    "mask 1": (0.2,) * 4 + (0.1,) * 8,
    "mask 2": (0.3,) * 4 + (0.1,) * 8,
    "mask 3": (0.4,) * 4 + (0.1,) * 8,
    "mask 4": (0.5,) * 4 + (0.1,) * 8,
    "mask 5": (0.2,) * 6 + (0.1,) * 6,
    "mask 6": (0.3,) * 6 + (0.1,) * 6,
    "mask 7": (0.4,) * 6 + (0.1,) * 6,
    "mask 8": (0.5,) * 6 + (0.1,) * 6,
    "mask 9": (0.5, 0.4, 0.3, 0.2) + (0.1,) * 8,
    "mask 10": (0.4, 0.3, 0.2) + (0.1,) * 9,
    "mask 11": (0.3, 0.2) + (0.1,) * 10,
    "mask 12": (0.2,) + (0.1,) * 11,
}
SCHEDULES: dict[str, Settings] = {
    "0.1 everywhere": {},
    **{
        name: {"model.hidden_dropout": rates, "model.attention_dropout": rates}
        for name, rates in MASKS.items()
    },
}


def get_study() -> Study:
    return Study(
        base="diffcse_base",
        variants={
            f"{name}, {schedule}": {**settings, **rates}
            for name, settings in OBJECTIVES.items()
            for schedule, rates in SCHEDULES.items()
        },
        tasks=("sts", "geometry"),
        start=("cls_before_pooler",),
        finetunings={"together": {"finetune.stages": "together"}, "heads first": {}},
    )
