"""The parts of a family of encoders."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedConfig

from diffcse_jax.models.transformer import TransformerConfig

Modules = Mapping[str, str]  # ours by the checkpoint's names; several of ours, joined by "+", are stacked there


@dataclasses.dataclass(frozen=True)
class Family:
    """The particulars of a family. Each table maps the checkpoint's name of a module to ours."""

    architecture: str  # the class of the encoder in transformers
    sizes: Callable[[PreTrainedConfig], TransformerConfig]  # raises ValueError, with a message for users
    supported: dict[str, Any]  # the only supported values of keys of config.json, if they are there
    prefix: str  # before the encoder's names inside a model with a head
    modules: Modules  # outside the blocks
    block_prefix: str  # before a block's number
    block: Modules
    pooler: Modules  # the dense + tanh head on position 0; empty if the family has none
    mlm_head: Modules
    decoder: str  # the tensor of the masked-LM head's decoder, which must be the table of word embeddings
    ignored: str  # a regular expression of tensors that are not used: buffers, tied copies, other heads
    other_prefix: str = ""  # instead of `prefix`, in checkpoints of other code
    may_lack_token_types: bool = False
    discriminator_head: Modules = dataclasses.field(default_factory=dict)  # for replaced tokens; empty: none


def rotary_base(rope: Mapping[str, Any], *types: str) -> float:
    """Return the base of rotary positions. Raise ValueError unless their type is `default` or one of `types`."""
    if rope["rope_type"] not in ("default", *types):
        raise ValueError(f"rope_type {rope['rope_type']!r} is not supported")
    return float(rope["rope_theta"])
