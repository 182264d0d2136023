"""SimCSE with an auxiliary masked LM of several weights, BERT-base (after SimCSE Appendix D and E).

Command:   python -m diffcse_jax.study configs/studies/simcse_mlm.py
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 1 epoch of 15,625 steps of 64.
"""

from diffcse_jax.evaluation import GROUPS
from diffcse_jax.evaluation.published import scores_of
from diffcse_jax.study import Study


def get_study() -> Study:
    transfer = (*GROUPS["transfer"], "average transfer")
    with_mlm = scores_of("SimCSE-BERT-base with MLM")
    return Study(
        base="simcse_base",
        grid={"mlm.weight": (0.0, 0.01, 0.1, 1.0)},
        tasks=("full",),
        published={
            "mlm.weight=0.0": scores_of("SimCSE-BERT-base"),
            "mlm.weight=0.1": {column: with_mlm[column] for column in transfer},
        },
        source="SimCSE, main STS and transfer tables",
    )
