"""Find the files that a name stands for: a file, a folder, a pattern, `wiki1m` or `docstrings`.

Files that are found and not read are listed with the reason.
"""

import functools
import glob
import hashlib
import itertools
import mimetypes
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from diffcse_jax.documents.docstrings import docstring_fingerprint
from diffcse_jax.documents.files import formats
from diffcse_jax.documents.ledger import Ledger
from diffcse_jax.documents.tables import formats as tables
from diffcse_jax.documents.tables.arrow import data_set_folders, is_of_data_set
from diffcse_jax.documents.text.lines import extension
from diffcse_jax.errors import DataError
from diffcse_jax.io import expand_path, has_index_manifest, hub_file, sha256, why_unreadable

WIKI1M, WIKI1M_FILE = "wiki1m", "wiki1m_for_simcse.txt"
DOCSTRINGS = "docstrings"
STDIN = "-"
NOT_PATHS = (WIKI1M, DOCSTRINGS, STDIN)  # names with a meaning of their own
# Files of lines, or of documents between blank lines. In a folder, each is read as one document.
LINES = (".txt", ".text")
KNOWN_NAMES = f"Name a file, a folder, {DOCSTRINGS} or {WIKI1M}"
KNOWN_EXTENSIONS = (*tables.KINDS, *formats.KINDS)
_FOLLOWED = "(to read it, use --follow_links, or data.follow_links in training)"
LINK_TO_FOLDER = f"a link to a folder {_FOLLOWED}"
LINK_OUT = f"a link to a file outside the folder {_FOLLOWED}"
WITH_LINKS_OUT = f"a data set with links to files outside the folder {_FOLLOWED}"
NOT_TEXT = ("image", "audio", "video", "font", "text/css", "text/javascript")  # kinds of media


class Skipped(NamedTuple):
    """A file or folder that was found and is not read."""

    name: str
    reason: str
    is_loss: bool = True  # it may hold text


class Source(NamedTuple):
    """What a name stands for."""

    name: str  # as it was given
    # Those of known kinds, in the order of their names, with their extensions.
    files: Mapping[Path, str] = MappingProxyType({})
    skipped: tuple[Skipped, ...] = ()  # the others
    is_file: bool = False  # the name is that of one file
    is_docstrings: bool = False  # the name is `docstrings`
    is_stdin: bool = False  # the name is `-`, standard input
    data_sets: tuple[Path, ...] = ()  # folders that are read as one table each
    folders: tuple[Path, ...] = ()  # that a pattern matches; their files are among `files`

    @property
    def is_single(self) -> bool:
        """Return whether there is one file or data set to read."""
        return len(self.files) + len(self.data_sets) < 2


def enter_skipped(skipped: Iterable[Skipped], ledger: Ledger) -> None:
    """Enter files that are not read in a ledger."""
    for name, reason, is_loss in skipped:
        ledger.skip_file(name, reason, is_loss=is_loss)


def find_source(
    name: str, option: str = "data.train_file", *, follow_links: bool = False
) -> Source:
    """Find what a name stands for, or raise a `DataError` that names the option.

    Args:
        name: A file; a folder; a pattern with `*`, `?`, `[...]` or `**` (folders of any depth), of
            which matching folders are read whole; `wiki1m` or `docstrings`; or `-`, standard input.
        option: The option that named it, for errors.
        follow_links: Also read links in a folder that lead to other folders, or to files outside
            the folder. By default they are skipped.
    """
    if name in (DOCSTRINGS, STDIN):
        return Source(name, is_docstrings=name == DOCSTRINGS, is_stdin=name == STDIN)
    if not name:
        raise DataError(f"{option} is empty. {KNOWN_NAMES}")
    if name == WIKI1M:
        file = hub_file(WIKI1M_FILE, f"Fetch it and set {option}=/path/{WIKI1M_FILE}")
        return Source(name, {file: extension(file)}, is_file=True)
    if is_pattern(name):
        return _matching(option, name, follow_links)
    path = expand_path(name)
    if os.path.isdir(path):
        files, skipped = _files_below(path, follow_links)
        return _checked(option, name, files, skipped)
    if problem := why_unreadable(path):
        raise DataError(f"{option}: {problem}. {KNOWN_NAMES}")
    return _checked(option, name, [path], is_file=True)


def is_pattern(name: str) -> bool:
    """Return whether a name is a pattern. The name of a file that exists is not."""
    return glob.has_magic(name) and not os.path.exists(expand_path(name))


