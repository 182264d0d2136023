"""Families of encoders: BERT and its descendants.

A family's module holds all that is particular to it: how to read its sizes, the names of its
tensors and, if they differ, its embeddings, blocks and attention bias. To add a family, add a
module here and a line to `hf.FAMILIES`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from diffcse_jax.models.transformer import TransformerConfig

# What `config.json` states, as attributes: transformers' configuration, or a namespace.
Stated: TypeAlias = Any
# Our modules by the checkpoint's names. Several of ours, joined by "+", are stacked there.
Modules = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Family:
    """The particulars of a family. Each table maps the checkpoint's name of a module to ours.

    Attributes:
        sizes: Reads the sizes from the keys that transformers writes. Raises ValueError, with a
            message for users, and AttributeError for a key that is not there.
        prefix: What stands before the encoder's names inside a model with a head.
        modules: The modules outside the blocks.
        block_prefix: What stands before a block's number.
        block: The modules of a block.
        mlm_head: The modules of the masked-LM head.
        decoder: The tensor of that head's decoder, which must be the table of word embeddings.
        ignored: A regular expression of tensors that are not used: buffers, tied copies, other
            heads.
        supported: The only supported values in config.json.
        pooler: The dense + tanh head on position 0. Empty: none.
        other_prefix: Stands in place of `prefix` in checkpoints of other code.
        discriminator_head: The head for replaced tokens. Empty: none.
    """

    sizes: Callable[[Stated], TransformerConfig]
    prefix: str
    modules: Modules
    block_prefix: str
    block: Modules
    mlm_head: Modules
    decoder: str
    ignored: str
    supported: dict[str, Any] = dataclasses.field(default_factory=dict)
    pooler: Modules = dataclasses.field(default_factory=dict)
    other_prefix: str = ""
    discriminator_head: Modules = dataclasses.field(default_factory=dict)


def rotary_base(rope: Mapping[str, Any], *types: str) -> float:
    """Return the base of rotary positions.

    Raise a ValueError unless their type is `default` or one of `types`.
    """
    if rope["rope_type"] not in ("default", *types):
        raise ValueError(f"rope_type {rope['rope_type']!r} is not supported")
    return float(rope["rope_theta"])
