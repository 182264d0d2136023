"""SimCSE and next sentences as positives, with one encoder and with two (SimCSE Table 2).

Command:   diffcse study --config simcse_objectives --config.data.train_file=documents.txt
Model:     BERT-base, scored on STS-B dev.
Data:      1 epoch of a text in the order of its documents, with blank lines between documents. All
           rows split it into the same sentences. SimCSE's Wikipedia sentences (`wiki1m`) are
           shuffled, so the rows with the next sentence refuse them.
"""

from diffcse_jax.apps.study import Settings, Study

SAME, NEXT = {"data.pairs": "dropout"}, {"data.pairs": "neighbours"}
OBJECTIVES: dict[str, Settings] = {
    "SimCSE": SAME,
    "next sentence": NEXT,
    "next 3 sentences": NEXT | {"data.next_within": 3},
    "delete one word": SAME | {"data.augmentation": "delete_one_word"},
}


def get_study() -> Study:
    return Study(
        base="simcse_base",
        variants={
            f"{name}, {encoders}": {
                **settings,
                "contrast.second_encoder": encoders == "two encoders",
            }
            for name, settings in OBJECTIVES.items()
            for encoders in ("one encoder", "two encoders")
        },
        tasks=("STSBenchmark",),
    )
