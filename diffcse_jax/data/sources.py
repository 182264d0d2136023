"""Open the text that a user names: files, patterns, folders, `wiki1m`, `docstrings`, or text in memory.

`open_corpus` and `open_documents` read what `data.train_file` names. `open_text` reads the text of any other command,
so that all training text can also be encoded and searched.
"""

import collections
import contextlib
import difflib
import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffcse_jax.config import DataConfig
from diffcse_jax.data import array_record, documents, readers
from diffcse_jax.data.docstrings import docstring_documents, docstring_sentences
from diffcse_jax.data.documents import Documents
from diffcse_jax.data.pair_builders import corpus_of, digest, is_in_share
from diffcse_jax.data.readers import Corpus, Fault, OptionNames, RowFile, extension, listed, open_file
from diffcse_jax.errors import DataError, NoSentencesError, counted
from diffcse_jax.io import cache_folder, disk_errors, expand_path, hub_file, sha256, why_unreadable, write_text

WIKI1M_FILE = "wiki1m_for_simcse.txt"
PREPARED = "dataset_info.json"  # a folder that contains it is a prepared ArrayRecord data set
KNOWN_EXTENSIONS = tuple(dict.fromkeys((*readers.EXTENSIONS, *documents.FORMATS)))
EXPECTED = "Give strings; tuples of strings (sentence, positive, hard negatives); or dicts, whose keys are columns"
PASSAGE_TOKENS = 128  # approximate length of the passages into which `open_text` splits documents

Text = str | Sequence[str] | Mapping[str, object]  # a sentence or document; a pair, triple, ...; columns by name


class Source(NamedTuple):
    """The text that a name stands for."""

    name: str  # as it was given
    root: Path  # the folder that contains the files
    files: tuple[Path, ...]  # the readable files, in the order of their names
    form: str  # `file`, `files` (a folder or pattern), `docstrings`, or `records` (ArrayRecord)
    note: str = ""  # which files were skipped

    def of_kinds(self, kinds: Sequence[str]) -> tuple[Path, ...]:
        """Return the files with one of these extensions, without those of other programs (`_metadata.json`)."""
        named = self.form == "file"
        return tuple(file for file in self.files if extension(file) in kinds and (named or file.name[0] != "_"))


def open_corpus(data: DataConfig) -> Corpus:
    """Open the rows that `data.train_file` names, or the rows made of its documents."""
    source = find_source(data.train_file)
    rows_suffice = data.documents == "auto" and data.pairs == "dropout" and not data.held_out
    if data.reads_documents and not (rows_suffice and _why_no_documents(source, data)):
        return corpus_of(_documents(source, data), data)
    return _rows(source, data.columns, data.on_bad_line)


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
    names = OptionNames(option, columns_option, "")
    source = find_source(str(name), names)
    if not columns and _reads_as_documents(source):
        pairs = "titled" if titled else "passages"
        data = DataConfig(str(name), pairs=pairs, max_length=PASSAGE_TOKENS, on_bad_line=on_bad_line)
        return corpus_of(_documents(source, data, names), data)
    return _rows(source, columns, on_bad_line, names, id_column)


def find_source(name: str, names: OptionNames = readers.TRAINING_OPTIONS) -> Source:
    """Find what a name stands for, or raise a `DataError`.

    It is a file; a folder; a pattern with `*`, `?` or `[...]`, in which `**` matches folders of any depth; `wiki1m` or
    `docstrings`.
    """
    option, known_kinds = names.file, ", ".join(KNOWN_EXTENSIONS)
    if name == "docstrings":
        return Source(name, Path(), (), "docstrings")
    if name == "wiki1m":
        path = hub_file(WIKI1M_FILE, f"fetch it and set {option}=/path/{WIKI1M_FILE}")
        return Source(name, path.parent, (path,), "file")
    if not name:
        raise DataError(f"{option} is empty. Name a file, a folder, wiki1m or docstrings")
    path = root = expand_path(name)
    is_pattern = glob.has_magic(name) and not os.path.exists(path)
    if not is_pattern and not os.path.isdir(path):
        if problem := why_unreadable(path):
            raise DataError(f"{option}: {problem}{'' if os.path.exists(path) else _advice(name, path)}")
        if extension(path) not in KNOWN_EXTENSIONS:
            raise DataError(f"{option}: {name} has an unknown extension. Known: {known_kinds}")
        return Source(name, path.parent, (path,), "file")
    matches = glob.glob(os.path.expanduser(name), recursive=True) if is_pattern else _paths_below(path, option)
    matches = sorted(matches, reverse=True)
    files = {os.path.realpath(match): Path(match) for match in matches}  # a link to a folder above repeats files
    found = sorted(file for file in files.values() if not file.is_dir())
    if is_pattern and not found:
        raise DataError(f"{option}: no file matches {name}. Known names: wiki1m, docstrings")
    if is_pattern:
        root = Path(os.path.commonpath([file.parent for file in found]))
    elif any(file.name == PREPARED for file in found):
        return Source(name, path, (), "records")
    corpora = {file.parent for file in found if file.name.startswith("corpus.jsonl")}  # of search collections
    judged = {file for file in found if file.parent in corpora and file.name.startswith("queries.jsonl")}
    judged |= {file for file in found if file.parent.name == "qrels" and file.parent.parent in corpora}
    found = [file for file in found if file not in judged]
    known = tuple(file for file in found if extension(file) in KNOWN_EXTENSIONS)
    if problem := next(filter(None, map(why_unreadable, known)), ""):
        raise DataError(f"{option}: {problem}")
    others = [file.suffix or "without extension" for file in found if extension(file) not in KNOWN_EXTENSIONS]
    if not known:
        raise DataError(
            f"{option}: {name} does not contain a file of a known kind, or a prepared ArrayRecord data set. "
            f"{f'It has: {_counts(others)}. ' if others else ''}Known: {known_kinds}"
        )
    notes = ["skipped the queries and judgements of search collections"] if judged else []
    notes += [f"skipped {counted(len(others), 'file{s} of other kinds')}: {_counts(others)}"] if others else []
    return Source(name, root, known, "files", "; ".join(notes))


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


