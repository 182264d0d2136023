"""`python -m diffcse_jax.finetune`: the same as `diffcse finetune`; see diffcse_jax/commands/finetune.py."""

import sys

from diffcse_jax.commands.finetune import main

if __name__ == "__main__":
    sys.argv[0] = "python -m diffcse_jax.finetune"  # under this name it describes itself
    main()
