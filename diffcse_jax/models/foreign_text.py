"""Which languages a model is for, and whether texts are in others."""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from diffcse_jax.documents.language import NAMES, NOT_A_LANGUAGE, detector, languages_of
from diffcse_jax.errors import UserError
from diffcse_jax.models.routes import card_folder

FOREIGN_SHARE = 0.1  # of the text, from which a warning says so
FEWEST_TEXTS = 20  # whose languages are certain
_METADATA = re.compile(r"\s*---\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)


class _WithoutAliases(yaml.SafeLoader):
    """Reads YAML without aliases. A few of these may stand for millions of values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next value."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError
        return super().compose_node(parent, index)


def read_card(root: Path) -> Mapping[str, Any]:
    """Return the metadata of a model's card; empty if it is missing, invalid or has aliases.

    `root` is the folder of the whole model, as `Pretrained.root`, or of an encoder of a Router.
    """
    path = card_folder(root) / "README.md"
    if not os.path.isfile(path):  # reading a pipe would never end
        return {}
    with contextlib.suppress(Exception):  # the YAML may raise anything
        block = _METADATA.match(path.read_text(encoding="utf-8-sig"))
        metadata = yaml.load(block[1], _WithoutAliases) if block else None
        return metadata if isinstance(metadata, dict) else {}
    return {}


def stated_languages(card: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the languages that a card states, as they stand there."""
    language = card.get("language")  # YAML reads `no`, the code of Norwegian, as False
    codes = language if isinstance(language, list) else [language]
    return tuple("no" if code is False else str(code) for code in codes if code is not None)


def foreign_texts(name: str, languages: Sequence[str], texts: Sequence[str]) -> str:
    """Return a warning if many texts are in languages that a model is not for; otherwise empty.

    Nothing is said if the model states no language or one that is not detected, such as
    `multilingual`; if there are few texts; or if the detector is not installed.

    Args:
        name: The name of the model.
        languages: The codes that its card states.
        texts: What it will encode.
    """
    known = {language.partition("-")[0].lower() for language in languages}
    if not known or len(texts) < FEWEST_TEXTS:
        return ""
    try:
        if not known.issubset(detector().labels):
            return ""
    except UserError:
        return ""
    shares = {
        code: share
        for code, share in languages_of(texts).items()
        if code not in known and code != NOT_A_LANGUAGE and share >= FOREIGN_SHARE
    }
    if not shares:
        return ""
    others = " and ".join(f"{share:.0%} {NAMES.get(code, code)}" for code, share in shares.items())
    named = " and ".join(NAMES.get(code, code) for code in sorted(known))
    return (
        f"the text is {others}, but by its card {name} is a model for {named}, so searches may "
        "miss this text. Use a multilingual encoder, such as intfloat/multilingual-e5-small, or "
        "search by words (mode lexical)"
    )
