"""DiffCSE with other losses, and with the next sentence, BERT-base (DiffCSE Table 3, on STS-B dev).

Command:   diffcse study --config diffcse_objectives --config.data.train_file=documents.txt
Data:      a text in the order of its documents, with blank lines between documents. 2 epochs; 1
           epoch for SimCSE. All rows split it into the same sentences. SimCSE's Wikipedia sentences
           (`wiki1m`) are shuffled, so the rows with the next sentence refuse them.

The paper does not say where its next sentences come from. The published scores of the other rows
are for `wiki1m`.
"""

from diffcse_jax.apps.study import Study, settings_of

NEXT = {"difference.sentence": "next"}
BOTH = {"difference.sentence": "both"}
CONDITIONAL_MLM = {"difference.objective": "conditional_mlm"}


def get_study() -> Study:
    variants = {
        "DiffCSE": {},
        "SimCSE": settings_of("simcse_base"),
        "without contrast": {"contrast.weight": 0.0},
        "next sentence": NEXT,
        "same and next sentence": BOTH,
        "conditional MLM": CONDITIONAL_MLM,
        "conditional MLM, next sentence": CONDITIONAL_MLM | NEXT,
        "conditional MLM, same and next sentence": CONDITIONAL_MLM | BOTH,
        "corrective LM": {"difference.objective": "corrective_lm"},
    }
    return Study(
        base="diffcse_base",
        variants={
            name: {**settings, "data.pairs": "dropout"} for name, settings in variants.items()
        },
        tasks=("STSBenchmark",),
        published={
            "DiffCSE": {"STS-B dev": 84.56},
            "SimCSE": {"STS-B dev": 81.47},
            "without contrast": {"STS-B dev": 54.48},
            "next sentence": {"STS-B dev": 82.91},
            "conditional MLM": {"STS-B dev": 83.08},
            "corrective LM": {"STS-B dev": 79.79},
        },
        source="DiffCSE Table 3",
    )
