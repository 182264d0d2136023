"""On disk: a run's folder, its checkpoints, folders of sentence-transformers."""
