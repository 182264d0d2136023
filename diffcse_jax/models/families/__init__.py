"""Families of encoders: one module each, named after the `model_type` in a checkpoint's `config.json`.

A module's constant `FAMILY` holds all that is particular to its family: sizes from the checkpoint's configuration, the
names of its tensors, and, where they are its own, embeddings and attention bias. Nothing else names a family, so that
adding one is adding a module.
"""

import dataclasses
import importlib
import json
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from diffcse_jax.models.transformer import TransformerConfig

MOST_BLOCKS = 256


class HfConfig:
    """A checkpoint's `config.json`, whose values are checked when they are read.

    Every method raises KeyError where there is no such key and no default, and ValueError, with a message for people,
    where the value cannot be used.
    """

    def __init__(self, values: Mapping[str, Any]):
        self._values = values

    def size(self, key: str, *, least: int = 1, most: int = 10**7, default: int | None = None) -> int:
        """A whole number; `default` where there is no such key, unless it is None."""
        value = self._values[key] if default is None else self._values.get(key, default)
        if type(value) is not int or value < least:
            raise ValueError(f"{key} must be a whole number of at least {least}, not {_told(value)}")
        if value > most:  # no encoder has as many, and what is built of them would never be done
            raise ValueError(f"{key} must be at most {most:,}, not {_told(value)}")
        return value

    def rate(self, key: str) -> float:
        """A number from 0 to below 1."""
        value = self._values[key]
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise ValueError(f"{key} must be a number from 0 to below 1, not {_told(value)}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string; `default` where there is no such key, unless it is None."""
        value = self._values[key] if default is None else self._values.get(key, default)
        if not isinstance(value, str):
            raise ValueError(f"{key} must be a string, not {_told(value)}")
        return value

    def require(self, key: str, supported: str | int | bool) -> None:
        """Refuses any value but the one that is supported, which is meant where there is no such key."""
        value = self._values.get(key, supported)
        if value != supported:
            raise ValueError(f"{key} must be {json.dumps(supported)}, not {_told(value)}")


def _told(value: Any) -> str:
    """A value as JSON, short enough for a message."""
    return json.dumps(value)[:60]


@dataclasses.dataclass(frozen=True)
class SequenceClassifier:
    """The family's head for labelled sentences in transformers: position 0, dense, activation, dense.

    Attributes:
        dense: the first layer, with the encoder's prefix where it has one.
        activation: between the layers.
        classifier: the last layer.
    """

    dense: str
    activation: str
    classifier: str


@dataclasses.dataclass(frozen=True)
class Family:
    """The particulars of a family.

    Attributes:
        architecture: the class of the encoder in transformers.
        sizes: of the encoder, from a checkpoint's configuration; raises KeyError and ValueError as `HfConfig` does.
        prefix: before the encoder's names inside a model with a head.
        modules: the checkpoint's names of the modules outside the blocks, beside ours.
        block_prefix: before a block's number.
        block: names of a block's modules, beside ours.
        pooler: names of the dense + tanh head on position 0; empty where the family has none.
        mlm_head: names of the masked-LM head.
        decoder: the tensor of the masked-LM head's projection to the vocabulary, which must be the word embeddings.
        ignored: a regular expression of tensors that carry nothing we use: buffers, tied copies, dead heads.
        sequence_classifier: its head for labelled sentences.
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


def names() -> list[str]:
    """The supported families, as `model_type` spells them."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def find(name: str) -> Family:
    """The family of a `model_type`, one of `names()`."""
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}").FAMILY
