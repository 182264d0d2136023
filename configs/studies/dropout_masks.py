"""DiffCSE with the twelve dropout schedules of the report on adjusting dropout (its Table 1), BERT-base.

Command:   python -m diffcse_jax.study configs/studies/dropout_masks.py
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 2 epochs of 15,625 steps of 64.

The report has no published code. Its text was some 300,000 sentences of its tasks' domains, of up to 200 words, its
learning rate 3e-5, its generator the frozen encoder with a head of its own; here all but the schedule is that of
`diffcse_base`. Nearer to the report are `data.max_length=256`, `optim.learning_rate=3e-5` and an empty
`generator.name_or_path`, with a text of one's own.
"""

from diffcse_jax.study import Study


def get_study() -> Study:
    masks = {f"mask {number}": {"model.dropout_schedule": f"mask{number}"} for number in range(1, 13)}
    return Study(base="diffcse_base", variants={"0.1 everywhere": {}, **masks})
