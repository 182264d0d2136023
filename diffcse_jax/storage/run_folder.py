"""Names in a run's folder."""

HEADS = "heads"  # of a fine-tuning: the workdir of the heads' stage, in that of the run
