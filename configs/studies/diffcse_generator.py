"""DiffCSE with generators of other sizes, BERT-base (DiffCSE Table 6, on STS-B dev).

Command:   diffcse study --config diffcse_generator
Data:      10^6 Wikipedia sentences of SimCSE (`wiki1m`), 2 epochs of 15,625 steps of 64.

The paper names sizes, not checkpoints. The smaller ones are checkpoints of Turc et al. (2019) with
those sizes.
"""

from diffcse_jax.apps.study import Study, settings_of

GENERATORS = {
    "BERT-large": "bert-large-uncased",
    "BERT-base": "bert-base-uncased",
    "BERT-medium": "google/bert_uncased_L-8_H-512_A-8",
    "BERT-small": "google/bert_uncased_L-4_H-512_A-8",
    "BERT-mini": "google/bert_uncased_L-4_H-256_A-4",
    "BERT-tiny": "google/bert_uncased_L-2_H-128_A-2",
}


def get_study() -> Study:
    others = {
        name: {"generator.name_or_path": checkpoint} for name, checkpoint in GENERATORS.items()
    }
    return Study(
        base="diffcse_base",
        variants={"DistilBERT-base": {}, **others, "SimCSE": settings_of("simcse_base")},
        tasks=("STSBenchmark",),
        published={"DistilBERT-base": {"STS-B dev": 84.56}, "SimCSE": {"STS-B dev": 81.47}},
        source="DiffCSE Table 6",
    )
