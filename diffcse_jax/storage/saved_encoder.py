"""The encoder of a run, as its checkpoints and its selection hold it: for encoding, scoring and exporting."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffcse_jax.config import Config
from diffcse_jax.errors import CheckpointError
from diffcse_jax.io import CHECKPOINTS, find_run
from diffcse_jax.models import parameters, pretrained
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.transformer import TransformerConfig
from diffcse_jax.storage.checkpoint_items import best_step, listed, read_arrays, read_record, steps_in
from diffcse_jax.storage.selection import Outcomes, Record, read_baseline, read_selection, read_weights
from diffcse_jax.storage.workdir import encoder_folder, read_config, read_pooler


@dataclasses.dataclass(frozen=True)
class SavedEncoder:
    """The encoder of a checkpoint, or the one that was selected, with what encoding and exporting need."""

    config: Config
    hf_config: Mapping[str, Any]
    folder: Path  # config.json and tokenizer of the base model
    transformer_config: TransformerConfig
    transformer: Params
    pooler_head: Params | None  # dense + tanh: the trained projector where it survives, else the base model's pooler
    pooler: str
    step: int
    dev: dict[str, float]
    dev_metric: str
    dev_text: str = ""  # identifies the text that `dev_metric` is measured on; earlier versions did not record it
    outcomes: Outcomes = dataclasses.field(default_factory=list)
    share: float = 1.0  # of the trained weights: 0 for the start itself, less than 1 between the start and the step
    verdict: str = ""  # how it compares with the start, once the run is finished
    start: Record | None = None  # the start's


def read_encoder(path: Path) -> SavedEncoder:
    """The encoder that a finished run has selected, a run's best checkpoint so far, or one checkpoint.

    The best checkpoint is the newest where none is eligible.

    Args:
        path: a workdir, or `WORKDIR/checkpoints/STEP`.

    Raises:
        CheckpointError: nothing there to read.
    """
    workdir = find_run(path) or path
    config = read_config(workdir)
    selection = read_selection(workdir) if path == workdir else None
    if selection and selection.share < 1:
        params, record = read_weights(workdir), selection.record
    else:
        params, record = read_parameters(workdir, None if path == workdir else int(path.name))
    folder = encoder_folder(workdir)
    hf_config = pretrained.read_hf_config(folder)
    return SavedEncoder(
        config=config,
        hf_config=hf_config,
        folder=folder,
        transformer_config=pretrained.transformer_config(hf_config, source=str(folder)),
        transformer=parameters.subset(params, "encoder"),
        pooler_head=parameters.subset(params, "projector") if record.pooler == "cls" else read_pooler(workdir),
        pooler=record.pooler,
        step=record.step,
        dev=record.dev,
        dev_metric=record.dev_metric,
        dev_text=record.dev_text,
        outcomes=record.outcomes,
        share=selection.share if selection else 1.0,
        verdict=selection.verdict if selection else "",
        start=read_baseline(workdir),
    )


def read_parameters(workdir: Path, step: int | None) -> tuple[Params, Record]:
    """The parameters and the record of a checkpoint; of the best one where no step is given."""
    checkpoints = workdir / CHECKPOINTS
    asked = workdir if step is None else checkpoints / str(step)
    step, steps = default_step(checkpoints) if step is None else step, steps_in(checkpoints)
    if step not in steps:
        raise CheckpointError(f"no complete checkpoint {asked}; there are: {listed(steps)}")
    record, items = read_arrays(checkpoints / str(step), ("params",))
    return items["params"], record


def default_step(checkpoints: Path) -> int | None:
    """The best checkpoint; the newest, where none was evaluated; None where there is none.

    Raises:
        CheckpointError: a damaged one, which may have been the best.
    """
    scores = {}
    for step in steps_in(checkpoints):
        try:
            scores[step] = read_record(checkpoints / str(step)).score
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; it may be the best one. Name the one to use, as {checkpoints}/STEP, or move it away"
            ) from error
    best = best_step(scores)
    return max(scores, default=None) if best is None else best
