"""The study of the report on adjusting dropout: twelve schedules of SimCSE and DiffCSE, then both ways of fine-tuning.

Command:   diffcse study --config dropout_masks
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 2 epochs of 15,625 steps of 64; then CS 224N's labelled sets
           as `configs/finetune_multitask.py` reads them.
Rows:      BERT-base untrained, both objectives with 0.1 everywhere and with masks 1 to 12 (the report's Table 1); each
           fine-tuned with everything at once, and with the heads first. `alignment_uniformity.png` is its picture.

The report has no published code, and its scores are not known to us. Its text was some 300,000 sentences of its tasks'
domains, of up to 200 words, its learning rate 3e-5, its generator the frozen encoder with a head of its own; here all
but the schedule is that of `diffcse_base`. Nearer to the report are `data.max_length=256`, `optim.learning_rate=3e-5`
and an empty `generator.name_or_path`, with a text of one's own.
"""

from diffcse_jax.apps.study import Settings, Study

OBJECTIVES: dict[str, Settings] = {"SimCSE": {"difference.objective": "none"}, "DiffCSE": {}}
SCHEDULES: dict[str, Settings] = {
    "0.1 everywhere": {},
    **{f"mask {number}": {"model.dropout_schedule": f"mask{number}"} for number in range(1, 13)},
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
