"""Find the run that a path belongs to, and the model that it has exported.

Whoever only encodes imports this file, so it imports nothing that only training needs.
"""

import contextlib
from pathlib import Path

from diffcse_jax.errors import CheckpointError
from diffcse_jax.io import expand_path, read_json_object

CONFIG = "config.json"  # the configuration
CHECKPOINTS = "checkpoints"
SELECTION = "selection.json"  # written when training is over
EXPORT = "export"
SEARCH = "search.json"  # in an export: how to search with the model


def find_run(path: Path) -> Path | None:
    """Return the run folder if `path` is one, or is `checkpoints/STEP` in one; otherwise None."""
    is_checkpoint = path.parent.name == CHECKPOINTS and path.name.isdecimal()
    for folder in [path, path.parent.parent] if is_checkpoint else [path]:
        with contextlib.suppress(CheckpointError):
            # Hugging Face's files of this name have no such key.
            model = read_json_object(folder / CONFIG).get("model")
            if isinstance(model, dict) and "name_or_path" in model:
                return folder
    return None


def finished_export(path: Path) -> Path | None:
    """Return the exported model of a run that has finished; otherwise None."""
    is_finished = find_run(path) == path and (path / SELECTION).is_file()
    return path / EXPORT if is_finished and (path / EXPORT).is_dir() else None


def model_of(name_or_path: str) -> str:
    """Return the export of a run, given the run's folder.

    Other names of models are returned as they are.

    Raises:
        CheckpointError: It is a checkpoint of a run, or a run without an export.
    """
    folder = expand_path(name_or_path)
    workdir = find_run(folder) if name_or_path else None
    if workdir is None:
        return name_or_path
    if export := finished_export(folder):
        return str(export)
    kind = "a checkpoint of a run"
    if folder == workdir:
        kind = "the folder of a run that has no export yet"
    command = f"diffcse export --model {folder} --output DIR"
    raise CheckpointError(f"{folder} is {kind}. Run `{command}`, and name DIR.")
