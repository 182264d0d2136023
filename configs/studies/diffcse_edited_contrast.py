"""SimCSE with edited sentences as additional positives or negatives, BERT-base (DiffCSE Table 15).

Command:   diffcse study --config diffcse_edited_contrast
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 1 epoch of 15,625 steps of 64.

Each edit changes 15% of the tokens. The paper does not say how it combines the losses. Here
positives are a second contrastive loss of weight 1, and negatives are hard negatives of the only
one. `diffcse_edits.py` instead trains the encoder to detect the edits, as DiffCSE does.
"""

from diffcse_jax.apps.study import Study

POSITIVE = {"edited_contrast.weight": 1.0, "edited_contrast.role": "positive"}
NEGATIVE = {
    "edited_contrast.weight": 1.0,
    "edited_contrast.role": "negative",
    "contrast.weight": 0.0,
}
EDITS = {
    "replaced": {"edited_contrast.edit": "replace", "edited_contrast.mask_ratio": 0.15},
    "inserted": {"edited_contrast.edit": "insert", "edited_contrast.insert_ratio": 0.15},
    "deleted": {"edited_contrast.edit": "delete", "edited_contrast.delete_ratio": 0.15},
}


def get_study() -> Study:
    return Study(
        base="simcse_base",
        variants={
            "SimCSE": {},
            **{f"positives, {name}": POSITIVE | edit for name, edit in EDITS.items()},
            **{f"negatives, {name}": NEGATIVE | edit for name, edit in EDITS.items()},
        },
        tasks=("STSBenchmark",),
    )
