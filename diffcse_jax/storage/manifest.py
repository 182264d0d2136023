"""SHA-256 of files, recorded when they are written and compared when they are read."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from diffcse_jax.data.file_corpus import sha256
from diffcse_jax.errors import CheckpointError
from diffcse_jax.storage.files import read_json_object

EXPORT_CHECK = "export_check.json"  # of an export: its record


def described(folder: Path, paths: Iterable[Path]) -> dict[str, str]:
    """The SHA-256 of files of a folder by their paths in it."""
    return {path.relative_to(folder).as_posix(): sha256([path]) for path in sorted(paths)}


def changed(folder: Path, recorded: Mapping[str, str]) -> str:
    """The first file that is missing or is not what was recorded; empty where there is none."""
    for name, digest in recorded.items():
        path = folder / name
        if not path.is_file() or sha256([path]) != digest:
            return name
    return ""


def require_whole_export(folder: Path) -> None:
    """Compares the files of an export with its record; of a folder that has none nothing is required.

    Raises:
        CheckpointError: a file is missing or has changed.
    """
    path = folder / EXPORT_CHECK
    if not path.is_file():
        return
    recorded = read_json_object(path).get("files", {})  # exports of earlier versions record none
    if not isinstance(recorded, dict):
        raise CheckpointError(f"{path}: `files` is no object; export the folder again")
    if name := changed(folder, recorded):
        raise CheckpointError(
            f"{folder / name} is not what {path.name} beside it says was exported: export the folder again, or, where "
            f"it was changed on purpose, remove {path.name}"
        )
