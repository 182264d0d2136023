"""Compiled functions on disk: a command that was run before starts at once."""

import os

import jax

from diffcse_jax.data.cache import cache_folder


def keep_compiled() -> None:
    """Keeps what takes long to compile in the package's cache folder; $JAX_COMPILATION_CACHE_DIR names another one."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("compiled")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)  # an encoder's shape takes half a second
