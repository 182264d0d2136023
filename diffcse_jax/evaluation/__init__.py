"""Evaluation of sentence encoders: STS, transfer, retrieval, geometry, and dev metrics."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from diffcse_jax.commands import EvaluationSettings as EvaluationSettings
from diffcse_jax.errors import DataError
from diffcse_jax.models.sentence_folder import Prompts

Embeddings = Float32[np.ndarray, "sentences dim"]


@runtime_checkable
class Encoder(Protocol):
    """Turns sentences into embeddings, with any framework."""

    pooler: str  # with the modules after it, such as `avg + Normalize`
    truncate_dim: int | None
    prompts: Prompts

    @property
    def queries(self) -> "Encoder | None":
        """The query encoder, if queries have an encoder of their own."""

    def encode(
        self, sentences: Sequence[str], *, batch_size: int = 64, prompt: str | None = None
    ) -> Embeddings:
        """Return one embedding per sentence.

        Without a prompt, the default one is used if there is one.
        """
        ...


Known = dict[str, dict[str, np.ndarray]]  # embeddings by prompt and sentence


class CachedEncoder:
    """Computes each sentence once, however many tasks ask for it, and keeps its embedding.

    Args:
        encoder: The encoder.
        known: Where embeddings are kept, if several encoders share them. They must encode
            documents alike, and may have different query encoders.
    """

    def __init__(self, encoder: Encoder, known: Known | None = None):
        self.pooler = encoder.pooler
        self.truncate_dim = encoder.truncate_dim
        self.prompts = encoder.prompts
        self.encoder = encoder  # for what is not computed from embeddings
        self.queries = None if encoder.queries is None else CachedEncoder(encoder.queries)
        self._embeddings: Known = {} if known is None else known

    def encode(
        self, sentences: Sequence[str], *, batch_size: int = 64, prompt: str | None = None
    ) -> Embeddings:
        """Return one embedding per sentence."""
        prompt = self.prompts.choose(prompt)
        known = self._embeddings.setdefault(prompt, {})
        if new := [sentence for sentence in dict.fromkeys(sentences) if sentence not in known]:
            computed = self.encoder.encode(new, batch_size=batch_size, prompt=prompt)
            known.update(zip(new, computed, strict=True))
        return np.stack([known[sentence] for sentence in sentences])


def encode_groups(
    encoder: Encoder,
    groups: Sequence[Sequence[str]],
    batch_size: int = 64,
    prompt: str | None = None,
) -> list[Float32[np.ndarray, "_ dim"]]:
    """Return the embeddings of each group of sentences, from one call of the encoder."""
    sentences = [sentence for group in groups for sentence in group]
    embeddings = encoder.encode(sentences, batch_size=batch_size, prompt=prompt)
    return np.split(embeddings, np.cumsum([len(group) for group in groups])[:-1])


def encode_pairs(
    encoder: Encoder,
    queries: Sequence[str],
    targets: Sequence[str],
    batch_size: int = 64,
    *,
    symmetric: bool = False,
) -> list[Float32[np.ndarray, "_ dim"]]:
    """Return the embeddings of queries and of targets, as the encoder makes each.

    `symmetric` says that both are texts of one kind, such as the halves of sentences. They have one
    prompt, and the document encoder.
    """
    prompts = encoder.prompts
    if symmetric or (encoder.queries is None and prompts.query == prompts.document):
        prompt = prompts.symmetric if symmetric else prompts.query
        return encode_groups(encoder, [queries, targets], batch_size, prompt)
    of_queries = encoder.queries or encoder
    return [
        of_queries.encode(queries, batch_size=batch_size, prompt=prompts.query),
        encoder.encode(targets, batch_size=batch_size, prompt=prompts.document),
    ]


DEFAULTS = EvaluationSettings()


@dataclasses.dataclass(frozen=True)
class Task:
    """A data set and how it is scored.

    Attributes:
        name: Its name.
        splits: Files of each split (or subset), relative to SentEval's `downstream` folder.
        read: Returns the content of a split's files, or raises a `DataError` that names file and
            line.
        score: Returns named scores, x 100, of an encoder on the content of the splits.
        modes: Modes that it has data for. `dev` does not read the split `test`.
        one_split: Whether only the last split is read.
    """

    name: str
    splits: Mapping[str, tuple[str, ...]]
    read: Callable[..., Any]
    score: Callable[[Encoder, Mapping[str, Any], EvaluationSettings], dict[str, Any]]
    modes: tuple[str, ...] = ("test", "fasttest", "dev")
    one_split: bool = False

    def files(self, folder: Path, mode: str) -> dict[str, list[Path]]:
        """Return the files that `run` reads, by split."""
        splits = [split for split in self.splits if mode != "dev" or split != "test"]
        read = splits[-1:] if self.one_split else splits
        return {split: [folder / file for file in self.splits[split]] for split in read}

    def missing(self, folder: Path, mode: str) -> list[Path]:
        """Return the files that `run` would read and that do not exist."""
        splits = self.files(folder, mode).values()
        return [path for paths in splits for path in paths if not path.is_file()]

    def load(self, folder: Path, split: str) -> Any:
        """Return the content of a split."""
        return self.read(*(folder / file for file in self.splits[split]))

    def run(
        self, encoder: Encoder, folder: Path, settings: EvaluationSettings = DEFAULTS
    ) -> dict[str, Any]:
        """Return named scores, x 100, of an encoder on the data in a folder."""
        files = self.files(folder, settings.mode)
        content = {split: self.load(folder, split) for split in files}
        try:
            return self.score(encoder, content, settings)
        except DataError as error:
            names = ", ".join(str(path) for paths in files.values() for path in paths)
            raise DataError(f"{names}: {error}" if names else str(error)) from error
