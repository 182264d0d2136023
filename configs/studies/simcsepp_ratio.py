"""Off-dropout negatives with other ratios m, BERT-base (after SimCSE++ Table 5).

Command:   diffcse study --config simcsepp_ratio
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 1 epoch of 15,625 steps of 64.

The first row has the published m = 0.9. The others are compared with it. Their values are our
choice, and so is leaving out dimension-wise contrast. As in the authors' code, m multiplies the
positive logit. In the paper it multiplies the sum over negatives;
`--config.contrast.negative_ratio_form=paper` does that.
"""

from diffcse_jax.apps.study import Study
from diffcse_jax.evaluation.results import PUBLISHED


def get_study() -> Study:
    return Study(
        base="simcse_base",
        variants={
            f"off-dropout, m={ratio}": {
                "contrast.negatives": "off_dropout",
                "contrast.negative_ratio": ratio,
            }
            for ratio in (0.9, 0.5, 0.6, 0.7, 0.8, 1.0, 1.1)
        },
        published={"off-dropout, m=0.9": PUBLISHED["off-dropout only, BERT-base"]},
        source="SimCSE++ Table 3",
    )