def _advice(name: str, path: Path) -> str:
    """Return advice for a name that is not the name of a file."""
    near: list[str] = []
    with contextlib.suppress(OSError, ValueError):  # the folder cannot be read either
        near = difflib.get_close_matches(path.name, os.listdir(path.parent), n=1)
    if not near and " " in name and not path.suffix:
        return ". To use sentences themselves from Python, give a list of strings"
    return (f" (did you mean {path.with_name(near[0])}?)" if near else "") + ". Known names: wiki1m, docstrings"


def _counts(kinds: Iterable[str]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in collections.Counter(kinds).most_common())


# Documents


def _why_no_documents(source: Source, data: DataConfig) -> str:
    """Return why the source does not contain documents in the form of `data.documents`, or an empty string."""
    kinds = {*map(extension, source.files)}
    if source.name == "wiki1m":
        return "its sentences are in no order"
    if data.documents == "blank_lines" and (source.form, kinds) != ("file", {".txt"}):
        return "only a single txt file can have blank lines between documents"
    if source.form == "records":
        return "ArrayRecord data sets contain rows, not documents"
    rows_only = data.pairs == "dropout" and not data.held_out and source.files and kinds <= {".csv", ".tsv"}
    return "csv and tsv files contain rows" if rows_only else ""


def _reads_as_documents(source: Source) -> bool:
    """Return whether `open_text` reads passages: a document format, or a table with a text and other columns."""
    if source.form in ("docstrings", "records") or source.name == "wiki1m":
        return False
    if any(extension(file) not in readers.EXTENSIONS for file in source.files):
        return True
    tables = source.of_kinds(readers.TABLES)
    for table in tables:
        with contextlib.suppress(NoSentencesError):
            columns = open_file(table, ("text",)).columns
            return "text" in columns and len(columns) > 1
    return not tables and source.form == "files" and any(map(documents.has_blank_lines, source.files[:10]))


def _documents(source: Source, data: DataConfig, names: OptionNames = readers.TRAINING_OPTIONS) -> Documents:
    columns, tables = data.columns, source.of_kinds(readers.TABLES)
    if reason := _why_no_documents(source, data):
        wish = f"data.documents={data.documents!r}, data.pairs={data.pairs!r} and data.held_out={data.held_out}"
        raise DataError(
            f"{source.name}: {reason}. {wish} need documents: txt, markdown, html, rst or pdf files, tables with a "
            "column `text` (and `title`), or docstrings"
        )
    if len(columns) > (2 if tables else 0):
        expected = f"Name those of title and text in {names.columns}" if tables else f"Leave {names.columns} empty"
        raise DataError(f"{source.name}: {len(columns)} columns are named. {expected}")
    if source.form == "docstrings":
        return docstring_documents()
    if source.form == "file" and extension(source.files[0]) == ".txt":
        return documents.of_text_file(source.files[0], sentence_a_line=data.documents == "blank_lines")
    prose = () if columns else tuple(file for file in source.files if extension(file) in documents.FORMATS)
    opened: list[RowFile] = []
    for path in tables:
        with contextlib.suppress(NoSentencesError):
            file = open_file(path, columns or documents.TITLE_AND_TEXT)
            missing = [column for column in columns or ("text",) if column not in file.columns]
            if not missing:
                opened.append(file)
            elif not prose:  # next to prose, tables without texts are settings of other programs
                raise DataError(
                    f"{path}: no column {missing[0]!r}. It has: {listed(file.columns)}. Name the columns of title and "
                    f"text, or of the text alone, in {names.columns}"
                )
    if not prose and not opened:
        raise NoSentencesError(f"{source.name}: the files are empty")
    others = len(tables) - len(opened) if prose else 0
    skipped = f"skipped {counted(others, 'table{s} without texts')}" if others else ""
    note = "; ".join(filter(None, [source.note, skipped]))
    return documents.of_files(source.name, source.root, prose, opened, columns, note)


