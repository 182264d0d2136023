"""SimCSE with augmented sentences as second views, BERT-base (SimCSE Table 1, on STS-B dev).

Command:   diffcse study --config simcse_augmentation
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 1 epoch of 15,625 steps of 64. For
           synonyms also a file `synonyms.tsv`. Each line has a word and its synonyms, separated by
           tabs. The paper takes them from nlpaug.

`w/o dropout` also deletes one word. In the last row BERT-base itself fills the masked tokens, as in
the paper. That it runs without dropout and samples from its distribution is our choice.
"""

from diffcse_jax.apps.study import Study

DELETE_ONE_WORD = {"data.augmentation": "delete_one_word"}
NO_DROPOUT = {"model.hidden_dropout": (0.0,), "model.attention_dropout": (0.0,)}
MLM = {
    "data.augmentation": "mlm",
    "data.augmentation_ratio": 0.15,
    "generator.name_or_path": "start",
    "generator.dropout": False,
    "generator.decode": "sample",
}


def by_ratio(name: str, augmentation: str) -> dict[str, dict]:
    """Return rows for an augmentation that removes 10, 20 and 30 % of the words."""
    return {
        f"{name} {percent}%": {
            "data.augmentation": augmentation,
            "data.augmentation_ratio": percent / 100,
        }
        for percent in (10, 20, 30)
    }


def get_study() -> Study:
    return Study(
        base="simcse_base",
        variants={
            "none": {},
            **by_ratio("crop", "crop"),
            **by_ratio("word deletion", "word_deletion"),
            "delete one word": DELETE_ONE_WORD,
            "w/o dropout": DELETE_ONE_WORD | NO_DROPOUT,
            "synonym replacement": {
                "data.augmentation": "synonyms",
                "data.synonyms_file": "synonyms.tsv",
            },
            "MLM 15%": MLM,
        },
        tasks=("STSBenchmark",),
    )
