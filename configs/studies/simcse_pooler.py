"""Unsupervised and supervised SimCSE with other poolers and projectors (SimCSE Table 6).

Command:   diffcse study --config simcse_pooler
Model:     BERT-base, scored on STS-B dev.
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 1 epoch of 15,625 steps of 64. Supervised
           rows read triples of SNLI and MNLI (SimCSE's `nli_for_simcse.csv`), 3 epochs of steps of
           512.

`MLP` keeps the projector for encoding, and `MLP (train)` only trains with it. The published models
are `MLP (train)` without supervision and `MLP` with supervision. `First-last` is the mean of the
embedding output and the last layer, as in the authors' code of that time. Their later code computes
`avg_first_block_last`.
"""

from diffcse_jax.apps.study import Settings, Study, settings_of

HEADS: dict[str, Settings] = {
    "CLS, MLP (train)": {"model.projector_train_only": True},
    "CLS, MLP": {"model.projector_train_only": False},
    "CLS, no MLP": {"model.projector": "none", "model.projector_train_only": True},
    "First-last": {
        "model.pooler": "avg_first_last",
        "model.projector": "none",
        "model.projector_train_only": True,
    },
}


def get_study() -> Study:
    supervised = settings_of("supervised_simcse_base")
    return Study(
        base="simcse_base",
        variants={f"{name}, unsupervised": head for name, head in HEADS.items()}
        | {f"{name}, supervised": {**supervised, **head} for name, head in HEADS.items()},
        tasks=("STSBenchmark",),
    )
