"""Adaptation of a sentence encoder to one's own documents, and its cost elsewhere: pairs, objectives, anchor.

Command:   diffcse study --config adaptation --config.data.train_file=documents.txt
           or, with labelled text of the domain: --tasks STSBenchmark,pairs_retrieval:test.tsv
Encoder:   MiniLM as `configs/adapt.py` trains it, but with 60 steps of 48 pairs; the start, with its own mean pooling,
           is the first row.
Chosen by: `lead_retrieval` on a tenth of the documents, which all rows hold out.

`DiffCSE` and `SimCSE++` are their objectives on single sentences, with the pooler and without the projector of the
others, and with dropout, by which they live; the generator is that of `configs/diffcse_minilm.py`. A weight is that of
the paper, or 1. `interpolated` scores models between the start and the best checkpoint. Seeds of what won, and of the
plain recipes: adaptation_seeds.py.
"""

from diffcse_jax.apps.study import Settings, Study

DROPOUT: Settings = {"model.hidden_dropout": (0.1,), "model.attention_dropout": (0.1,)}
SENTENCES = {"data.pairs": "dropout", **DROPOUT}
DIFFERENCE = {
    "difference.weight": 0.005,
    "generator.name_or_path": "",
    "generator.head_steps": 300,
    "generator.positions": "masked",
}
SIMCSEPP = {
    "contrast.negatives": "off_dropout",
    "contrast.negative_ratio": 0.9,
    "dcl.weight": 0.1,
    "dcl.temperature": 5.0,
}
ANCHOR = {"anchor.weight": 1.0}
INTERPOLATION = {"eval.interpolate": 5}
VARIANTS: dict[str, Settings] = {
    "lead": {},
    "lead, learning rate 2e-5": {"optim.learning_rate": 2e-5},
    "SimCSE": SENTENCES,
    "SimCSE, learning rate 2e-5": SENTENCES | {"optim.learning_rate": 2e-5},
    "DiffCSE": SENTENCES | DIFFERENCE,
    "SimCSE++": SENTENCES | SIMCSEPP,
    "neighbours": {"data.pairs": "neighbours"},
    "passages": {"data.pairs": "passages"},
    "crops": {"data.pairs": "crops"},
    "lead, both directions": {"contrast.symmetric": True},
    "lead, with dropout": DROPOUT,
    "lead + difference": DIFFERENCE,
    "lead + anchor": ANCHOR,
    "lead, interpolated": INTERPOLATION,
    "lead + difference + anchor, interpolated": DIFFERENCE | ANCHOR | INTERPOLATION,
}


def get_study() -> Study:
    short = {"train.batch_size": 48, "train.chunk_size": 0, "train.steps": 60, "eval.every": 20}
    variants = {name: {**settings, **short} for name, settings in VARIANTS.items()}
    return Study(base="adapt", variants=variants, seeds=(1,), tasks=("STSBenchmark",), start=("own",))
