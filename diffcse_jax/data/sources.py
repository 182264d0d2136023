"""Open the text that a user names: files, patterns, folders, `wiki1m` or `docstrings`.

`open_corpus` and `open_documents` read what `data.train_file` names. `open_text` reads the text of any other command,
so that whatever trains can also be encoded and searched.
"""

import bisect
import collections
import contextlib
import difflib
import functools
import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from diffcse_jax.config import DataConfig
from diffcse_jax.data import documents
from diffcse_jax.data.corpus import ROLES, TRAINING_OPTIONS, Corpus, Fault, OptionNames, Row, column_names, listed
from diffcse_jax.data.documents import Documents
from diffcse_jax.data.pair_builders import corpus_of
from diffcse_jax.data.readers import EXTENSIONS, TABLES, RowFile, extension, file_sha256, open_file
from diffcse_jax.errors import DataError, NoSentencesError
from diffcse_jax.io import expand_path, hub_file, why_unreadable

WIKI1M_FILE = "wiki1m_for_simcse.txt"
PREPARED = "dataset_info.json"  # a folder that contains it is a prepared ArrayRecord data set
KNOWN_ROLES = (ROLES, ("sent0", "sent1", "hard_neg"))  # ours, and SimCSE's
KNOWN_EXTENSIONS = tuple(dict.fromkeys((*EXTENSIONS, *documents.FORMATS)))
PASSAGE_TOKENS = 128  # approximate length of the passages that `open_text` makes of documents


class Source(NamedTuple):
    """What a name stands for.

    Attributes:
        name: The name as it was given.
        root: The folder that contains the files.
        files: The readable files, in the order of their names.
        form: `file`, `files` (a folder or pattern), `docstrings`, or `records` (ArrayRecord).
        note: Which files were skipped.
    """

    name: str
    root: Path
    files: tuple[Path, ...]
    form: str
    note: str = ""

    def of_kinds(self, kinds: Sequence[str]) -> tuple[Path, ...]:
        """Return the files with one of these extensions, without those of other programs (`_metadata.json`)."""
        named = self.form == "file"
        return tuple(file for file in self.files if extension(file) in kinds and (named or file.name[0] != "_"))


def open_corpus(data: DataConfig) -> Corpus:
    """Open the rows that `data.train_file` names, or the rows made of its documents.

    Raises:
        DataError: The source is missing, unreadable, of an unknown kind or without the columns or documents that the
            options ask for.
    """
    names = TRAINING_OPTIONS
    source = find_source(data.train_file, names)
    if data.reads_documents:
        reason = _why_no_documents(source, data)
        if not reason:
            return corpus_of(_documents(source, data, names), data)
        if data.documents == "blank_lines":
            raise DataError(
                f"{source.name}: {reason}. data.documents='blank_lines' is for a txt file with one sentence per line. "
                "Use such a file, or set data.documents='auto'"
            )
        if data.pairs != "dropout" or data.held_out:
            raise DataError(f"{source.name}: {reason}. {_what_asks(data)} needs documents: {documents.KNOWN}")
    return _rows(source, data.columns, data.on_bad_line, names)


def open_documents(data: DataConfig) -> Documents:
    """Open the documents that `data.train_file` names, including those that are held out.

    Raises:
        DataError: The source cannot be read or does not contain documents.
    """
    names = TRAINING_OPTIONS
    source = find_source(data.train_file, names)
    if reason := _why_no_documents(source, data):
        raise DataError(f"{source.name}: {reason}. {_what_asks(data)} needs documents: {documents.KNOWN}")
    return _documents(source, data, names)


