"""DiffCSE with insertions, deletions, and all three kinds of edits (DiffCSE Table 4).

Command:   diffcse study --config diffcse_edits
Model:     BERT-base, scored on STS-B dev.
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 2 epochs of 15,625 steps of 64.

Each edit changes 15% of the tokens.
"""

from diffcse_jax.apps.study import Study


def get_study() -> Study:
    return Study(
        base="diffcse_base",
        variants={
            "replace": {"difference.mask_ratio": 0.15},
            "insert": {"difference.edit": "insert", "difference.insert_ratio": 0.15},
            "delete": {"difference.edit": "delete", "difference.delete_ratio": 0.15},
            "mixed": {"difference.edit": "mixed", "difference.mask_ratio": 0.15},
        },
        tasks=("STSBenchmark",),
        published={
            "replace": {"STS-B dev": 84.48},
            "insert": {"STS-B dev": 82.20},
            "delete": {"STS-B dev": 82.59},
            "mixed": {"STS-B dev": 82.80},
        },
        source="DiffCSE Table 4",
    )
