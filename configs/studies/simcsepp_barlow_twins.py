"""SimCSE with Barlow Twins against its rank bottleneck, BERT-base (after SimCSE++ Table 2).

Command:   diffcse study --config simcsepp_barlow_twins
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 1 epoch of 15,625 steps of 64.

With 704 artificial rows, a batch of 64 has 768 rows, as many as an embedding has dimensions. As in
the authors' code, Barlow Twins is added to the contrastive loss. Its weight is our choice.
"""

from diffcse_jax.apps.study import Study

BARLOW_TWINS = {"barlow_twins.weight": 0.005}


def get_study() -> Study:
    return Study(
        base="simcse_base",
        variants={
            "SimCSE": {},
            "Barlow Twins": BARLOW_TWINS,
            **{
                f"Barlow Twins, {rows} rows": BARLOW_TWINS | {"barlow_twins.artificial_rows": rows}
                for rows in (100, 300, 704)
            },
        },
    )
