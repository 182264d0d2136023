"""The encoder of a run or checkpoint, which evaluation, encoding and export read."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffcse_jax.config import Config
from diffcse_jax.errors import CheckpointError
from diffcse_jax.io import CHECKPOINTS, find_run
from diffcse_jax.models import hf, parameters
from diffcse_jax.models.hf import Pretrained
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.pooling_modules import RecordedPooler
from diffcse_jax.models.prompts import NO_PROMPTS, Prompts
from diffcse_jax.run_folder.checkpoints import best_step, read_arrays, read_record, saved_steps
from diffcse_jax.run_folder.folder import encoder_folder, read_config, read_head, read_pooler, read_run_prompts
from diffcse_jax.run_folder.records import Record, read_baseline, read_selection, read_weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedEncoder(Record):
    """The encoder of a checkpoint, or the one that a run has selected: its record, and what encoding it needs."""

    config: Config
    checkpoint: Pretrained  # the starting checkpoint's folder, the trained weights and, as pooler, the kept projector
    prompts: Prompts = NO_PROMPTS
    interpolation: float = 1.0  # the share of the trained weights, as in `Selection`
    verdict: str = ""  # empty before training is finished
    baseline: Record | None = None  # the starting checkpoint's
    systems: Sequence[Mapping[str, Any]] = ()  # as in `Selection`
    search: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def recorded(self) -> RecordedPooler:
        """What the folder of another checkpoint would record."""
        head = self.checkpoint.pooler if self.pooler == "cls" else None
        return RecordedPooler(self.pooler, head, None, self.checkpoint.sentence_head, self.prompts)

    @property
    def embedding_size(self) -> int:
        """The size of embeddings before they are cut."""
        return self.checkpoint.embedding_size(self.pooler)


def read_encoder(path: Path) -> SavedEncoder:
    """Read the encoder that a finished run has selected, the best one so far, or the one of a checkpoint.

    If no checkpoint is eligible as the best one, the newest is read.

    Args:
        path: The run's folder, or `WORKDIR/checkpoints/STEP`.
    """
    workdir = find_run(path) or path
    config = read_config(workdir)
    selection = read_selection(workdir) if path == workdir else None
    if selection and selection.interpolation < 1:
        params, record = read_weights(workdir), selection.record
    else:
        params, record = read_parameters(workdir, None if path == workdir else int(path.name))
    folder = encoder_folder(workdir)
    hf_config = hf.read_hf_config(folder)
    checkpoint = Pretrained(
        folder,
        hf_config,
        hf.transformer_config(hf_config, source=str(folder)),
        parameters.subset(params, "encoder"),
        pooler=parameters.subset(params, "projector") if record.pooler == "cls" else read_pooler(workdir),
        sentence_head=read_head(workdir).of(record.pooler, params),
    )
    return SavedEncoder(
        **vars(record),
        config=config,
        checkpoint=checkpoint,
        prompts=read_run_prompts(folder),
        interpolation=selection.interpolation if selection else 1.0,
        verdict=selection.verdict if selection else "",
        baseline=read_baseline(workdir),
        systems=selection.systems if selection else (),
        search=selection.search if selection else {},
    )


def read_parameters(workdir: Path, step: int | None) -> tuple[Params, Record]:
    """Read the parameters and the record of a checkpoint; of the best one if no step is given."""
    checkpoints = workdir / CHECKPOINTS
    wanted = workdir if step is None else checkpoints / str(step)
    step, steps = default_step(checkpoints) if step is None else step, saved_steps(checkpoints)
    if step not in steps:
        raise CheckpointError(f"no complete checkpoint {wanted}. There are: {', '.join(map(str, steps)) or 'none'}")
    record, items = read_arrays(checkpoints / str(step), ("params",))
    return items["params"], record


def default_step(checkpoints: Path) -> int | None:
    """Return the step of the best checkpoint, of the newest if none was evaluated, or None if there is none."""
    try:
        scores = {step: read_record(checkpoints / str(step)).score for step in saved_steps(checkpoints)}
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. It may be the best one. Name the checkpoint to use, as {checkpoints}/STEP, or move this one away"
        ) from error
    best = best_step(scores)
    return max(scores, default=None) if best is None else best
