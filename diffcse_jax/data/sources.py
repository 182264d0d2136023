"""Open the text that a user names: files, patterns, folders, `wiki1m`, `docstrings`, or text in memory.

`open_corpus` and `open_documents` read what `data.train_file` names. `open_text` reads the text of any other command,
so that all training text can also be encoded and searched.
"""

import collections
import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffcse_jax.config import DataConfig
from diffcse_jax.data import documents, readers
from diffcse_jax.data.docstrings import docstring_documents, docstring_sentences
from diffcse_jax.data.documents import Documents
from diffcse_jax.data.pair_builders import corpus_of, digest, is_in_share
from diffcse_jax.data.readers import Corpus, Entry, Fault, Place, Row, RowFile, extension, listed, open_file
from diffcse_jax.errors import DataError, NoSentencesError, counted
from diffcse_jax.io import cache_folder, disk_errors, expand_path, hub_file, sha256, why_unreadable, write_text

WIKI1M_FILE = "wiki1m_for_simcse.txt"
PREPARED = "dataset_info.json"  # a folder that contains it is a prepared ArrayRecord data set
KNOWN_EXTENSIONS = tuple(dict.fromkeys((*readers.EXTENSIONS, *documents.FORMATS)))
ROLES = ("sentence", "positive", "hard_negative")
SIMCSE_ROLES = ("sent0", "sent1", "hard_neg")
PASSAGE_TOKENS = 128  # approximate length of the passages into which `open_text` splits documents
EXPECTED = "Give strings; tuples of strings (sentence, positive, hard negatives); or dicts, whose keys are columns"

Text = str | Sequence[str] | Mapping[str, object]  # a sentence or document; a pair, triple, ...; columns by name


class Source(NamedTuple):
    """The text that a name stands for."""

    name: str  # as it was given
    form: str  # `file`, `files` (a folder or pattern), `docstrings`, or `records` (ArrayRecord)
    root: Path = Path()  # the folder that contains the files
    files: tuple[Path, ...] = ()  # the readable files, in the order of their names
    note: str = ""  # which files were skipped

    def of_kinds(self, kinds: Sequence[str]) -> list[Path]:
        """Return the files with one of these extensions, without those of other programs (`_metadata.json`)."""
        named = self.form == "file"
        return [file for file in self.files if extension(file) in kinds and (named or file.name[0] != "_")]


def open_corpus(data: DataConfig) -> Corpus:
    """Open the rows that `data.train_file` names, or the rows made of its documents."""
    source = find_source(data.train_file)
    rows_suffice = data.documents == "auto" and data.pairs == "dropout" and not data.held_out
    has_rows = {*map(extension, source.files)} <= {".csv", ".tsv"} and source.form != "docstrings"
    if data.reads_documents and not (rows_suffice and (has_rows or source.name == "wiki1m")):
        return corpus_of(_documents(source, data), data)
    return _rows(source, data.columns, "data.columns", data.on_bad_line)


def open_documents(data: DataConfig) -> Documents:
    """Open the documents that `data.train_file` names, including those that are held out."""
    return _documents(find_source(data.train_file), data)


def open_text(
    name: str | Path,
    option: str = "--input",
    *,
    columns: Sequence[str] = (),
    columns_option: str = "--columns",
    id_column: str = "",
    on_bad_line: str = "skip",
    titled: bool = False,
) -> Corpus:
    """Open any text that a user may name; see `find_source`.

    Documents (markdown, html, rst, pdf, folders of them, tables with `title` and `text`) become passages of about 100
    words. Other files keep their rows. Errors name `option` and `columns_option` (empty: there is no such option).

    Args:
        name: The name.
        option: The option that named it.
        columns: Columns to read. Empty: the only one, or those with known names.
        columns_option: The option that named the columns.
        id_column: A column that may also contain whole numbers.
        on_bad_line: `skip` or `error`.
        titled: Put the title of a section on a line above each of its passages.
    """
    source = find_source(str(name), option)
    if not columns and _reads_as_documents(source):
        pairs = "titled" if titled else "passages"
        data = DataConfig(str(name), pairs=pairs, max_length=PASSAGE_TOKENS, on_bad_line=on_bad_line)
        return corpus_of(_documents(source, data), data)
    return _rows(source, columns, columns_option, on_bad_line, id_column)


# Names


