"""DiffCSE with other fractions of masked tokens, BERT-base (DiffCSE Table 7, on STS-B dev).

Command:   diffcse study --config diffcse_mask_ratio
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 2 epochs of 15,625 steps of 64.

The first row has the published ratio. The others are compared with it.
"""

from diffcse_jax.apps.study import Study

RATIOS = (0.3, 0.15, 0.2, 0.25, 0.4, 0.5)


def get_study() -> Study:
    return Study(
        base="diffcse_base",
        variants={
            f"difference.mask_ratio={ratio}": {"difference.mask_ratio": ratio} for ratio in RATIOS
        },
        tasks=("STSBenchmark",),
        published={
            "difference.mask_ratio=0.3": {"STS-B dev": 84.56},
            "difference.mask_ratio=0.15": {"STS-B dev": 84.48},
            "difference.mask_ratio=0.5": {"STS-B dev": 83.91},
        },
        source="DiffCSE Table 7",
    )
