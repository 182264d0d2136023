"""Larger batches for adaptation: how many other documents a pair is told from, with the same number of steps.

Command:   diffcse study --config adaptation_batch --config.data.train_file=documents.txt
           or, with labelled text of the domain: --tasks STSBenchmark,pairs_retrieval:test.tsv
Settings:  those of `configs/adapt.py`; a step computes 64 pairs at a time, so that memory stays what it is.
"""

from diffcse_jax.apps.study import Study


def get_study() -> Study:
    return Study(
        base="adapt",
        variants={
            f"batch {size}": {"train.batch_size": size, "train.chunk_size": 0 if size <= 64 else 64}
            for size in (16, 32, 64, 128, 256)
        },
        seeds=(1,),
        tasks=("STSBenchmark",),
        start=("own",),
    )