def find_source(name: str, option: str = "data.train_file") -> Source:
    """Find what a name stands for, or raise a `DataError` that names the option.

    It is a file; a folder; a pattern with `*`, `?` or `[...]`, in which `**` matches folders of any depth; `wiki1m` or
    `docstrings`.
    """
    known_kinds = ", ".join(KNOWN_EXTENSIONS)
    if name == "docstrings":
        return Source(name, "docstrings")
    if name == "wiki1m":
        path = hub_file(WIKI1M_FILE, f"fetch it and set {option}=/path/{WIKI1M_FILE}")
        return Source(name, "file", path.parent, (path,))
    if not name:
        raise DataError(f"{option} is empty. Name a file, a folder, wiki1m or docstrings")
    path = expand_path(name)
    is_pattern = glob.has_magic(name) and not os.path.exists(path)
    if not is_pattern and not os.path.isdir(path):
        if problem := why_unreadable(path):
            raise DataError(f"{option}: {problem}. Known names: wiki1m, docstrings")
        if extension(path) not in KNOWN_EXTENSIONS:
            raise DataError(f"{option}: {name} has an unknown extension. Known: {known_kinds}")
        return Source(name, "file", path.parent, (path,))
    matches = glob.glob(os.path.expanduser(name), recursive=True) if is_pattern else _paths_below(path, option)
    by_target = {os.path.realpath(each): Path(each) for each in sorted(matches, reverse=True)}  # links repeat files
    found = sorted(file for file in by_target.values() if not file.is_dir())
    if is_pattern and not found:
        raise DataError(f"{option}: no file matches {name}. Known names: wiki1m, docstrings")
    if not is_pattern and any(file.name == PREPARED for file in found):
        return Source(name, "records", path)
    root = Path(os.path.commonpath([file.parent for file in found])) if is_pattern else path
    notes = []
    collected = {file.parent for file in found if file.name.startswith("corpus.jsonl")}  # folders of search collections
    queries = {file for file in found if file.name.startswith("queries.jsonl") and file.parent in collected}
    judgements = {file for file in found if file.parent.name == "qrels" and file.parent.parent in collected}
    if left_out := queries | judgements:
        notes.append("skipped the queries and judgements of search collections")
        found = [file for file in found if file not in left_out]
    known = tuple(file for file in found if extension(file) in KNOWN_EXTENSIONS)
    if problem := next(filter(None, map(why_unreadable, known)), ""):
        raise DataError(f"{option}: {problem}")
    others = [file.suffix or "without extension" for file in found if extension(file) not in KNOWN_EXTENSIONS]
    if others:
        notes.append(f"skipped {counted(len(others), 'file{s} of other kinds')}: {_counts(others)}")
    if not known:
        raise DataError(
            f"{option}: {name} does not contain a file of a known kind, or a prepared ArrayRecord data set. "
            f"{f'It has: {_counts(others)}. ' if others else ''}Known: {known_kinds}"
        )
    return Source(name, "files", root, known, "; ".join(notes))


