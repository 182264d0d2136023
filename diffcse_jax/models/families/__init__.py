"""Families of encoders: BERT and its descendants.

A family's module holds all that is particular to it: how to read its sizes, the names of its
tensors and, if they differ, its embeddings, blocks and attention bias. To add a family, add a
module here and a line to `hf.FAMILIES`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import transformers

from diffcse_jax.models.transformer import TransformerConfig

# only named: its module imports PyTorch
PreTrainedConfig: TypeAlias = "transformers.PreTrainedConfig"
# ours by the checkpoint's names; several of ours, joined by "+", are stacked there
Modules = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Family:
    """The particulars of a family. Each table maps the checkpoint's name of a module to ours."""

    # raises ValueError, with a message for users
    sizes: Callable[[PreTrainedConfig], TransformerConfig]
    prefix: str  # before the encoder's names inside a model with a head
    modules: Modules  # outside the blocks
    block_prefix: str  # before a block's number
    block: Modules
    mlm_head: Modules
    # the tensor of the masked-LM head's decoder, which must be the table of word embeddings
    decoder: str
    # a regular expression of tensors that are not used: buffers, tied copies, other heads
    ignored: str
    # the only supported values in config.json
    supported: dict[str, Any] = dataclasses.field(default_factory=dict)
    # the dense + tanh head on position 0; empty: none
    pooler: Modules = dataclasses.field(default_factory=dict)
    other_prefix: str = ""  # instead of `prefix`, in checkpoints of other code
    # for replaced tokens; empty: none
    discriminator_head: Modules = dataclasses.field(default_factory=dict)


def rotary_base(rope: Mapping[str, Any], *types: str) -> float:
    """Return the base of rotary positions.

    Raise a ValueError unless their type is `default` or one of `types`.
    """
    if rope["rope_type"] not in ("default", *types):
        raise ValueError(f"rope_type {rope['rope_type']!r} is not supported")
    return float(rope["rope_theta"])
