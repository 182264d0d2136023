"""`python -m diffcse_jax.study`: the same as `diffcse study`; see diffcse_jax/commands/study.py."""

import sys

from diffcse_jax.commands.study import main

if __name__ == "__main__":
    sys.argv[0] = "python -m diffcse_jax.study"  # under this name it describes itself
    sys.exit(main())
