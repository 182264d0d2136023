"""Training from Python.

from diffcse_jax import train

encoder, history = train(sentences, "adapt", workdir="runs/mine", overrides={"train.steps": 60})

See docs/api.md.
"""

import dataclasses
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from diffcse_jax.config import Config, ConvertsToDict, configuration, flat
from diffcse_jax.data.in_memory import Text, as_texts, write_held_out, write_sentences
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.run import named_workdir, run
from diffcse_jax.run_folder.records import read_metrics
from diffcse_jax.run_folder.saved_encoder import read_encoder
from diffcse_jax.training.callbacks import Callback


@dataclasses.dataclass(frozen=True)
class Trained:
    """The result of training; unpacked, it is the encoder and its history.

    Attributes:
        encoder: the model that the run has selected: its best checkpoint, or what else its verdict says.
        history: the rows of `metrics.jsonl`, each with its `step`: losses and other metrics of logged steps, dev scores
            as `dev/NAME`, at step 0 those of the start as `start/NAME`.
        scores: the dev scores of the encoder.
        start_scores: those of the start.
        verdict: how the two compare and what was exported, in words.
        workdir: the run's folder; `workdir / "export"` is for Hugging Face and sentence-transformers.
    """

    encoder: SentenceEncoder
    history: list[dict[str, float]]
    scores: dict[str, float]
    start_scores: dict[str, float]
    verdict: str
    workdir: Path

    def __iter__(self) -> Iterator[Any]:
        return iter((self.encoder, self.history))


def train(
    sentences_or_path: str | os.PathLike[str] | Iterable[Text] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | ConvertsToDict = "adapt",
    *,
    workdir: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    callbacks: Sequence[Callback] = (),
) -> Trained:
    """Trains a sentence encoder and exports it. Called again with the same arguments it goes on where it stopped.

    Args:
        sentences_or_path: sentences or documents; or tuples of sentence, positive and hard negatives; or dicts of
            columns; or what `data.train_file` takes: a file, a folder, `docstrings`, `wiki1m`. None: the
            configuration's own. Of tuples, where the configuration would make pairs of documents, the share
            `data.held_out` (then of the rows) is kept out of training for `eval.metric="pairs_retrieval"`.
        config: the name of a file in configs/, a path of such a file, a dict of what differs from the defaults
            (`{"train": {"steps": 60}}` or `{"train.steps": 60}`), a `Config`, or a ConfigDict.
        workdir: where the run lives; `{seed}`, `{name}` and keys as `{optim.learning_rate}` stand for its values. None:
            `runs/NAME` of the configuration's file, `runs/custom` for a dict or a `Config`.
        overrides: values that change `config`, by key or in groups.
        callbacks: are told of steps, evaluations and saves (`diffcse_jax.Callback`).

    Raises:
        UserError: a configuration, text, checkpoint or workdir that cannot be used; the message says what to do.
        Interrupted: a `KeyboardInterrupt`: by Ctrl-C, SIGTERM or a callback. Everything is saved.
    """
    name, checked = configuration(config, overrides)
    if sentences_or_path is not None:
        checked = Config.from_dict(flat(checked.to_dict()) | _settings(sentences_or_path, checked))
    folder = named_workdir(None if workdir is None else os.fspath(workdir), name, checked)
    verdict = run(checked, folder, callbacks)
    saved = read_encoder(folder)
    start_scores = saved.baseline.dev if saved.baseline else {}
    encoder = SentenceEncoder.from_saved(saved)
    return Trained(encoder, read_metrics(folder), saved.dev, start_scores, verdict, folder)


def _settings(given: str | os.PathLike[str] | Iterable[Text], config: Config) -> dict[str, Any]:
    """The keys by which a run trains on this text."""
    if isinstance(given, str | os.PathLike):
        return {"data.train_file": os.fspath(given)}
    texts = iter(as_texts(given))
    first = list(itertools.islice(texts, 1))
    texts = itertools.chain(first, texts)
    is_rows = bool(first) and not isinstance(first[0], str | Mapping)
    if not is_rows or config.data.pairs == "columns":
        return {"data.train_file": write_sentences(texts)}
    settings: dict[str, Any] = {"data.pairs": "columns", "data.held_out": 0.0}
    if config.data.held_out:
        train_file, pairs_file = write_held_out(texts, config.data.held_out)
        settings |= {"data.train_file": train_file, "eval.metric": "pairs_retrieval", "eval.pairs_file": pairs_file}
    else:
        settings |= {"data.train_file": write_sentences(texts)}
    told = ", ".join(f"{key}={value!r}" for key, value in settings.items() if not isinstance(value, Path))
    print(f"notice: rows of several texts are pairs already: {told}", file=sys.stderr)
    return settings
