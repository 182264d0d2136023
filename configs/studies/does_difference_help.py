"""Does the difference help? SimCSE, DiffCSE and SimCSE++ from a raw masked LM, with enough seeds.

Command:   diffcse study --config does_difference_help --config.data.train_file=sentences.txt
           --record benchmarks/results/does_difference_help.jsonl
Start:     MiniLM's six blocks, trained on as a masked LM until much of the sentence training was
           forgotten (docs/records/raw_start.md). The generator has three blocks. Both are read from
           `benchmarks/raw_start`, where `benchmarks.make_raw_start` writes them. For another start,
           give --config.model.name_or_path and --config.generator.name_or_path.
Text:      Wikipedia sentences. Rows with the same seed have the same batches.
Settings:  those of `configs/diffcse_base.py`, with 100 steps and a learning rate of 1e-4. The study
           `does_difference_help_settings.py` chose the rate with another seed, and found no weight
           of the difference that is better than the published one. DiffCSE + SimCSE++ has the
           settings of both.
Scores:    STS-B, STS12, STS14 and SICK-R's trial set, alignment and uniformity, of the checkpoint
           that STS-B dev chose and of the last one.

`DiffCSE without h` is a control. Its discriminator does not see the sentence embedding, so the
encoder learns from the contrast alone. If the discriminator of DiffCSE is right more often than
this one, the embedding helps it.
"""

from pathlib import Path

from ml_collections import ConfigDict

from diffcse_jax.apps.study import Settings, Study
from diffcse_jax.config import shipped_config

START = Path(__file__).resolve().parents[2] / "benchmarks" / "raw_start"
SIMCSE = {"model.projector": "mlp", "difference.objective": "none"}
OFF_DROPOUT = {"contrast.negatives": "off_dropout", "contrast.negative_ratio": 0.9}
SIMCSEPP = OFF_DROPOUT | {"dcl.weight": 0.1, "dcl.temperature": 5.0}
ROWS: dict[str, Settings] = {
    "SimCSE": SIMCSE,
    "DiffCSE": {},
    "SimCSE, BatchNorm": {"difference.objective": "none"},
    "SimCSE++": SIMCSE | SIMCSEPP,
    "DiffCSE + SimCSE++": SIMCSEPP,
    "DiffCSE without h": {"difference.condition": "none"},
}


def base_config() -> ConfigDict:
    """Return what all rows share."""
    config = shipped_config("diffcse_base")
    config.model.name_or_path = str(START / "encoder")
    config.generator.name_or_path = str(START / "generator")
    config.train.steps = 100
    config.eval.every = 25
    config.optim.learning_rate = 1e-4
    return config


def get_study() -> Study:
    few = tuple(range(1, 6))
    return Study(
        base=base_config(),
        variants=ROWS,
        comparisons=[
            ("SimCSE, BatchNorm", "DiffCSE"),
            ("DiffCSE without h", "DiffCSE"),
            ("SimCSE++", "DiffCSE + SimCSE++"),
        ],
        seeds=tuple(range(1, 11)),
        seeds_of={row: few for row in ROWS if row not in ("SimCSE", "DiffCSE")},
        tasks=("STSBenchmark", "STS12", "STS14", "geometry"),
        dev_tasks=("SICKRelatedness",),
        scores_last=True,
        start=("avg", "cls_before_pooler", "avg_first_last"),
    )
