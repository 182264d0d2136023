"""Train from Python. `run` is what `diffcse train` does: train, select, draw the curves, export.

from diffcse_jax import train

encoder, history = train(sentences, "adapt", workdir="runs/mine", overrides={"train.steps": 60})

See docs/training.md.
"""

import contextlib
import dataclasses
import glob
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from diffcse_jax import hosts
from diffcse_jax.config import (
    Config,
    ConvertsToDict,
    checked_values,
    configuration,
    flat,
    nearest_key,
    settings_of_losses,
    unknown_key_message,
)
from diffcse_jax.config.groups import OF_DOCUMENTS
from diffcse_jax.data.given import write_held_out, write_sentences
from diffcse_jax.documents.memory import Text, as_texts
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import ConfigError, Interrupted, UserError, printable_message
from diffcse_jax.export import export
from diffcse_jax.hosts import log_line
from diffcse_jax.io import disk_errors, expand_path
from diffcse_jax.losses import Loss
from diffcse_jax.run_folder.checkpoints import read_encoder
from diffcse_jax.run_folder.records import read_metrics
from diffcse_jax.run_folder.start import locked
from diffcse_jax.run_folder.summary import draw_curves
from diffcse_jax.training.callbacks import Callback
from diffcse_jax.training.train import train_in_folder


@dataclasses.dataclass(frozen=True)
class Trained:
    """The result of training. Unpacking gives the encoder and the history.

    Attributes:
        encoder: The exported model, which the verdict names.
        history: The rows of `metrics.jsonl`, each with its `step`: losses and other metrics of
            logged steps, and dev scores as `dev/NAME`. The row of step 0 has the scores of the
            starting checkpoint as `start/NAME`.
        scores: Dev scores of the encoder.
        start_scores: Dev scores of the starting checkpoint.
        verdict: How the two compare and what was exported, as text.
        workdir: The run folder. `workdir / "export"` loads in transformers and
            sentence-transformers.
    """

    encoder: SentenceEncoder
    history: list[dict[str, float]]
    scores: dict[str, float]
    start_scores: dict[str, float]
    verdict: str
    workdir: Path

    def __iter__(self) -> Iterator[Any]:
        yield self.encoder
        yield self.history


def train(
    sentences_or_path: str | os.PathLike[str] | Iterable[Text] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | ConvertsToDict = "adapt",
    *,
    workdir: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    callbacks: Sequence[Callback] = (),
    losses: Mapping[str, Loss] = MappingProxyType({}),
    **others: Any,
) -> Trained:
    """Train a sentence encoder and export it. If training was stopped, the same call resumes it.

    Args:
        sentences_or_path: What to train on: sentences or documents; tuples of sentence, positive
            and hard negatives; dicts of columns; or a value of `data.train_file`, such as a file, a
            folder, `docstrings` or `wiki1m`. None: the configuration's text. If the configuration
            makes pairs of documents and you give tuples, the fraction `data.held_out` of the rows
            is kept out of training, and `eval.metric` becomes `pairs_retrieval` of these. To select
            by pairs of your own, set `eval.metric="pairs_retrieval"` and `eval.pairs_file`: all
            rows train.
        config: The name of a file in configs/, the path of such a file, a dict of values that
            differ from the defaults (`{"train": {"steps": 60}}` or `{"train.steps": 60}`), a
            `Config`, or a ConfigDict.
        workdir: The run folder. `{seed}`, `{name}` and keys such as `{optim.learning_rate}` stand
            for the run's values. None: `runs/NAME` of the configuration file, `runs/custom` for a
            dict or a `Config`.
        overrides: Values that change `config`, by key or in groups.
        callbacks: Called at steps, evaluations and saves (`diffcse_jax.Callback`).
        losses: Losses of your own beside those of the configuration, such as `{"mine":
            MyLoss(weight=0.1)}`. The run records where their classes are defined. To resume, it
            must still find them there.
        **others: None. An error names the key of `overrides` that is meant.

    Raises:
        UserError: A configuration, text, checkpoint or run folder cannot be used. The message says
            what to do.
        Interrupted: Ctrl-C, SIGTERM or a callback stopped training. Everything is saved. This is a
            `KeyboardInterrupt`.
    """
    _refuse_arguments(others)
    if not isinstance(callbacks, Sequence) or not all(
        isinstance(each, Callback) for each in callbacks
    ):
        raise ConfigError(f"callbacks={callbacks!r:.60}: give a list of diffcse_jax.Callback")
    changes = flat(checked_values("overrides", overrides))
    name, checked = configuration(config, settings_of_losses(losses) | changes)
    if checked.distributed:
        hosts.join()  # before a message asks JAX for its devices
    if sentences_or_path is not None:
        of_text = _text_settings(sentences_or_path, checked)
        checked = Config.from_dict(flat(checked.to_dict()) | of_text)
    folder = named_workdir(workdir, name, checked)
    verdict = run(checked, folder, callbacks)
    saved = read_encoder(folder)
    start_scores = saved.baseline.dev if saved.baseline else {}
    return Trained(
        encoder=SentenceEncoder.from_saved(saved),
        history=read_metrics(folder),
        scores=saved.dev,
        start_scores=start_scores,
        verdict=verdict,
        workdir=folder,
    )


