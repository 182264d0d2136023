"""Files that a machine fetches or makes once: the package's cache folder, and SimCSE's data set on the hub."""

import contextlib
import functools
import logging
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub

from diffcse_jax.data.lines import expanded
from diffcse_jax.errors import DataError

HUB_REPOSITORY = "princeton-nlp/datasets-for-simcse"


def cache_folder(name: str) -> Path:
    """`~/.cache/diffcse_jax/NAME`; $XDG_CACHE_HOME is obeyed. It need not exist."""
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "diffcse_jax" / name


@contextlib.contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, which takes its name if the block ends without an exception.

    `folder` never exists half-written. Where another process was faster, with the same content, its folder stays.
    """
    temporary = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def hub_file(name: str, instead: str) -> Path:
    """A file of SimCSE's data set, from the hub's cache or the hub.

    Args:
        name: the file.
        instead: advice for the user where it cannot be had.

    Raises:
        DataError: it cannot be had.
    """
    download = functools.partial(huggingface_hub.hf_hub_download, HUB_REPOSITORY, name, repo_type="dataset")
    try:
        return Path(download(local_files_only=True))
    except OSError:
        pass
    print(f"fetching {name} from the hub", file=sys.stderr)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every retry; the error below suffices
    try:
        return Path(download())
    except Exception as error:  # the hub client passes on whatever its transport raises
        raise DataError(
            f"{name} could not be downloaded ({type(error).__name__}) from "
            f"https://huggingface.co/datasets/{HUB_REPOSITORY}: {instead}"
        ) from error
