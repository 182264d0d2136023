"""Train an encoder; short for `diffcse train`.

python train.py --config configs/diffcse_base.py
"""

import sys

from diffcse_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
