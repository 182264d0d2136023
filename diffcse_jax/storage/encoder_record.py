"""The encoder that stored vectors are of, so that nothing else is compared with them."""

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffcse_jax.errors import CheckpointError, ConfigError


@dataclasses.dataclass(frozen=True)
class EncoderRecord:
    """The identity of a sentence encoder, and all that it takes to load it again.

    Attributes:
        model: its name: what `SentenceEncoder.from_pretrained` takes, if it was loaded so.
        pooler: one of `diffcse_jax.groups.POOLERS`.
        precision: the computation type, `float32` or `bfloat16`.
        dimension: numbers of a vector.
        weights: `SentenceEncoder.fingerprint`.
    """

    model: str
    pooler: str
    precision: str
    dimension: int
    weights: str

    @classmethod
    def read(cls, settings: Mapping[str, Any], source: Path) -> "EncoderRecord":
        """The record among the settings that a file holds.

        Raises:
            CheckpointError: they lack a part of it, or a part has the wrong type.
        """
        for name, kind in typing.get_type_hints(cls).items():
            if type(settings.get(name)) is not kind:
                raise CheckpointError(f"{source} does not tell which encoder its vectors are of: no {name!r}")
        return cls(**{field.name: settings[field.name] for field in dataclasses.fields(cls)})

    def require(self, encoder: "EncoderRecord", folder: Path | str) -> None:
        """Refuses an encoder whose vectors cannot be compared with those of the folder.

        Raises:
            ConfigError: it is another one; the message names both.
        """
        if encoder.weights == self.weights:
            return
        there, here = dataclasses.asdict(self), dataclasses.asdict(encoder)
        differences = [
            f"{name} {there[name]} there and {here[name]} here"
            for name in ("pooler", "precision", "dimension")
            if there[name] != here[name]
        ] or ["their weights differ"]
        raise ConfigError(
            f"{folder} holds vectors of {self.model}, and the encoder is {encoder.model}: {', '.join(differences)}, so "
            f"that similarities would mean nothing. Search with the encoder of the vectors, or embed the text again "
            f"with {encoder.model}"
        )
