"""Find the files that a name stands for: a file, a folder, a pattern, `wiki1m` or `docstrings`.

Files that are found and not read are listed with the reason.
"""

import functools
import glob
import hashlib
import itertools
import mimetypes
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from diffcse_jax.documents.docstrings import docstring_fingerprint
from diffcse_jax.documents.files import formats
from diffcse_jax.documents.ledger import Ledger
from diffcse_jax.documents.tables import table as tables
from diffcse_jax.documents.tables.arrow import data_set_folders, is_of_data_set
from diffcse_jax.documents.text.lines import extension
from diffcse_jax.errors import DataError
from diffcse_jax.io import expand_path, has_index_manifest, hub_file, sha256, why_unreadable

WIKI1M, WIKI1M_FILE = "wiki1m", "wiki1m_for_simcse.txt"
DOCSTRINGS = "docstrings"
STDIN = "-"
LINES = (".txt", ".text")  # files of lines, or of documents between blank lines
KNOWN_NAMES = f"Known names: {WIKI1M}, {DOCSTRINGS}"
KNOWN_EXTENSIONS = tuple(dict.fromkeys((*tables.KINDS, *formats.KINDS)))
NOT_TEXT = ("image", "audio", "video", "font", "text/css", "text/javascript")  # kinds of media


class Skipped(NamedTuple):
    """A file or folder that was found and is not read."""

    name: str
    reason: str
    is_loss: bool = True  # it may hold text


class Source(NamedTuple):
    """What a name stands for."""

    name: str  # as it was given
    files: tuple[Path, ...] = ()  # those of known kinds, in the order of their names
    skipped: tuple[Skipped, ...] = ()  # the others
    is_file: bool = False  # the name is that of one file
    data_sets: tuple[Path, ...] = ()  # folders that are read as one table each
    folders: tuple[Path, ...] = ()  # that a pattern matches; their files are among `files`

    @property
    def is_docstrings(self) -> bool:
        return self.name == DOCSTRINGS

    @property
    def is_stdin(self) -> bool:
        return self.name == STDIN

    def of_kinds(self, kinds: Iterable[str]) -> list[Path]:
        """Return the files with one of these extensions."""
        wanted = set(kinds)
        return [file for file in self.files if extension(file) in wanted]

    def account(self, ledger: Ledger) -> None:
        """Enter the files that are not read in a ledger."""
        for name, reason, is_loss in self.skipped:
            ledger.skip_file(name, reason, is_loss=is_loss)


def find_source(name: str, option: str = "data.train_file") -> Source:
    """Find what a name stands for, or raise a `DataError` that names the option.

    It is a file; a folder; a pattern with `*`, `?`, `[...]` or `**` (folders of any depth), of
    which matching folders are read whole; `wiki1m` or `docstrings`; or `-`, standard input.
    """
    if name in (DOCSTRINGS, STDIN):
        return Source(name)
    if not name:
        raise DataError(f"{option} is empty. Name a file or a folder. {KNOWN_NAMES}")
    if name == WIKI1M:
        file = hub_file(WIKI1M_FILE, f"fetch it and set {option}=/path/{WIKI1M_FILE}")
        return Source(name, (file,), is_file=True)
    if is_pattern(name):
        return _matching(option, name)
    path = expand_path(name)
    if os.path.isdir(path):
        found, skipped = _files_below(path)
        return _checked(option, name, found, skipped)
    if problem := why_unreadable(path):
        raise DataError(f"{option}: {problem}. {KNOWN_NAMES}")
    return _checked(option, name, [path], is_file=True)


def is_pattern(name: str) -> bool:
    """Return whether a name is a pattern. The name of a file that exists is not."""
    return glob.has_magic(name) and not os.path.exists(expand_path(name))


def _matching(option: str, pattern: str) -> Source:
    """Return the source of a pattern: the files that it matches, and all in matching folders."""
    matches = _matches(os.path.expanduser(pattern))
    if not any(matches):
        raise DataError(
            f"{option}: nothing matches {pattern}. Check the pattern, and put it in quotes"
        )
    files = [*matches.files]
    skipped = [*matches.skipped]
    for folder in matches.folders:
        found, others = _files_below(folder)
        files += found
        skipped += others
    return _checked(option, pattern, files, skipped)._replace(folders=matches.folders)


def _checked(
    option: str,
    name: str,
    found: Sequence[Path],
    skipped: Sequence[Skipped] = (),
    *,
    is_file: bool = False,
) -> Source:
    """Return the source of these files. Raise `DataError` if none is of a known kind."""
    files, others = _once(found)
    data_sets = () if is_file else data_set_folders(files)
    collections = {file.parent for file in files if file.name.startswith("corpus.jsonl")}
    usable = []
    left = [*skipped, *others]
    for file in files:
        if any(folder in file.parents for folder in data_sets):
            if not is_of_data_set(file):
                other = Skipped(str(file), "beside the files of a data set")
                left.append(_why_skipped(file, collections, is_named=False) or other)
            continue
        reason = _why_skipped(file, collections, is_named=is_file)
        if reason is None:
            usable.append(file)
        else:
            left.append(reason)
    if not usable and not data_sets:
        ledger = Ledger(name)
        Source(name, skipped=tuple(left)).account(ledger)
        account = ledger.summary() or "none found"
        kinds = ", ".join(KNOWN_EXTENSIONS)
        raise DataError(f"{option}: {name}: no file of a known kind ({account}). Known: {kinds}")
    return Source(name, tuple(usable), tuple(left), is_file, data_sets)


class _Matches(NamedTuple):
    """What a pattern matches. No path lies below a folder of these."""

    files: Sequence[Path]
    folders: tuple[Path, ...]  # which are read with all that they hold
    skipped: Sequence[Skipped]  # folders of indexes, and links to folders


