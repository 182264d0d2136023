"""Where SentEval's data is: a folder that is named, or the suite that SimCSE put on the Hugging Face hub."""

import os
import shutil
import tarfile
import uuid
from pathlib import Path

from diffcse_jax.errors import DataError
from diffcse_jax.io import cache_folder, expand_path, hub_file

HUB_FILE = "senteval.tar"
DATA_SETS = ("STS", "SICK", "MR", "CR", "SUBJ", "MPQA", "SST", "TREC", "MRPC")  # folders of the suite
PLACES = ("senteval", "downstream", "senteval/downstream", "data/downstream", "SentEval/data/downstream")


def senteval_folder(data_dir: str) -> Path:
    """SentEval's `downstream` folder: the one named, else `$DIFFCSE_DATA_DIR/senteval`, else the hub's.

    Where the folder named is one that usually holds it, it is the one in there (`PLACES`).

    Raises:
        DataError: there is no such folder, or the hub cannot be reached.
    """
    if not is_local(data_dir):
        return hub_folder()
    folder = expand_path(data_dir) if data_dir else Path(os.environ["DIFFCSE_DATA_DIR"]) / "senteval"
    if not os.path.isdir(folder):
        raise DataError(f"no evaluation data: there is no folder {folder}")
    return next((place for place in (folder, *(folder / inner for inner in PLACES)) if _holds_data(place)), folder)


def _holds_data(folder: Path) -> bool:
    return any(os.path.isdir(folder / name) for name in DATA_SETS)


def is_local(data_dir: str) -> bool:
    """True if the suite is looked for on this machine, not on the hub."""
    return bool(data_dir) or "DIFFCSE_DATA_DIR" in os.environ


def hub_folder() -> Path:
    """The suite of the hub, extracted into the package's cache folder.

    Raises:
        DataError: it cannot be downloaded or extracted; the message says which files to put where instead.
    """
    archive = hub_file(
        HUB_FILE,
        "extract that file elsewhere and name the folder that holds STS, SICK, MR, ... with --data_dir (in a training "
        "run eval.data_dir), or put it, as `senteval`, into a folder and name that in DIFFCSE_DATA_DIR",
    )
    revision = archive.parent.name
    return downstream_folder(extracted(archive, cache_folder(f"senteval-{revision[:12]}")))


def extracted(archive: Path, folder: Path) -> Path:
    """The folder, with the archive's content; an earlier call's extraction is kept.

    Members that would end outside the folder, links out of it and device files are refused.

    Raises:
        DataError: the archive is damaged or holds refused members, or the folder cannot be written.
    """
    if folder.is_dir():
        return folder
    partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.tmp")
    try:
        partial.mkdir(parents=True)
        with tarfile.open(archive) as tar:
            tar.extractall(partial, filter="data")
        if not folder.is_dir():  # another process may have been faster
            partial.rename(folder)
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"cannot extract {archive} into {folder}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def downstream_folder(folder: Path) -> Path:
    """The folder with the data sets, the given one or one in it.

    Raises:
        DataError: there is none.
    """
    found = sorted(path.parent for path in folder.rglob("STS") if path.is_dir())
    if not found:
        raise DataError(f"{folder}: holds no SentEval data: no folder STS anywhere in it; delete it to download anew")
    return found[0]