def _matching(option: str, pattern: str, follow_links: bool) -> Source:
    """Return the source of a pattern: the files that it matches, and all in matching folders."""
    matches = _matches(os.path.expanduser(pattern), follow_links)
    if not any(matches):
        raise DataError(
            f"{option}: nothing matches {pattern}. Check the pattern, and put it in quotes"
        )
    files = [*matches.files]
    skipped = [*matches.skipped]
    for folder in matches.folders:
        below, others = _files_below(folder, follow_links)
        files += below
        skipped += others
    return _checked(option, pattern, files, skipped)._replace(folders=matches.folders)


def _checked(
    option: str,
    name: str,
    paths: Sequence[Path],
    skipped: Sequence[Skipped] = (),
    *,
    is_file: bool = False,
) -> Source:
    """Return the source of these files. Raise `DataError` if none is of a known kind."""
    files, others = _once(paths)
    data_sets = () if is_file else data_set_folders(files)
    links = [Path(each.name) for each in skipped if each.reason == LINK_OUT]
    linked = [folder for folder in data_sets if any(folder in link.parents for link in links)]
    collections = {file.parent for file in files if file.name.startswith("corpus.jsonl")}
    usable: dict[Path, str] = {}
    left = [*skipped, *others, *(Skipped(str(folder), WITH_LINKS_OUT) for folder in linked)]
    for file in files:
        kind = extension(file)
        reason = _why_skipped(file, kind, collections, is_named=is_file)
        if data_sets and any(folder in file.parents for folder in data_sets):
            if not is_of_data_set(file):
                left.append(reason or Skipped(str(file), "beside the files of a data set"))
        elif reason is None:
            usable[file] = kind
        else:
            left.append(reason)
    data_sets = tuple(folder for folder in data_sets if folder not in linked)
    if not usable and not data_sets:
        ledger = Ledger(name)
        enter_skipped(left, ledger)
        account = ledger.summary() or "none found"
        kinds = ", ".join(KNOWN_EXTENSIONS)
        raise DataError(f"{option}: {name}: no file of a known kind ({account}). Known: {kinds}")
    return Source(name, usable, tuple(left), is_file, data_sets=data_sets)


class _Matches(NamedTuple):
    """What a pattern matches. No path lies below a folder of these."""

    files: Sequence[Path]
    folders: tuple[Path, ...]  # which are read with all that they hold
    skipped: Sequence[Skipped]  # folders of indexes, and links to folders


def _matches(pattern: str, follow_links: bool) -> _Matches:
    """Return the files and folders that a pattern matches, and what is not read among them."""
    parts = Path(pattern).parts
    # The folder in which the pattern begins.
    start = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), parts))
    is_index = functools.cache(has_index_manifest)
    files: list[Path] = []
    folders: dict[Path, None] = {}
    skipped: dict[Path, Skipped] = {}
    paths, linked = _expanded(pattern, follow_links)
    read = {folder for path in paths for folder in path.parents}  # also links that it names
    links = [Skipped(str(path), LINK_TO_FOLDER) for path in linked if path not in read]
    for path in paths:
        is_folder = os.path.isdir(path)
        above = [each for each in path.parents if each == start or start in each.parents]
        if index := next(filter(is_index, [path, *above] if is_folder else above), None):
            skipped[index] = _index(index)
        elif not follow_links and (link := _link_out([*reversed(above), path], start)):
            reason = LINK_TO_FOLDER if os.path.isdir(link) else LINK_OUT
            skipped[link] = Skipped(str(link), reason)
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


def _expanded(pattern: str, follow_links: bool) -> tuple[list[Path], list[Path]]:
    """Return what a pattern matches, and links to folders that `**` does not stand for."""
    parts = Path(pattern).parts
    if "**" not in parts:
        return [*map(Path, glob.glob(pattern))], []
    place = parts.index("**")
    matches: dict[Path, None] = {}
    links: dict[Path, None] = {}
    for start in glob.glob(str(Path(*parts[:place]))):
        for here, _, names, not_followed in _walk(Path(start), follow_links):
            links |= dict.fromkeys(not_followed)
            if place + 1 == len(parts):
                matches |= dict.fromkeys([here, *(here / each for each in names if each[0] != ".")])
                continue
            rest = str(Path(glob.escape(str(here)), *parts[place + 1 :]))
            below, others = _expanded(rest, follow_links)
            matches |= dict.fromkeys(each for each in below if each not in not_followed)
            links |= dict.fromkeys(others)
    return [*matches], [*links]


