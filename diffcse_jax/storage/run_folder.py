"""Which folders are those of runs."""

from pathlib import Path

from diffcse_jax.errors import CheckpointError
from diffcse_jax.io import read_json

CHECKPOINTS = "checkpoints"
CONFIG = "config.json"
HEADS = "heads"  # of a fine-tuning: the workdir of the heads' stage, in that of the run


def workdir_of(path: Path) -> Path | None:
    """The training workdir that the path is, or that holds it as `checkpoints/STEP`; None if it is neither."""
    if _is_workdir(path):
        return path
    is_step = path.parent.name == CHECKPOINTS and path.name.isdecimal()
    return path.parent.parent if is_step and _is_workdir(path.parent.parent) else None


def _is_workdir(folder: Path) -> bool:
    """True if its `config.json` is a run's: models of Hugging Face have a file of this name as well."""
    try:
        config = read_json(folder / CONFIG)
    except CheckpointError:
        return False
    model = config.get("model") if isinstance(config, dict) else None
    return isinstance(model, dict) and "name_or_path" in model
