"""Adaptation of a sentence encoder to one's own documents: pairs, losses and what each costs.

The cost is what a model loses elsewhere.

Command:   diffcse study --config adaptation --config.data.train_file=documents.txt
           With labelled text of the domain, add --tasks STSBenchmark,pairs_retrieval:test.tsv
Encoder:   MiniLM, trained as in `configs/adapt.py` but with 60 steps of 48 pairs. The first row is
           the starting checkpoint with its own mean pooling.
Metric:    `lead_retrieval` on a tenth of the documents, which no row trains on.

`DiffCSE` and `SimCSE++` train on single sentences. They have the pooler of the other rows, no
projector, and the dropout that they need. The generator is that of `configs/diffcse_minilm.py`.
Weights are those of the papers, or 1. `interpolated` also scores models between the starting
checkpoint and the best one. `adaptation_seeds.py` repeats the best row and the plain recipes with
three seeds.
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
INTERPOLATION = {"eval.interpolate": (0.2, 0.4, 0.6, 0.8, 1.0)}
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
    "lead, interpolated": INTERPOLATION,
}


def get_study() -> Study:
    short = {"train.batch_size": 48, "train.chunk_size": 0, "train.steps": 60, "eval.every": 20}
    variants = {name: {**settings, **short} for name, settings in VARIANTS.items()}
    return Study(
        base="base/leads", variants=variants, seeds=(1,), tasks=("STSBenchmark",), start=("own",)
    )
