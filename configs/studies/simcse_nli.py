"""SimCSE with pairs of NLI as positives (SimCSE Table 4, the rows of the triples).

Command:   diffcse study --config simcse_nli
Model:     BERT-base, scored on STS-B dev.
Data:      SNLI and MNLI as triples (SimCSE's `nli_for_simcse.csv`), 3 epochs of steps of 512. The
           unsupervised row reads 10^6 Wikipedia sentences (`wiki1m`), 1 epoch of 15,625 steps of
           64.

All rows except the last have the settings of supervised SimCSE
(`configs/supervised_simcse_base.py`). The paper's other data sets are also pairs of text. To use
one, name its file in `data.train_file` and its columns in `data.columns`. The paper's column
`sample` is for 134,000 pairs: the same number of lines of a shuffled file.
"""

from diffcse_jax.apps.study import Study, settings_of


def get_study() -> Study:
    return Study(
        base="supervised_simcse_base",
        variants={
            "entailment + hard negatives": {},
            "entailment": {"data.columns": ("sent0", "sent1")},
            "contradiction": {"data.columns": ("sent0", "hard_neg")},
            "unsupervised": settings_of("simcse_base"),
        },
        tasks=("STSBenchmark",),
    )
