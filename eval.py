"""Score encoders; short for `diffcse evaluate`.

python eval.py --model runs/diffcse_base --tasks sts,transfer
"""

import sys

from diffcse_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