def _paths_below(folder: Path, option: str) -> list[str]:
    """Return the paths of all files in a folder and the folders below it, without hidden ones."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{option}: cannot read the folder {error.filename}: {error.strerror}")

    found, seen = [], set[str]()
    for root, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = [] if os.path.realpath(root) in seen else [each for each in folders if not each.startswith(".")]
        seen.add(os.path.realpath(root))
        found += [os.path.join(root, each) for each in names if not each.startswith(".")]
    return found


def _counts(kinds: Iterable[str]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in collections.Counter(kinds).most_common())


# Documents


def _reads_as_documents(source: Source) -> bool:
    """Return whether `open_text` reads passages: a document format, or a table with a text and other columns."""
    if source.form in ("docstrings", "records") or source.name == "wiki1m":
        return False
    if any(extension(file) not in readers.EXTENSIONS for file in source.files):
        return True
    if tables := source.of_kinds(readers.TABLES):
        columns = next(filter(None, (open_file(table, ("text",)).columns for table in tables)), ())
        return "text" in columns and len(columns) > 1
    return source.form == "files" and any(map(documents.has_blank_lines, source.files[:10]))


def _documents(source: Source, data: DataConfig) -> Documents:
    if source.form == "docstrings":
        return docstring_documents()
    is_text_file = source.form == "file" and extension(source.files[0]) == ".txt"
    if source.form == "records" or source.name == "wiki1m" or (data.documents == "blank_lines" and not is_text_file):
        kinds = "txt, markdown, html, rst or pdf files, tables with a column `text` (and `title`), or docstrings"
        needed = "a single txt file with blank lines" if data.documents == "blank_lines" else kinds
        raise DataError(
            f"{source.name}: data.documents={data.documents!r}, data.pairs={data.pairs!r} and data.held_out="
            f"{data.held_out} need documents: {needed}"
        )
    columns, has_tables = data.columns, bool(source.of_kinds(readers.TABLES))
    most_columns = 2 if has_tables else 0
    if len(columns) > most_columns:
        expected = "Name those of title and text" if has_tables else "Leave data.columns empty"
        raise DataError(f"{source.name}: data.columns names {len(columns)} columns. {expected}")
    if is_text_file:
        return documents.of_text_file(source.files[0], sentence_a_line=data.documents == "blank_lines")
    prose = [] if columns else [file for file in source.files if extension(file) in documents.FORMATS]
    tables, note = _open_files(source, readers.TABLES, columns or ("text",)), source.note
    if prose:  # next to prose, tables without texts are settings of other programs
        found, tables = len(tables), [table for table in tables if "text" in table.columns]
        skipped = f"skipped {counted(found - len(tables), 'table{s} without texts')}" if found > len(tables) else ""
        note = "; ".join(filter(None, [note, skipped]))
    else:
        advice = "Name the columns of title and text, or of the text alone (data.columns or --columns)"
        _check_columns(source, tables, columns or ("text",), advice)
    return documents.of_files(source.name, source.root, prose, tables, columns, note)


# Rows


def _rows(
    source: Source, wanted: Sequence[str], columns_option: str, on_bad_line: str, id_column: str = ""
) -> Corpus:  # fmt: skip
    name, paths = source.name, list[Path]()
    if source.form == "docstrings":
        files = [readers.single_column(Path(name), docstring_sentences)]
    elif source.form == "records":
        file, paths = readers.open_prepared(source.root)
        if not wanted and ROLES[0] in file.columns:  # texts without a role are left out
            names = column_names(len(ROLES) + len(file.columns))
            file = file._replace(columns=tuple(name for name in names if name in file.columns))
        files = [file]
    else:
        paths = source.of_kinds(readers.EXTENSIONS)
        if not paths:
            raise DataError(f"{name}: these files contain documents. Set data.pairs, for example to 'lead'")
        if len({*map(extension, paths)}) > 1:
            raise DataError(
                f"{name}: files of several kinds ({_counts(map(extension, paths))}). Name the files of one kind with a "
                f"pattern, such as '{source.root}/**/*{extension(paths[0])}'"
            )
        files = _open_files(source, readers.EXTENSIONS, wanted)
    advice = f"Name the columns in {columns_option}" if columns_option else "Give a file with one column"
    available = files[0].columns if files else ()
    columns = tuple(wanted) or _known_columns(available)
    if files and not columns:
        raise DataError(f"{name}: it has {len(available)} columns: {listed(available)}. {advice}")
    _check_columns(source, files, columns, advice)

    def records() -> Iterator[tuple[Place, Row | Fault]]:
        for file in files:
            at = f"{file.path.relative_to(source.root).as_posix()}, {file.unit} " if len(files) > 1 else ""
            for number, entry in file.entries(columns):
                yield f"{at}{number}" if at else number, _row(entry, columns, id_column)

    def fingerprint() -> str:
        parts = [f"{extension(path)} {sha256([path])}" for path in paths] or [text for (text,) in corpus]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    corpus = Corpus(name, columns, records, fingerprint, on_bad_line, unit=files[0].unit, note=source.note)
    return corpus


def _open_files(source: Source, kinds: Sequence[str], wanted: Sequence[str]) -> list[RowFile]:
    """Open the files of some kinds, without empty ones."""
    return [file for path in source.of_kinds(kinds) if (file := open_file(path, wanted)).columns]


def _check_columns(source: Source, files: Sequence[RowFile], columns: Sequence[str], advice: str) -> None:
    """Raise an error if there are no files, or if one of them lacks a column."""
    if not files:
        raise NoSentencesError(f"{source.name}: no JSON object found. A line has one object; json may also be a list")
    for file in files:
        if missing := [column for column in columns if column not in file.columns]:
            raise DataError(f"{file.path}: no column {missing[0]!r}. It has: {listed(file.columns)}. {advice}")


def _known_columns(available: Sequence[str]) -> tuple[str, ...]:
    """Return the only column, or those with known names in the order of their roles, or none."""
    by_role = (column_names(len(available), roles) for roles in (ROLES, SIMCSE_ROLES))
    known = (names for names in by_role if {*names} == {*available})
    return tuple(available) if len(available) == 1 else next(known, ())


def column_names(count: int, roles: Sequence[str] = ROLES) -> tuple[str, ...]:
    """Return names for columns: the roles, then `hard_negative_2`, `hard_negative_3`, ..."""
    return (*roles, *(f"{roles[-1]}_{number}" for number in range(2, count - 1)))[:count]


def _row(entry: Entry, columns: Sequence[str], id_column: str) -> Row | Fault:
    """Return the values of some columns. The `id_column` may also contain whole numbers."""
    if isinstance(entry, Fault):
        return entry
    if any(column not in entry for column in columns):
        return Fault.MISSING_KEY
    row = tuple(
        str(entry[column]) if column == id_column and type(entry[column]) is int else entry[column]
        for column in columns
    )
    if all(isinstance(value, str) for value in row):
        return row
    return Fault.EMPTY if None in row else Fault.NOT_STRING


# Text in memory, which is written to files from which a run trains and, after an interruption, resumes


def as_texts(given: Any) -> Iterable[Text]:
    """Return the texts of a list or another iterable, or the rows of a table (pandas, polars, pyarrow, datasets)."""
    if rows := getattr(given, "to_dicts", None) or getattr(given, "to_pylist", None):  # polars; pyarrow
        return rows()
    if hasattr(given, "columns") and hasattr(given, "to_dict"):  # pandas
        return given.to_dict("records")
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):  # a mapping has columns, or splits
        keys = f" with the keys {', '.join(map(str, [*given][:5]))}" if isinstance(given, Mapping) else ""
        raise DataError(f"cannot train on a {type(given).__name__}{keys}. {EXPECTED}")
    return given


def write_sentences(texts: Iterable[Text]) -> Path:
    """Write texts of one kind (see `as_texts`) to a jsonl file in the cache folder, whose name is a hash of them."""
    return _write((json.dumps(row, default=str) for row in _columns(texts)), ".jsonl")


def write_held_out(texts: Iterable[Text], share: float) -> tuple[Path, Path]:
    """Write pairs (or triples, ...) to two files: rows to train on, and pairs to evaluate with.

    A hash of the first text decides, so that all rows of an anchor stay together. Training rows that share a text with
    a held-out row are left out. Unusable rows stay with the training rows, where they are skipped and counted.

    Returns:
        A jsonl file as from `write_sentences`, and a tsv file with sentences and positives.
    """
    rows = [tuple(map(str, row.values())) for row in _columns(texts)]
    held_out = [row for row in rows if is_in_share(row[0], share) and not isinstance(readers.checked(row), Fault)]
    kept_out = {digest(text) for row in held_out for text in row}
    trained_on = [row for row in rows if kept_out.isdisjoint(map(digest, row))]
    if not trained_on or len(held_out) < 2:
        raise DataError(
            f"data.held_out={share} leaves {len(trained_on)} of {len(rows)} rows for training and {len(held_out)} for "
            "evaluation, which needs at least 2. Give more rows, or change data.held_out"
        )
    pairs = dict.fromkeys("\t".join(" ".join(text.split()) for text in row[:2]) for row in held_out)
    return write_sentences(trained_on), _write(pairs, ".tsv")


def _columns(texts: Iterable[Text]) -> Iterator[dict[str, object]]:
    """Yield the texts as dicts of their columns."""
    width = 0
    for number, text in enumerate(as_texts(texts), 1):
        if isinstance(text, str):
            row: dict[str, object] = {"text": text}
        elif isinstance(text, Mapping):
            row = {str(name): value for name, value in text.items()}
        elif isinstance(text, Sequence) and len(text) > 1 and all(isinstance(each, str) for each in text):
            row = dict(zip(column_names(len(text)), text, strict=True))
        else:
            raise DataError(f"text {number} is {text!r:.60}. {EXPECTED}")
        width = width or len(row)
        if len(row) != width:
            found = f"{counted(len(row), 'column{s}')} ({', '.join(row)})"
            raise DataError(f"text {number} has {found}, but the first text has {width}")
        yield row
    if not width:
        raise DataError("the list of texts to train on is empty")


def _write(lines: Iterable[str], extension: str) -> Path:
    """Write lines to a file that is named by their hash."""
    text = "".join(f"{line}\n" for line in lines)
    path = cache_folder("text") / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}{extension}"
    partial = path.with_name(f"{os.getpid()}-{path.name}")  # several processes may write the same text
    with disk_errors(path.parent, safe="Nothing was started.", instead="set XDG_CACHE_HOME to another folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(partial, text)
        return partial.replace(path)
