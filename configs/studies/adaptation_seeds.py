"""The adaptation preset and the papers' recipes on the same text, with three seeds.

`adaptation.py` has more rows.

Command:   diffcse study --config adaptation_seeds --config.data.train_file=documents.txt
           With labelled text of the domain, add --tasks STSBenchmark,pairs_retrieval:test.tsv
           For a file of sentences that belong to no documents, one per line, add
           --variants SimCSE DiffCSE --config.eval.metric=halves_retrieval
Metric:    `lead_retrieval` on a tenth of the documents.

The papers' recipes train on single sentences, 48 per step, at the learning rate of
`configs/base/sentence_encoder.py`. The generator is that of `configs/diffcse_minilm.py`.
"""

from diffcse_jax.apps.study import Settings, Study

SIMCSE: Settings = {
    "data.pairs": "dropout",
    "model.hidden_dropout": (0.1,),
    "model.attention_dropout": (0.1,),
    "optim.learning_rate": 2e-5,
    "train.batch_size": 48,
    "train.chunk_size": 0,
    "train.steps": 60,
    "eval.every": 15,
}
DIFFERENCE: Settings = {
    "difference.weight": 0.005,
    "generator.name_or_path": "",
    "generator.head_steps": 300,
    "generator.positions": "masked",
}


def get_study() -> Study:
    return Study(
        base="base/leads",
        variants={"lead": {}, "SimCSE": SIMCSE, "DiffCSE": {**SIMCSE, **DIFFERENCE}},
        seeds=(1, 2, 3),
        tasks=("STSBenchmark",),
        start=("own",),
    )
