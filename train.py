"""Trains sentence embeddings: `python train.py --config configs/diffcse_base.py [--workdir DIR] [--config.KEY=VALUE]`.

The same as `diffcse train`; see diffcse_jax/commands/train.py.
"""

from diffcse_jax.commands.train import main

if __name__ == "__main__":
    main()
