"""The configuration. `groups.py` and the losses hold the keys, `tree.py` the whole, `files.py` files and overrides."""

from diffcse_jax.config.files import (
    SHIPPED,
    ConvertsToDict,
    configuration,
    default_config,
    read_overrides,
    shipped_config,
)
from diffcse_jax.config.groups import (
    DEV_METRICS,
    HELD_OUT_METRICS,
    OWN_POOLER,
    DataConfig,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from diffcse_jax.config.tree import (
    OWN_TASKS,
    Config,
    flat,
    known_keys,
    machine_keys,
    nested,
    resume_keys,
    unknown_key_message,
)

__all__ = [
    "DEV_METRICS",
    "HELD_OUT_METRICS",
    "OWN_POOLER",
    "OWN_TASKS",
    "SHIPPED",
    "Config",
    "ConvertsToDict",
    "DataConfig",
    "EvalConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimConfig",
    "TrainConfig",
    "configuration",
    "default_config",
    "flat",
    "known_keys",
    "machine_keys",
    "nested",
    "read_overrides",
    "resume_keys",
    "shipped_config",
    "unknown_key_message",
]
