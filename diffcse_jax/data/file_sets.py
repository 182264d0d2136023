"""The files that a name stands for: a file itself, those that a pattern matches, those in and below a folder."""

import collections
import glob
import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from diffcse_jax.data.formats import EXTENSIONS, extension
from diffcse_jax.errors import DataError
from diffcse_jax.io import expand_path, why_unreadable

MARKDOWN = (".md", ".markdown")
PROSE = (".txt", *MARKDOWN)  # of several such files each is a document
PREPARED = "dataset_info.json"  # of an ArrayRecord data set


class FileSet(NamedTuple):
    """Files in the order of their names.

    Attributes:
        name: as it was given.
        root: the folder that they lie in or below.
        files: none of a folder that holds a prepared data set.
        is_file: it is a single file, named as such.
    """

    name: str
    root: Path
    files: tuple[Path, ...]
    is_file: bool

    def of_kinds(self, kinds: Collection[str]) -> "FileSet":
        """Those whose extension is one of these."""
        return self._replace(files=tuple(file for file in self.files if extension(file) in kinds))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Their extensions."""
        return tuple(dict.fromkeys(map(extension, self.files)))

    def of_one_kind(self) -> "FileSet":
        """The same files, whose extension is the same; the name tells how many there are.

        Raises:
            DataError: there are files of several extensions.
        """
        counts = collections.Counter(map(extension, self.files))
        told = ", ".join(f"{count:,} {kind or 'without extension'}" for kind, count in counts.items())
        if len(counts) > 1:
            raise DataError(
                f"{self.name}: files of several kinds ({told}); name those of one by a pattern, such as "
                f"'DIR/*{next(iter(counts))}'"
            )
        return self if self.is_file else self._replace(name=f"{self.name} ({told} file{'s' * (len(self.files) > 1)})")


def files_named(name: str) -> FileSet:
    """The files of sentences or documents that a name stands for.

    Args:
        name: a file; a folder: all of a known kind in and below it, without hidden ones; or a pattern with `*`, `?` or
            `[...]`, in which `**` stands for folders of any depth.

    Raises:
        DataError: there is no such file, or one that cannot be read.
    """
    path = expand_path(name)
    if os.path.isdir(path):
        files = tuple(_below(path))
        if any(file.name == PREPARED for file in files):
            files = ()
        if problem := next(filter(None, map(why_unreadable, files)), ""):
            raise DataError(problem)
        return FileSet(name, path, files, is_file=False)
    if os.path.exists(path) or not glob.has_magic(name):
        if problem := why_unreadable(path):
            raise DataError(problem)
        return FileSet(name, path.parent, (path,), is_file=True)
    found = sorted(glob.glob(os.path.expanduser(name), recursive=True))
    files = tuple(Path(file) for file in found if not os.path.isdir(file))
    if problem := next(filter(None, map(why_unreadable, files)), "" if files else f"no file matches {name}"):
        raise DataError(problem)
    return FileSet(name, Path(os.path.commonpath([file.parent for file in files])), files, is_file=False)


def _below(folder: Path) -> list[Path]:
    """The files of known kinds in and below a folder, those of linked folders included, each folder once.

    Raises:
        DataError: a folder that cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read the folder {error.filename}: {error.strerror}")

    found, seen = [], set[str]()
    for root, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(root)
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        if real in seen:  # by another link, or the folder itself
            continue
        seen.add(real)
        found += [Path(root, name) for name in names if not name.startswith(".")]
    return sorted(path for path in found if extension(path) in (*EXTENSIONS, *PROSE) and path.is_file())
