"""SimCSE and next sentences as positives, with one encoder and with two, BERT-base (SimCSE Table 2, on STS-B dev).

Command:   diffcse study --config simcse_objectives --config.data.train_file=documents.txt
Data:      1 epoch of a text in the order of its documents: one sentence per line, blank lines between documents. All
           rows read this text. SimCSE's Wikipedia sentences (`wiki1m`) are shuffled, so the rows with the next sentence
           would fail on them.
"""

from diffcse_jax.apps.study import Settings, Study

NEXT = {"data.pairs": "neighbours"}
OBJECTIVES: dict[str, Settings] = {
    "SimCSE": {},
    "next sentence": NEXT,
    "next 3 sentences": NEXT | {"data.next_within": 3},
    "delete one word": {"data.augmentation": "delete_one_word"},
}


def get_study() -> Study:
    return Study(
        base="simcse_base",
        variants={
            f"{name}, {encoders}": {**settings, "contrast.second_encoder": encoders == "two encoders"}
            for name, settings in OBJECTIVES.items()
            for encoders in ("one encoder", "two encoders")
        },
        tasks=("STSBenchmark",),
    )