def open_text(
    name: str | Path,
    option: str = "--input",
    *,
    columns: Sequence[str] = (),
    columns_option: str = "--columns",
    id_column: str = "",
    on_bad_line: str = "skip",
) -> Corpus:
    """Open any text that a user may name.

    Documents (markdown, html, rst, pdf, folders of them, tables with `title` and `text`) become passages of about 100
    words. Other files keep their rows.

    Args:
        name: A file, a pattern, a folder, `wiki1m` or `docstrings`.
        option: The option that named it, for errors.
        columns: Columns to read. Empty: the only one, or those with known names.
        columns_option: The option that named the columns, for errors. Empty: there is no such option.
        id_column: One of the columns, which may also contain whole numbers.
        on_bad_line: `skip` or `error`.

    Raises:
        DataError: The source is missing, unreadable, of an unknown kind or lacks a column.
    """
    names = OptionNames(option, columns_option, "")
    source = find_source(str(name), names)
    if not columns and _reads_as_documents(source):
        data = DataConfig(str(name), pairs="passages", max_length=PASSAGE_TOKENS, on_bad_line=on_bad_line)
        return corpus_of(_documents(source, data, names), data)
    return _rows(source, columns, on_bad_line, names, id_column)


def find_source(name: str, names: OptionNames = TRAINING_OPTIONS) -> Source:
    """Find what a name stands for.

    Args:
        name: A file; a folder; a pattern with `*`, `?` or `[...]`, in which `**` matches folders of any depth; `wiki1m`
            or `docstrings`.
        names: Options for errors.

    Raises:
        DataError: There is no such file, or it cannot be read.
    """
    if name == "docstrings":
        return Source(name, Path(), (), "docstrings")
    if name == "wiki1m":
        path = hub_file(WIKI1M_FILE, f"fetch it and set {names.file}=/path/{WIKI1M_FILE}")
        return Source(name, path.parent, (path,), "file")
    if not name:
        raise DataError(f"{names.file} is empty. Name a file, a folder, wiki1m or docstrings")
    path = expand_path(name)
    if os.path.isdir(path):
        found = _files_below(path)
        if any(file.name == PREPARED for file in found):
            return Source(name, path, (), "records")
        return _of_files(name, path, found, names)
    if os.path.exists(path) or not glob.has_magic(name):
        if problem := why_unreadable(path):
            advice = "" if os.path.exists(path) else f"{_nearest(path)}. Known names: wiki1m, docstrings"
            if " " in name and not advice.startswith(" (") and not path.suffix:
                advice = ". To use sentences themselves from Python, give a list of strings"
            raise DataError(f"{names.file}: {problem}{advice}")
        if extension(path) not in KNOWN_EXTENSIONS:
            raise DataError(f"{names.file}: {name} has an unknown extension. Known: {', '.join(KNOWN_EXTENSIONS)}")
        return Source(name, path.parent, (path,), "file")
    matches = sorted(glob.glob(os.path.expanduser(name), recursive=True))
    found = [Path(match) for match in matches if not os.path.isdir(match)]
    if not found:
        raise DataError(f"{names.file}: no file matches {name}. Known names: wiki1m, docstrings")
    return _of_files(name, Path(os.path.commonpath([file.parent for file in found])), found, names)


def _of_files(name: str, root: Path, found: Sequence[Path], names: OptionNames) -> Source:
    known = [file for file in found if extension(file) in KNOWN_EXTENSIONS]
    if problem := next(filter(None, map(why_unreadable, known)), ""):
        raise DataError(f"{names.file}: {problem}")
    others = collections.Counter(file.suffix or "without extension" for file in found if file not in {*known})
    if not known:
        has = f"It has: {_counts(others)}. " if others else ""
        raise DataError(
            f"{names.file}: {name} does not contain a file of a known kind, or a prepared ArrayRecord data set. {has}"
            f"Known: {', '.join(KNOWN_EXTENSIONS)}"
        )
    total = others.total()
    note = f"skipped {total:,} file{'s' * (total > 1)} of other kinds: {_counts(others)}" if others else ""
    return Source(name, root, tuple(known), "files", note)


def _files_below(folder: Path) -> list[Path]:
    """Return the files in and below a folder, except hidden ones. Linked folders are followed once."""

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read the folder {error.filename}: {error.strerror}")

    found, seen = [], set[str]()
    for root, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(root)
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        if real not in seen:
            found += [Path(root, name) for name in names if not name.startswith(".")]
        seen.add(real)
    return sorted(path for path in found if path.is_file())