def _matches(pattern: str) -> _Matches:
    """Return the files and folders that a pattern matches, and what is not read among them."""
    parts = Path(pattern).parts
    # The folder in which the pattern begins.
    start = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), parts))
    is_index = functools.cache(has_index_manifest)
    files: list[Path] = []
    folders: dict[Path, None] = {}
    skipped: dict[Path, Skipped] = {}
    paths, linked = _expanded(pattern)
    read = {folder for path in paths for folder in path.parents}  # also links that it names
    links = [Skipped(str(path), "a link to a folder") for path in linked if path not in read]
    for path in paths:
        is_folder = path.is_dir()
        above = [each for each in path.parents if each == start or start in each.parents]
        if index := next(filter(is_index, [path, *above] if is_folder else above), None):
            skipped[index] = _index(index)
        elif is_folder:
            folders[path] = None
        else:
            files.append(path)
    if parts[-1] == "**" or parts[-2:] == ("**", "*"):  # it also matches what the folders hold
        return _Matches(files, (), [*skipped.values(), *links])
    files, outer = (
        [path for path in paths if folders.keys().isdisjoint(path.parents)]
        for paths in (files, folders)
    )
    return _Matches(files, tuple(sorted(outer)), [*skipped.values(), *links])


def _expanded(pattern: str) -> tuple[list[Path], list[Path]]:
    """Return what a pattern matches, and links to folders, which `**` does not stand for."""
    parts = Path(pattern).parts
    if "**" not in parts:
        return [*map(Path, glob.glob(pattern))], []
    place = parts.index("**")
    found: dict[Path, None] = {}
    links: dict[Path, None] = {}
    for start in glob.glob(str(Path(*parts[:place]))):
        for root, folders, names in os.walk(start):
            here = Path(root)
            seen = sorted(each for each in folders if each[0] != ".")
            folders[:] = [each for each in seen if not os.path.islink(here / each)]
            linked = {here / each for each in set(seen).difference(folders)}
            links |= dict.fromkeys(sorted(linked))
            if place + 1 == len(parts):
                found |= dict.fromkeys([here, *(here / each for each in names if each[0] != ".")])
                continue
            below, others = _expanded(str(Path(glob.escape(root), *parts[place + 1 :])))
            found |= dict.fromkeys(each for each in below if each not in linked)
            links |= dict.fromkeys(others)
    return [*found], [*links]


def _index(folder: Path) -> Skipped:
    return Skipped(str(folder), "an index of this program", is_loss=False)


def _files_below(folder: Path) -> tuple[list[Path], list[Skipped]]:
    """Return the files in a folder and the folders below it, and what is skipped there.

    Hidden files and indexes are skipped. Links to folders are not followed.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read the folder {error.filename}: {error.strerror}")

    found: list[Path] = []
    skipped: list[Skipped] = []
    for root, folders, names in os.walk(folder, onerror=refuse):
        here = Path(root)
        if has_index_manifest(here):
            skipped.append(_index(here))
            folders.clear()
            continue
        skipped += [Skipped(str(here / each), "hidden", False) for each in _hidden(folders, names)]
        links = [each for each in folders if os.path.islink(here / each) and each[0] != "."]
        skipped += [Skipped(str(here / each), "a link to a folder") for each in links]
        folders[:] = sorted(each for each in folders if each[0] != "." and each not in links)
        found += [here / each for each in names if each[0] != "."]
    return found, skipped


def _hidden(*names: Sequence[str]) -> Iterator[str]:
    return (name for each in names for name in each if name.startswith("."))


def _once(files: Iterable[Path]) -> tuple[list[Path], list[Skipped]]:
    """Return files in the order of their names, without links to files that are also there."""
    links_first = sorted(files, key=lambda file: (file.is_symlink(), file), reverse=True)
    kept: dict[str, Path] = {}
    skipped = []
    for file in links_first:
        target = os.path.realpath(file)
        if target in kept:
            skipped.append(Skipped(str(kept[target]), "another name of a file that is read", False))
        kept[target] = file
    return sorted(kept.values()), skipped


def _why_skipped(file: Path, collections: set[Path], *, is_named: bool) -> Skipped | None:
    """Return why a file is not read, or None. `collections` are folders with a `corpus.jsonl`."""
    name = str(file)
    is_queries = file.name.startswith("queries.jsonl") and file.parent in collections
    if is_queries or (file.parent.name == "qrels" and file.parent.parent in collections):
        return Skipped(name, "of queries and judgements", False)
    if extension(file) in tables.KINDS and file.name.startswith("_") and not is_named:
        return Skipped(name, "named _*, as other programs name their notes")
    if extension(file) in KNOWN_EXTENSIONS:
        problem = "" if is_named else why_unreadable(file)
        return Skipped(name, problem) if problem else None
    kind = mimetypes.guess_type(file.name)[0] or ""
    reason = f"of the kind {file.suffix}" if file.suffix else "without extension"
    return Skipped(name, reason, not kind.startswith(NOT_TEXT))


def fingerprint(source: Source, reading: Sequence[str] = ()) -> str:
    """Return the SHA-256 of the content of files in hexadecimal. Their names do not matter.

    Args:
        source: The files.
        reading: What the content does not say about how it is read, such as the columns that the
            user named.
    """
    if source.is_stdin:
        raise DataError("standard input can be read only once. Name a file")
    if source.is_docstrings:
        return docstring_fingerprint()
    files = list(source.files)
    for folder in source.data_sets:
        files += sorted(file for file in folder.rglob("*") if file.is_file())
    parts = [f"{extension(file)} {sha256([file])}" for file in files]
    content = "\n".join([*parts, *reading]).encode(errors="surrogateescape")
    return hashlib.sha256(content).hexdigest()
