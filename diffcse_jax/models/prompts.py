"""Prompts: texts that some encoders expect in front of each text, such as "query: ".

They are recorded and applied as in sentence-transformers: `config_sentence_transformers.json` names prompts and perhaps
a default one. A prompt is put in front of the text before it is tokenised. The configuration of the pooling says
whether the prompt's tokens are pooled.
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
NO_PROMPT = "none"  # in `data.prompts`
LONGEST_README = 1 << 20  # characters that are searched for prompts
# How model cards write the prompts of the families of e5, nomic, and bge, arctic and mxbai.
_IN_README = re.compile(
    r"[\"'`]((?:query|passage|search_query|search_document): "
    r"|Represent this sentence for searching relevant passages: )"
)


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The prompts of an encoder.

    Attributes:
        by_name: The recorded prompts.
        default_name: The prompt of texts for which none is chosen. None: no prompt.
        pooled: Whether pooling reads the prompt's tokens (`include_prompt`).
        in_readme: Prompts that the folder's README names, if none is recorded.
    """

    by_name: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default_name: str | None = None
    pooled: bool = True
    in_readme: tuple[str, ...] = ()

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

    def choose(self, prompt: str | None = None, prompt_name: str | None = None) -> str:
        """Return the prompt itself if one is given, the prompt of a name, or the default prompt.

        Raises:
            ConfigError: No prompt of this name is recorded.
        """
        if prompt is not None:
            return prompt
        if prompt_name is None:
            return self.default
        if prompt_name not in self.by_name:
            known = ", ".join(self.by_name) or "none"
            raise ConfigError(f"prompt_name={prompt_name!r}: the model has no such prompt. It has: {known}")
        return self.by_name[prompt_name]

    def warning(self, name: str) -> str:
        """Return a warning for texts that are encoded without a prompt; empty if the model needs none."""
        if recorded := {key: value for key, value in self.by_name.items() if value}:
            listed = ", ".join(f"{key} ({value!r})" for key, value in recorded.items())
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
        """Return the entries of `config_sentence_transformers.json`; empty without prompts.

        sentence-transformers looks for the prompt of documents under its first name only.
        """
        named = dict(self.by_name)
        if self.document:
            named[DOCUMENT_NAMES[0]] = self.document
        return {"prompts": named, "default_prompt_name": self.default_name} if any(named.values()) else {}


NO_PROMPTS = Prompts()


def read_prompts(folder: Path, *, pooled: bool = True) -> Prompts:
    """Read the prompts of a folder, or those that its README names if none is recorded.

    Raises:
        CheckpointError: The recorded prompts are not texts, or the default prompt is not one of them.
    """
    path = folder / SETTINGS
    recorded = read_json_object(path) if path.is_file() else {}
    by_name, default = recorded.get("prompts") or {}, recorded.get("default_prompt_name")
    if not isinstance(by_name, dict) or not all(isinstance(each, str) for each in by_name.values()):
        raise CheckpointError(f"{path}: `prompts` is not an object of texts")
    if default is not None and default not in by_name:
        raise CheckpointError(f"{path}: default_prompt_name {str(default)[:60]!r} is not one of the prompts")
    in_readme: list[str] = []
    if not any(by_name.values()) and os.path.isfile(folder / "README.md"):
        with (folder / "README.md").open(encoding="utf-8", errors="replace") as file:
            in_readme = _IN_README.findall(file.read(LONGEST_README))
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
    texts = tuple(_text_of(prompts, each) for each in asked) * (columns // len(asked))
    return texts, dataclasses.replace(prompts, by_name=_named(prompts, texts))


def _text_of(prompts: Prompts, asked: str) -> str:
    if asked in prompts.by_name or asked == NO_PROMPT:
        return prompts.by_name.get(asked, "")
    if not re.search(r"[\s:]", asked):
        known = ", ".join([*prompts.by_name, NO_PROMPT])
        raise ConfigError(
            f"data.prompts: the starting checkpoint has no prompt {asked!r}. Known: {known}. A prompt itself has a "
            "space or a colon, such as 'query: '"
        )
    return asked


def _named(prompts: Prompts, texts: Sequence[str]) -> dict[str, str]:
    """Return the recorded prompts with those of queries and documents that a model was trained with."""
    named = dict(prompts.by_name) | {QUERY: texts[0]}
    return named | {name: texts[-1] for name in DOCUMENT_NAMES if name in named or name == DOCUMENT_NAMES[0]}