def _nearest(path: Path) -> str:
    readable = os.path.isdir(path.parent) and os.access(path.parent, os.R_OK)
    near = difflib.get_close_matches(path.name, os.listdir(path.parent) if readable else [], n=1)
    return f" (did you mean {path.with_name(near[0])}?)" if near else ""


def _counts(extensions: collections.Counter[str]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in extensions.most_common())


# Documents


def _why_no_documents(source: Source, data: DataConfig) -> str:
    """Return why the source does not contain documents in the form of `data.documents`, or an empty string."""
    blank_lines = data.documents == "blank_lines"
    if source.name == "wiki1m":
        return "its sentences are in no order"
    if source.form == "docstrings":
        return "docstrings are not lines of sentences" if blank_lines else ""
    if source.form == "records":
        return "ArrayRecord data sets contain rows, not documents"
    if blank_lines:
        is_lines = source.form == "file" and extension(source.files[0]) == ".txt"
        return "" if is_lines else "only a single txt file can have blank lines between documents"
    kinds = [extension(file) for file in source.files]
    rows_only = data.pairs == "dropout" and not data.held_out and {*kinds} <= {".csv", ".tsv"}
    return "csv and tsv files contain rows" if rows_only else ""


def _what_asks(data: DataConfig) -> str:
    return "data.held_out" if data.held_out else f"data.pairs={data.pairs!r}"


def _reads_as_documents(source: Source) -> bool:
    """Tell whether `open_text` reads passages: a document format, or a table with a text and other columns."""
    if source.form in ("docstrings", "records") or source.name == "wiki1m":
        return False
    if any(extension(file) not in EXTENSIONS for file in source.files):
        return True
    tables = source.of_kinds(TABLES)
    if tables:
        columns = _first_columns(tables)
        return "text" in columns and len(columns) > 1
    return source.form == "files" and any(map(documents.has_blank_lines, source.files[:10]))


def _first_columns(files: Sequence[Path]) -> Sequence[str]:
    for file in files:
        with contextlib.suppress(NoSentencesError):
            return open_file(file, ("text",)).columns
    return ()


def _documents(source: Source, data: DataConfig, names: OptionNames) -> Documents:
    if source.form == "docstrings":
        if data.columns:
            raise DataError(f"docstrings do not have columns. Leave {names.columns} empty")
        return documents.of_docstrings()
    prose = () if data.columns else tuple(file for file in source.files if extension(file) in documents.FORMATS)
    tables = source.of_kinds(TABLES)
    if data.columns and not tables:
        raise DataError(f"{source.name}: documents of files do not have columns. Leave {names.columns} empty")
    if source.form == "file" and extension(source.files[0]) == ".txt":
        return documents.of_text_file(source.files[0], sentence_a_line=data.documents == "blank_lines")
    opened: list[RowFile] = []
    for file in tables:
        with contextlib.suppress(NoSentencesError):
            # Next to prose, tables without texts are settings of other programs.
            opened += filter(None, [documents.open_table(file, data.columns, names, strict=not prose)])
    if not prose and not opened:
        raise NoSentencesError(f"{source.name}: the files are empty")
    others = len(tables) - len(opened) if prose else 0
    skipped = f"skipped {others:,} table{'s' * (others > 1)} without texts" if others else ""
    note = "; ".join(filter(None, [source.note, skipped]))
    return documents.of_files(source.name, source.root, prose, opened, data.columns, note)


# Rows


