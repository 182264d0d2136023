"""What a family of encoders consists of, and how to read sizes from a checkpoint's `config.json`."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from diffcse_jax.models.transformer import TransformerConfig

MOST_BLOCKS = 256


class HfConfig:
    """A checkpoint's `config.json`. Values are checked when they are read.

    Every method raises KeyError if the key is missing and has no default, and ValueError, with a message for users, if
    the value cannot be used.
    """

    def __init__(self, values: Mapping[str, Any]):
        self._values = values

    def size(self, key: str, *, least: int = 1, most: int = 10**7, default: int | None = None) -> int:
        """Return a whole number, or `default` if the key is missing."""
        value = self._value(key, default)
        if type(value) is not int or value < least:
            raise ValueError(f"{key} must be a whole number of at least {least}, not {_format(value)}")
        if value > most:  # a network of this size could never be built
            raise ValueError(f"{key} must be at most {most:,}, not {_format(value)}")
        return value

    def rate(self, key: str) -> float:
        """Return a number from 0 to below 1."""
        value = self._value(key)
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise ValueError(f"{key} must be a number from 0 to below 1, not {_format(value)}")
        return float(value)

    def text(self, key: str) -> str:
        """Return a string."""
        value = self._value(key)
        if not isinstance(value, str):
            raise ValueError(f"{key} must be a string, not {_format(value)}")
        return value

    def require(self, key: str, supported: str | int | bool) -> None:
        """Raise ValueError unless the key is missing or has the supported value."""
        value = self._value(key, supported)
        if value != supported:
            raise ValueError(f"{key} must be {json.dumps(supported)}, not {_format(value)}")

    def _value(self, key: str, default: Any = None) -> Any:
        return self._values[key] if default is None else self._values.get(key, default)


def _format(value: Any) -> str:
    return json.dumps(value)[:60]


@dataclasses.dataclass(frozen=True)
class SequenceClassifier:
    """The family's head for labelled sentences in transformers: position 0, dense, activation, dense.

    Attributes:
        dense: Name of the first layer, with the encoder's prefix if it has one.
        activation: Between the layers.
        classifier: Name of the last layer.
    """

    dense: str
    activation: str
    classifier: str


@dataclasses.dataclass(frozen=True)
class Family:
    """The particulars of a family. Each table maps the checkpoint's name of a module to ours.

    Attributes:
        architecture: The class of the encoder in transformers.
        sizes: Reads the sizes from a checkpoint's configuration. Raises KeyError and ValueError as `HfConfig` does.
        prefix: Before the encoder's names inside a model with a head.
        modules: Names of the modules outside the blocks.
        block_prefix: Before a block's number.
        block: Names of the modules of a block.
        pooler: Names of the dense + tanh head on position 0. Empty if the family has none.
        mlm_head: Names of the modules of the masked-LM head.
        decoder: The tensor of the masked-LM head's decoder, which must be the table of word embeddings.
        ignored: A regular expression of tensors that are not used, such as buffers, tied copies and unused heads.
        sequence_classifier: The head for labelled sentences.
    """

    architecture: str
    sizes: Callable[[HfConfig], TransformerConfig]
    prefix: str
    modules: Mapping[str, str]
    block_prefix: str
    block: Mapping[str, str]
    pooler: Mapping[str, str]
    mlm_head: Mapping[str, str]
    decoder: str
    ignored: str
    sequence_classifier: SequenceClassifier
