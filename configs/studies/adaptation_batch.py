"""Batch sizes for adaptation, with equal numbers of steps.

In a larger batch, a pair has more other documents as negatives.

Command:   diffcse study --config adaptation_batch --config.data.train_file=documents.txt
           With labelled text of the domain, add --tasks STSBenchmark,pairs_retrieval:test.tsv
Settings:  those of `configs/adapt.py`. A step computes at most 64 pairs at a time, so memory does
           not grow.
"""

from diffcse_jax.apps.study import Study


def get_study() -> Study:
    return Study(
        base="base/leads",
        variants={
            f"batch {size}": {"train.batch_size": size, "train.chunk_size": 0 if size <= 64 else 64}
            for size in (16, 32, 64, 128, 256)
        },
        seeds=(1,),
        tasks=("STSBenchmark",),
        start=("own",),
    )
