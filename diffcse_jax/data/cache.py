"""Files that a machine fetches or makes once: the package's cache folder, and SimCSE's data set on the hub."""

import functools
import logging
import os
import sys
from pathlib import Path

import huggingface_hub

from diffcse_jax.data.lines import expanded
from diffcse_jax.errors import DataError

HUB_REPOSITORY = "princeton-nlp/datasets-for-simcse"


def cache_folder(name: str) -> Path:
    """`~/.cache/diffcse_jax/NAME`; $XDG_CACHE_HOME is obeyed. It need not exist."""
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "diffcse_jax" / name


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
