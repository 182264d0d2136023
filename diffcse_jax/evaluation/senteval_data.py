"""SentEval's data: a folder on disk, or the archive that SimCSE put on the Hugging Face hub."""

import os
import tarfile
from pathlib import Path

from diffcse_jax.errors import DataError
from diffcse_jax.io import cache_folder, expand_path, hub_file, replace_dir

DATA_SETS = ("STS", "SICK", "MR", "CR", "SUBJ", "MPQA", "SST", "TREC", "MRPC")  # folders of SentEval's data
PLACES = ("senteval", "downstream", "senteval/downstream", "data/downstream", "SentEval/data/downstream")


def is_local(data_dir: str) -> bool:
    """Return whether SentEval's data is looked for on this machine, not on the hub."""
    return bool(data_dir) or "DIFFCSE_DATA_DIR" in os.environ


def senteval_folder(data_dir: str) -> Path:
    """Find SentEval's `downstream` folder: the named one, `$DIFFCSE_DATA_DIR/senteval`, or the hub's.

    If the named folder contains it in one of `PLACES`, that one is returned.
    """
    if not is_local(data_dir):
        return _hub_folder()
    folder = expand_path(data_dir) if data_dir else Path(os.environ["DIFFCSE_DATA_DIR"]) / "senteval"
    if not folder.is_dir():
        raise DataError(f"no evaluation data: there is no folder {folder}")
    candidates = (folder, *(folder / place for place in PLACES))
    return next((c for c in candidates if any((c / name).is_dir() for name in DATA_SETS)), folder)


def _hub_folder() -> Path:
    archive = hub_file(
        "senteval.tar",
        "Extract that file and name the folder that contains STS, SICK, MR, ... with --data_dir (for training: "
        "eval.data_dir). Or name a folder that contains it as `senteval` in DIFFCSE_DATA_DIR",
    )
    folder = cache_folder(f"senteval-{archive.parent.name[:12]}")
    extract(archive, folder)
    found = sorted(path.parent for path in folder.rglob("STS") if path.is_dir())
    if not found:
        raise DataError(f"{folder} does not contain a folder STS. Delete it to download SentEval's data again")
    return found[0]


def extract(archive: Path, folder: Path) -> None:
    """Extract an archive, unless the folder exists."""
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replace_dir(folder) as new, tarfile.open(archive) as tar:
            tar.extractall(str(new), filter="data")
    except (OSError, tarfile.TarError, RecursionError) as error:
        raise DataError(f"cannot extract {archive} to {folder}: {error}") from error
