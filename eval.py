"""Scores sentence encoders: `python eval.py --model runs/diffcse_base --tasks sts,transfer --data_dir DIR`.

The same as `diffcse evaluate`; see diffcse_jax/commands/evaluate.py.
"""

import sys

from diffcse_jax.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
