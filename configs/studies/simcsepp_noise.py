"""SimCSE with more and with less noise in its pairs, BERT-base (after SimCSE++ Table 1).

Command:   diffcse study --config simcsepp_noise
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 1 epoch of 15,625 steps of 64.

`+ noise` adds Gaussian noise of variance 0.1. `- noise` takes the mean of 10 dropout samples for
positives, and of 5 samples of each view for negatives.
"""

from diffcse_jax.apps.study import Study


def get_study() -> Study:
    return Study(
        base="simcse_base",
        variants={
            "SimCSE": {},
            "positives + noise": {"contrast.positives": "noise", "contrast.noise_variance": 0.1},
            "negatives + noise": {"contrast.negatives": "noise", "contrast.noise_variance": 0.1},
            "positives - noise": {"contrast.positives": "mean", "contrast.samples": 10},
            "negatives - noise": {"contrast.negatives": "mean", "contrast.samples": 5},
        },
    )
