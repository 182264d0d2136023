"""Networks as Flax NNX modules, and their weights to and from Hugging Face checkpoints."""
