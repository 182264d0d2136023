"""The command `python -m diffcse_jax.finetune`."""

from diffcse_jax.commands.finetune import main

if __name__ == "__main__":
    main()
