"""SimCSE with other sentence vectors and heads, BERT-base (SimCSE, ablation of pooling methods).

Command:   python -m diffcse_jax.study configs/studies/simcse_pooler.py
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 1 epoch of 15,625 steps of 64.

`CLS, head in training` is the published SimCSE.
"""

from diffcse_jax.study import Study


def get_study() -> Study:
    return Study(
        base="simcse_base",
        variants={
            "CLS, head in training": {},
            "CLS, head kept": {"model.projector_train_only": False},
            "CLS, no head": {"model.projector": "none"},
            "average": {"model.pooler": "avg", "model.projector": "none"},
            "first-last average": {"model.pooler": "avg_first_block_last", "model.projector": "none"},
        },
        tasks=("STSBenchmark",),
    )
