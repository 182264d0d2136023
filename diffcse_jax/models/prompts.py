"""Prompts: texts that some encoders expect in front of each text, such as "query: ".

They are recorded and applied as in sentence-transformers: `config_sentence_transformers.json` names prompts and perhaps
a default one. The configuration of the pooling says whether the prompt's tokens are pooled.
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.io import read_json_object

SETTINGS = "config_sentence_transformers.json"
QUERY = "query"
DOCUMENT_NAMES = ("document", "passage", "corpus")  # the first that is recorded is used
# How model cards write the prompts of the families of e5, nomic, and bge, arctic and mxbai.
_IN_README = re.compile(
    r"[\"'`]((?:query|passage|search_query|search_document): "
    r"|Represent this sentence for searching relevant passages: )"
)


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The prompts of an encoder."""

    by_name: Mapping[str, str] = dataclasses.field(default_factory=dict)  # as recorded
    default_name: str | None = None  # of texts for which none is chosen; None: no prompt
    pooled: bool = True  # whether pooling reads the prompt's tokens (`include_prompt`)
    in_readme: tuple[str, ...] = ()  # prompts that the folder's README names, if none is recorded

    @property
    def default(self) -> str:
        """The prompt of texts for which none is chosen."""
        return self.by_name[self.default_name] if self.default_name else ""

    @property
    def query(self) -> str:
        """The prompt of queries."""
        return self.by_name.get(QUERY, "")

    @property
    def document(self) -> str:
        """The prompt of the texts that queries look for."""
        return next(filter(None, map(self.by_name.get, DOCUMENT_NAMES)), "")

    @property
    def symmetric(self) -> str:
        """The prompt of pairs whose texts are of one kind: the default prompt, or else that of queries."""
        return self.default or self.query

    def choose(self, prompt: str | None = None, prompt_name: str | None = None, default: str | None = None) -> str:
        """Return the prompt if it is given, that of a name, or the default. Raise ConfigError if there is none."""
        if prompt is not None:
            return prompt
        if prompt_name is None:
            return self.default if default is None else default
        if prompt_name not in self.by_name:
            known = ", ".join(self.by_name) or "none"
            raise ConfigError(f"prompt_name={prompt_name!r}: the model has no such prompt. It has: {known}")
        return self.by_name[prompt_name]

    def warning(self, name: str) -> str:
        """Return a warning for texts that are encoded without a prompt; empty if the model needs none."""
        if listed := ", ".join(f"{key} ({value!r})" for key, value in self.by_name.items() if value):
            return (
                f"{name} was trained with prompts, and none is used here. It has: {listed}. Give a prompt_name, or use "
                "encode_query and encode_document"
            )
        if self.in_readme:
            listed = ", ".join(map(repr, self.in_readme))
            return (
                f"the README of {name} names prompts ({listed}), but its configuration does not. None is used here. "
                f'Give prompt=..., or record them in {SETTINGS}: {{"prompts": {{"query": "...", "document": "..."}}}}'
            )
        return ""

    def settings(self) -> dict[str, object]:
        """Return the entries of `config_sentence_transformers.json`; empty without prompts."""
        named = dict(self.by_name)
        if self.document:  # sentence-transformers looks for it under the first name only
            named[DOCUMENT_NAMES[0]] = self.document
        return {"prompts": named, "default_prompt_name": self.default_name} if any(named.values()) else {}


NO_PROMPTS = Prompts()


def read_prompts(folder: Path, *, pooled: bool = True) -> Prompts:
    """Read the prompts of a folder, or those that its README names if none is recorded, or raise CheckpointError."""
    path = folder / SETTINGS
    recorded = read_json_object(path) if path.is_file() else {}
    by_name, default = recorded.get("prompts") or {}, recorded.get("default_prompt_name")
    if not isinstance(by_name, dict) or not all(isinstance(each, str) for each in by_name.values()):
        raise CheckpointError(f"{path}: `prompts` is not an object of texts")
    if default is not None and default not in by_name:
        raise CheckpointError(f"{path}: default_prompt_name {str(default)[:60]!r} is not one of the prompts")
    in_readme: list[str] = []
    if not any(by_name.values()) and os.path.isfile(folder / "README.md"):
        in_readme = _IN_README.findall((folder / "README.md").read_text(encoding="utf-8", errors="replace"))
    return Prompts(by_name, default, pooled, tuple(dict.fromkeys(in_readme)))


def for_columns(prompts: Prompts, asked: Sequence[str], columns: int) -> tuple[tuple[str, ...], Prompts]:
    """Return the prompt of each column of a training text, and the prompts of the trained model.

    Args:
        prompts: The prompts of the starting checkpoint.
        asked: `data.prompts`: for all columns or for each, the name of a recorded prompt, a prompt itself (which
            contains a space or a colon) or `none`. Empty: the prompt of queries for the first column and that of
            documents for the others. A single column gets one prompt for both views.
        columns: The number of columns.

    Raises:
        ConfigError: The number of prompts differs from that of the columns, or a name is not recorded.
    """
    if not asked:
        texts = (prompts.query, *[prompts.document] * (columns - 1)) if columns > 1 else (prompts.symmetric,)
        return texts, prompts
    if len(asked) not in (1, columns):
        raise ConfigError(f"data.prompts has {len(asked)} prompts, and the text {columns} columns. Give 1 or {columns}")
    known = {**prompts.by_name, "none": ""}
    for each in asked:
        if each not in known and not re.search(r"[\s:]", each):
            raise ConfigError(
                f"data.prompts: the starting checkpoint has no prompt {each!r}. Known: {', '.join(known)}. A prompt "
                "itself has a space or a colon, such as 'query: '"
            )
    texts = tuple(known.get(each, each) for each in asked) * (columns // len(asked))
    by_name = {**prompts.by_name, QUERY: texts[0], DOCUMENT_NAMES[0]: texts[-1]}
    by_name |= {name: texts[-1] for name in DOCUMENT_NAMES if name in by_name}
    return texts, dataclasses.replace(prompts, by_name=by_name)