def _walk(
    top: Path, follow_links: bool, skipped: list[Skipped] | None = None
) -> Iterator[tuple[Path, list[str], list[str], list[Path]]]:
    """Yield a folder and those below it: its folders, files, and links that are not followed.

    A caller may remove folders. Hidden ones are left out, and so are links to a folder that was
    read. `skipped` receives the hidden folders and those that cannot be read.
    """
    skipped = [] if skipped is None else skipped
    visited = set()

    def note(error: OSError) -> None:
        skipped.append(Skipped(str(error.filename), f"unreadable: {error.strerror}"))

    for root, folders, names in os.walk(top, onerror=note, followlinks=follow_links):
        here = Path(root)
        visited.add(os.path.realpath(here))
        skipped += [Skipped(str(here / each), "hidden", False) for each in _hidden(folders)]
        shown = sorted(each for each in folders if each[0] != ".")
        links = [here / each for each in shown if os.path.islink(here / each)]
        if follow_links:
            links = [link for link in links if os.path.realpath(link) in visited]
        folders[:] = [each for each in shown if here / each not in links]
        yield here, folders, names, links


def _leaves(path: Path, folder: Path) -> bool:
    """Return whether a path is a link to something outside a folder."""
    if not os.path.islink(path):
        return False
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _link_out(paths: Iterable[Path], folder: Path) -> Path | None:
    """Return the first path that is a link to something outside a folder, if there is one."""
    return next((path for path in paths if _leaves(path, folder)), None)


def _index(folder: Path) -> Skipped:
    return Skipped(str(folder), "an index of this program", is_loss=False)


def _files_below(folder: Path, follow_links: bool) -> tuple[list[Path], list[Skipped]]:
    """Return the files in a folder and the folders below it, and what is skipped there."""
    files: list[Path] = []
    skipped: list[Skipped] = []
    for here, folders, names, links in _walk(folder, follow_links, skipped):
        if has_index_manifest(here):
            skipped.append(_index(here))
            folders.clear()
            continue
        skipped += [Skipped(str(link), LINK_TO_FOLDER) for link in links]
        skipped += [Skipped(str(here / each), "hidden", False) for each in _hidden(names)]
        for name in sorted(each for each in names if each[0] != "."):
            if not follow_links and _leaves(here / name, folder):
                skipped.append(Skipped(str(here / name), LINK_OUT))
            else:
                files.append(here / name)
    return files, skipped


def _hidden(names: Sequence[str]) -> Iterator[str]:
    return (name for name in names if name.startswith("."))


def _once(files: Iterable[Path]) -> tuple[list[Path], list[Skipped]]:
    """Return files in the order of their names, without links to files that are also there."""
    links_first = sorted(files, key=lambda file: (os.path.islink(file), file), reverse=True)
    kept: dict[str, Path] = {}
    skipped = []
    for file in links_first:
        target = os.path.realpath(file)
        if target in kept:
            skipped.append(Skipped(str(kept[target]), "another name of a file that is read", False))
        kept[target] = file
    return sorted(kept.values()), skipped


def _why_skipped(
    file: Path, kind: str, collections: set[Path], *, is_named: bool
) -> Skipped | None:
    """Return why a file is not read, or None. `collections` are folders with a `corpus.jsonl`."""
    name = str(file)
    is_queries = file.name.startswith("queries.jsonl") and file.parent in collections
    if is_queries or (file.parent.name == "qrels" and file.parent.parent in collections):
        return Skipped(name, "of queries and judgements", False)
    if kind in tables.KINDS and file.name.startswith("_") and not is_named:
        return Skipped(name, "named _*, as other programs name their notes")
    if kind in KNOWN_EXTENSIONS:
        problem = "" if is_named else why_unreadable(file)
        return Skipped(name, problem) if problem else None
    medium = mimetypes.guess_type(file.name)[0] or ""
    reason = f"of the kind {file.suffix}" if file.suffix else "without extension"
    return Skipped(name, reason, not medium.startswith(NOT_TEXT))


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
    files = dict(source.files)
    for folder in source.data_sets:
        members = sorted(file for file in folder.rglob("*") if file.is_file())
        files |= {file: extension(file) for file in members}
    parts = [f"{kind} {sha256([file])}" for file, kind in files.items()]
    content = "\n".join([*parts, *reading]).encode(errors="surrogateescape")
    return hashlib.sha256(content).hexdigest()
