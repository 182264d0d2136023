"""Supervised SimCSE on the 6-block BERT of `configs/studies/minilm.py`, from triples.

It adds a row to that study.

Command:   diffcse study --config minilm_supervised --config.data.train_file=triples.csv
Data:      a csv with the columns sent0, sent1, hard_neg: premises, entailments and contradictions
           of NLI.

Seed, steps, pooler and projector are those of the rows of 100 steps there.
"""

from diffcse_jax.apps.study import Study


def get_study() -> Study:
    return Study(
        base="diffcse_minilm",
        variants={
            "supervised, 100 steps": {
                "difference.objective": "none",
                "train.steps": 100,
                "data.train_file": "nli_for_simcse.csv",
                "data.columns": ("sent0", "sent1", "hard_neg"),
            }
        },
        seeds=(1,),
        tasks=("STSBenchmark",),
        start=("own", "cls_before_pooler"),
    )
