"""DiffCSE with other losses, and with the next sentence, BERT-base (DiffCSE Table 3, on STS-B dev).

Command:   diffcse study --config diffcse_objectives --config.data.train_file=documents.txt
Data:      a text in the order of its documents: one sentence per line, blank lines between documents. 2 epochs; 1 epoch
           for SimCSE. All rows read this text. SimCSE's Wikipedia sentences (`wiki1m`) are shuffled, so the rows with
           the next sentence would fail on them.

The paper does not say where its next sentences come from. The published scores of the other rows are for `wiki1m`.
"""

from diffcse_jax.apps.study import Study, settings_of

NEXT = {"difference.sentence": "next", "data.pairs": "dropout"}
BOTH = {"difference.sentence": "both", "data.pairs": "dropout"}
CONDITIONAL_MLM = {"difference.objective": "conditional_mlm"}


def get_study() -> Study:
    return Study(
        base="diffcse_base",
        variants={
            "DiffCSE": {},
            "SimCSE": settings_of("simcse_base"),
            "without contrast": {"contrast.weight": 0.0},
            "next sentence": NEXT,
            "same and next sentence": BOTH,
            "conditional MLM": CONDITIONAL_MLM,
            "conditional MLM, next sentence": CONDITIONAL_MLM | NEXT,
            "conditional MLM, same and next sentence": CONDITIONAL_MLM | BOTH,
            "corrective LM": {"difference.objective": "corrective_lm"},
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