def _rows(
    source: Source, wanted: Sequence[str], on_bad_line: str, names: OptionNames, id_column: str = ""
) -> Corpus:  # fmt: skip
    """Open the rows of a source, numbered over all of its files."""
    if source.form == "docstrings":
        return _docstring_rows(wanted, on_bad_line, names)
    if source.form == "records":
        from diffcse_jax.data.array_record import open_prepared  # loads tensorflow-datasets

        available, usual, read, shards = open_prepared(source.root)
        columns = _choose_columns(source.name, available, wanted or usual, names)
        fingerprint = functools.partial(_fingerprint, shards)
        return Corpus(source.name, columns, lambda: read(columns), fingerprint, on_bad_line, names=names)
    files = source.of_kinds(EXTENSIONS)
    kinds = collections.Counter(map(extension, files))
    name = source.name if source.form == "file" else f"{source.name} ({_counts(kinds)} file{'s' * (len(files) > 1)})"
    if not files:
        raise DataError(f"{source.name}: these files contain documents. Set data.pairs, for example to 'lead'")
    if len(kinds) > 1:
        raise DataError(
            f"{name}: files of several kinds. Name the files of one kind with a pattern, such as "
            f"'{source.root}/**/*{next(iter(kinds))}'"
        )
    opened: list[RowFile] = []
    for path in files:
        with contextlib.nullcontext() if source.form == "file" else contextlib.suppress(NoSentencesError):
            opened.append(open_file(path, wanted, names))
    if not opened:
        raise NoSentencesError(f"{name}: the files are empty")
    columns = _choose_columns(str(opened[0].path), opened[0].columns, wanted, names)
    for file in opened:
        if missing := [column for column in columns if column not in file.columns]:
            raise DataError(
                f"{file.path}: no column {missing[0]!r}, unlike {opened[0].path.name}. It has: {listed(file.columns)}"
            )
    starts: list[int] = []

    def records() -> Iterator[tuple[int, Row | Fault]]:
        starts.clear()
        last = 0
        for file in opened:
            starts.append(last)
            for number, row in file.rows(columns, id_column):
                last = starts[-1] + number
                yield last, row

    def where(place: int) -> str:
        index = bisect.bisect_left(starts, place) - 1
        return f"{opened[index].path}, {opened[index].unit} {place - starts[index]}"

    fingerprint = functools.partial(_fingerprint, [file.path for file in opened])
    unit = opened[0].unit
    return Corpus(
        name, columns, records, fingerprint, on_bad_line, unit=unit, where=where, note=source.note, names=names
    )


def _docstring_rows(wanted: Sequence[str], on_bad_line: str, names: OptionNames) -> Corpus:
    from diffcse_jax.data.docstrings import docstring_sentences

    if wanted:
        raise DataError(f"docstrings do not have columns. Leave {names.columns} empty")
    return Corpus(
        "docstrings",
        ("sentence",),
        lambda: ((number, (sentence,)) for number, sentence in enumerate(docstring_sentences(), 1)),
        lambda: hashlib.sha256("\n".join(docstring_sentences()).encode()).hexdigest(),
        on_bad_line,
        names=names,
    )


def _choose_columns(
    name: str, available: Sequence[str], wanted: Sequence[str], names: OptionNames
) -> tuple[str, ...]:  # fmt: skip
    """Return the wanted columns or, without any, the only one or those whose names tell their roles."""
    if not available:
        raise DataError(f"{name}: the first row does not name any column")
    if missing := [column for column in wanted if column not in available]:
        raise DataError(f"{name}: no column {missing[0]!r} ({names.columns}). It has: {listed(available)}")
    if wanted or len(available) == 1:
        return tuple(wanted or available)
    for roles in KNOWN_ROLES:
        if {*available} == {*(columns := column_names(len(available), roles))}:
            return columns
    if not names.columns:
        raise DataError(f"{name}: it has {len(available)} columns ({listed(available)}). Give a file with one column")
    example = (
        f"--config.data.columns=\"('{available[-1]:.100}',)\"" if names == TRAINING_OPTIONS else available[-1][:100]
    )
    raise DataError(
        f"{name}: name one or more of its {len(available)} columns in {names.columns}: {listed(available)} "
        f"(for example {example})"
    )


def _fingerprint(files: Sequence[Path]) -> str:
    """Return the SHA-256 of the files' content and kinds."""
    parts = [f"{extension(file)} {file_sha256(file)}" for file in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