# Rows


def _rows(
    source: Source,
    wanted: Sequence[str],
    on_bad_line: str,
    names: OptionNames = readers.TRAINING_OPTIONS,
    id_column: str = "",
) -> Corpus:
    """Open the rows of a source."""
    name, files, paths = source.name, list[RowFile](), list[Path]()
    if source.form == "docstrings":
        files = [readers.single_column(Path(name), docstring_sentences)]
    elif source.form == "records":
        file, paths = array_record.open_prepared(source.root, wanted)
        files = [file]
    else:
        paths = [*source.of_kinds(readers.EXTENSIONS)]
        if not paths:
            raise DataError(f"{name}: these files contain documents. Set data.pairs, for example to 'lead'")
        name += f" ({_counts(map(extension, paths))} file{'s' * (len(paths) > 1)})" if source.form == "files" else ""
        if len({*map(extension, paths)}) > 1:
            raise DataError(
                f"{name}: files of several kinds. Name the files of one kind with a pattern, such as "
                f"'{source.root}/**/*{extension(paths[0])}'"
            )
        for path in paths:
            try:
                files.append(open_file(path, wanted))
            except NoSentencesError as error:
                empty = error
        if not files:
            raise empty
    columns = _choose_columns(str(files[0].path), files[0].columns, wanted, names)
    for file in files:
        if missing := [column for column in columns if column not in file.columns]:
            raise DataError(
                f"{file.path}: no column {missing[0]!r}, unlike {files[0].path.name}. It has: {listed(file.columns)}"
            )

    def records() -> Iterator[tuple[readers.Place, readers.Row | Fault]]:
        for file in files:
            at = f"{file.path.relative_to(source.root).as_posix()}, {file.unit} " if len(files) > 1 else ""
            for number, entry in file.entries(columns):
                yield f"{at}{number}" if at else number, _row(entry, columns, id_column)

    def fingerprint() -> str:
        parts = [f"{extension(path)} {sha256([path])}" for path in paths] or [text for (text,) in corpus]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    unit, note = files[0].unit, source.note
    corpus = Corpus(name, columns, records, fingerprint, on_bad_line, unit=unit, note=note, names=names)
    return corpus


def _row(entry: dict[str, Any] | Fault, columns: Sequence[str], id_column: str) -> readers.Row | Fault:
    """Return the values of some columns. The `id_column` may also contain whole numbers."""
    if isinstance(entry, Fault):
        return entry
    if any(column not in entry for column in columns):
        return Fault.MISSING_KEY
    if id_column and type(entry[id_column]) is int:
        entry = entry | {id_column: str(entry[id_column])}
    row = tuple(entry[column] for column in columns)
    if all(isinstance(value, str) for value in row):
        return row
    return Fault.EMPTY if None in row else Fault.NOT_STRING


def _choose_columns(
    name: str, available: Sequence[str], wanted: Sequence[str], names: OptionNames
) -> tuple[str, ...]:  # fmt: skip
    """Return the wanted columns. If none are wanted, return the only one, or those whose names are known."""
    if missing := [column for column in wanted if column not in available]:
        raise DataError(f"{name}: no column {missing[0]!r} ({names.columns}). It has: {listed(available)}")
    if wanted or len(available) == 1:
        return tuple(wanted or available)
    for roles in (readers.ROLES, ("sent0", "sent1", "hard_neg")):  # ours, and SimCSE's
        if {*available} == {*(columns := readers.column_names(len(available), roles))}:
            return columns
    if not names.columns:
        raise DataError(f"{name}: it has {len(available)} columns ({listed(available)}). Give a file with one column")
    raise DataError(f"{name}: name one or more of its {len(available)} columns in {names.columns}: {listed(available)}")


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
    first: dict[str, object] = {}
    for number, text in enumerate(as_texts(texts), 1):
        if isinstance(text, str):
            row: dict[str, object] = {"text": text}
        elif isinstance(text, Mapping):
            row = {str(name): value for name, value in text.items()}
        elif isinstance(text, Sequence) and len(text) > 1 and all(isinstance(each, str) for each in text):
            row = dict(zip(readers.column_names(len(text)), text, strict=True))
        else:
            raise DataError(f"text {number} is {text!r:.60}. {EXPECTED}")
        first = first or row
        if len(row) != len(first):
            found = counted(len(row), "column{s}")
            raise DataError(f"text {number} has {found} ({', '.join(row)}), but the first text has {len(first)}")
        yield row
    if not first:
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
