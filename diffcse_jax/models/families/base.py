"""The parts of a family of encoders, and how to read sizes from a checkpoint's `config.json`."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from diffcse_jax.models.transformer import TransformerConfig

MOST_BLOCKS = 256


@dataclasses.dataclass(frozen=True)
class HfConfig:
    """A checkpoint's `config.json`. Values are checked when they are read.

    Every method raises KeyError if the key is missing and has no default, and ValueError, with a message for users, if
    the value cannot be used.
    """

    values: Mapping[str, Any]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of BERT's keys in this family

    def size(self, key: str, *, least: int = 1, most: int = 10**7, default: int | None = None) -> int:
        """Return a whole number, or `default` if the key is missing. No network above `most` could be built."""
        value = self._value(key, default)
        valid = type(value) is int and least <= value <= most
        return self._checked(key, value, valid, f"a whole number from {least} to {most:,}")

    def rate(self, key: str) -> float:
        """Return a number from 0 to below 1."""
        value = self._value(key)
        valid = type(value) in (int, float) and 0 <= value < 1
        return float(self._checked(key, value, valid, "a number from 0 to below 1"))

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0, or `default` if the key is missing."""
        value = self._value(key, default)
        return float(self._checked(key, value, type(value) in (int, float) and value > 0, "a number above 0"))

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string, or `default` if the key is missing."""
        value = self._value(key, default)
        return self._checked(key, value, isinstance(value, str), "a string")

    def require(self, key: str, *supported: str | float | bool | None) -> None:
        """Raise ValueError unless the key is missing or has a supported value."""
        value = self._value(key, supported[0])
        self._checked(key, value, value in supported, " or ".join(map(json.dumps, supported)))

    def inside(self, key: str) -> "HfConfig":
        """Return the configuration nested under a key, which is empty if the key is missing."""
        value = self._value(key, {})
        return HfConfig(self._checked(key, value, isinstance(value, Mapping), "an object"))

    def rope(self) -> "HfConfig":
        """Return the settings of rotary positions: nested in `rope_parameters` (transformers 5), or here."""
        return self if self.values.get("rope_parameters") is None else self.inside("rope_parameters")

    def _value(self, key: str, default: Any = None) -> Any:
        name = self.names.get(key, key)
        return self.values[name] if default is None else self.values.get(name, default)

    def _checked(self, key: str, value: Any, valid: bool, expected: str) -> Any:
        if not valid:
            raise ValueError(f"{self.names.get(key, key)} must be {expected}, not {json.dumps(value)[:60]}")
        return value


class SequenceClassifier(NamedTuple):
    """The family's head for labelled sentences in transformers: position 0, dense, activation, dense."""

    dense: str  # name of the first layer, with the encoder's prefix if it has one
    activation: str
    classifier: str  # name of the last layer


Modules = Mapping[str, str]  # ours by the checkpoint's names; several of ours, joined by "+", are stacked there


@dataclasses.dataclass(frozen=True)
class Family:
    """The particulars of a family. Each table maps the checkpoint's name of a module to ours."""

    architecture: str  # the class of the encoder in transformers
    sizes: Callable[[HfConfig], TransformerConfig]  # raises KeyError and ValueError as `HfConfig` does
    prefix: str  # before the encoder's names inside a model with a head
    modules: Modules  # outside the blocks
    block_prefix: str  # before a block's number
    block: Modules
    pooler: Modules  # the dense + tanh head on position 0; empty if the family has none
    mlm_head: Modules
    decoder: str  # the tensor of the masked-LM head's decoder, which must be the table of word embeddings
    ignored: str  # a regular expression of tensors that are not used: buffers, tied copies, other heads
    other_prefix: str = ""  # instead of `prefix`, in checkpoints of other code
    discriminator_head: Modules = dataclasses.field(default_factory=dict)  # for replaced tokens; empty: none
    sequence_classifier: SequenceClassifier | None = None  # None: it has other layers