def _refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for arguments that `train` does not have, such as `epochs=3`."""
    for name, value in arguments.items():
        key = nearest_key(name)
        advice = f". Write overrides={{{key!r}: {value!r:.40}}}" if key else ""
        raise ConfigError(f"train has no argument {name!r}{advice}")


def _text_settings(text: str | os.PathLike[str] | Iterable[Text], config: Config) -> dict[str, Any]:
    """Return the configuration keys with which a run trains on this text."""
    if isinstance(text, str) and re.search(r"\w\s+\w", text):
        path = expand_path(text)
        if not (path.exists() or glob.glob(str(path))):
            raise ConfigError(
                f"{text[:60]!r} is not a file. To train on sentences, give a list of them."
            )
    if isinstance(text, str | os.PathLike):
        return {"data.train_file": os.fspath(text)}
    texts = iter(as_texts(text))
    first = [*itertools.islice(texts, 1)]
    texts = itertools.chain(first, texts)
    if not first or isinstance(first[0], str | Mapping) or config.data.pairs == "columns":
        return {"data.train_file": write_sentences(texts)}
    changed: dict[str, Any] = {"data.pairs": "columns", "data.held_out": 0.0}
    files: dict[str, Any] = {}
    if config.eval.metric in OF_DOCUMENTS:
        files["data.train_file"], files["eval.pairs_file"] = write_held_out(
            texts, config.data.held_out
        )
        changed["eval.metric"] = "pairs_retrieval"
    else:
        files["data.train_file"] = write_sentences(texts)
    used = ", ".join(f"{key}={value!r}" for key, value in changed.items())
    share = ", some of them to select a checkpoint" if "eval.metric" in changed else ""
    log_line(f"notice: rows with several texts are used as pairs{share} ({used})")
    return files | changed


def run(config: Config, workdir: Path, callbacks: Sequence[Callback] = ()) -> str:
    """Train in a run folder and export to `WORKDIR/export`. If the run was stopped, resume it.

    Returns:
        How the exported model compares with the starting checkpoint, as text.
    """
    with in_workdir(config, workdir):
        verdict = train_in_folder(config, workdir, callbacks)

        def finish() -> None:
            export_with_curves(workdir)
            print(printable_message(verdict))

        # The other processes wait, because their exit would end the first one.
        hosts.decided_by_first(finish)
        return verdict


@contextlib.contextmanager
def in_workdir(config: Config, workdir: Path) -> Iterator[None]:
    """Join the other processes, if any, and hold the lock of the run folder in the block."""
    if config.distributed:
        hosts.join()  # before anything asks JAX for its devices
    else:
        hosts.require_alone()
    hosts.keep_compiled()
    try:
        with hosts.terminated_like_interrupted(), locked(workdir):
            yield
    except Interrupted:
        raise
    except KeyboardInterrupt:
        raise Interrupted(
            f"Stopped. {workdir} is intact; run the same command again to resume."
        ) from None


def export_with_curves(workdir: Path) -> None:
    """Export the selected model of a run to `WORKDIR/export`, and draw its curves.

    Curves need matplotlib. Without it, none are drawn.
    """
    with disk_errors(workdir / "report", safe="The checkpoints are intact."):
        try:
            log_line(f"curves: {draw_curves(workdir)}")
        except UserError as error:
            log_line(f"notice: no curves were drawn: {error}")
    export(workdir, workdir / "export")


def named_workdir(pattern: str | os.PathLike[str] | None, name: str, config: Config) -> Path:
    """Return the folder of a run, by default `runs/NAME`.

    In the pattern that the user gives, `{seed}`, `{name}` and keys such as `{optim.learning_rate}`
    stand for the run's values, and `~` for the home folder.
    """
    values = flat(config.to_dict()) | {"name": name, "seed": config.train.seed}

    def value(braces: re.Match[str]) -> str:
        if braces[1] not in values:
            known = "Use {seed}, {name} or keys of the configuration."
            raise ConfigError(f"workdir {pattern}: {unknown_key_message(braces[1])} {known}")
        return re.sub(r"[^\w.,=+-]+", "-", str(values[braces[1]])).strip("-")

    if pattern is None:
        return Path("runs") / name
    return expand_path(re.sub(r"\{([\w.]*)\}", value, str(expand_path(pattern))))
