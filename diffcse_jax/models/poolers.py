"""The names of poolers: how hidden states become one embedding."""

from typing import Any

from diffcse_jax.errors import ConfigError

CLS_POOLERS = ("cls", "cls_before_pooler")
# Poolers that average over real tokens, and the hidden states they read (0: the embedding layer's).
AVERAGED_LAYERS = {
    "avg": (-1,),
    "avg_top2": (-2, -1),
    "avg_first_last": (0, -1),
    "avg_first_block_last": (1, -1),
}
# The names are those of sentence-transformers.
OTHER_POOLERS = ("max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
POOLERS = (*CLS_POOLERS, *AVERAGED_LAYERS, *OTHER_POOLERS)
OTHER_NAMES = {"mean": "avg"}  # as sentence-transformers names it
# Poolers over the last layer can be joined by "+".
JOINED_POOLERS = ("cls_before_pooler", "avg", *OTHER_POOLERS)


def our_name(name: Any) -> Any:
    """Return our name of a pooler that other libraries call otherwise."""
    return OTHER_NAMES.get(name, name) if isinstance(name, str) else name


def is_pooler(name: str) -> bool:
    """Return whether this is the name of a pooler, or of several joined by "+".

    An example is `cls_before_pooler+max`.
    """
    return name in POOLERS or ("+" in name and set(name.split("+")) <= set(JOINED_POOLERS))


def check_pooler(name: str) -> str:
    """Return the name of a pooler, or raise ConfigError."""
    is_text = isinstance(name, str)
    name = our_name(name)
    if is_text and " + " in name:
        raise ConfigError(
            f"{name!r} is a pooler with modules after it. Leave the pooler out to apply what the "
            "folder records, or give the pooler alone"
        )
    if not (is_text and is_pooler(name)):
        joined = f'{", ".join(JOINED_POOLERS[:-1])} and {JOINED_POOLERS[-1]} can be joined by "+"'
        raise ConfigError(f"unknown pooler {name!r}. Use one of: {', '.join(POOLERS)}. {joined}")
    return name
