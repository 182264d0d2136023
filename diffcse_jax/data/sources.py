"""The sources of text that `data.train_file` names: a file, a folder, `wiki1m`, `docstrings`."""

import difflib
import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from diffcse_jax.data import documents, text_files
from diffcse_jax.data.cache import hub_file
from diffcse_jax.data.corpus import ROLES, Corpus, column_names
from diffcse_jax.data.documents import Documents
from diffcse_jax.data.lines import expanded, unreadable
from diffcse_jax.data.pairs import corpus_of
from diffcse_jax.errors import DataError
from diffcse_jax.groups import DataConfig

WIKI1M_FILE = "wiki1m_for_simcse.txt"
KNOWN_ROLES = (ROLES, ("sent0", "sent1", "hard_neg"))  # ours, and SimCSE's


def open_corpus(data: DataConfig, option: str = "data.train_file") -> Corpus:
    """The corpus that `data.train_file` names: its lines as rows, or, for pairs of documents, the rows made of these.

    Text is one sentence a line; csv and tsv have a header and the csv module's quoting; jsonl has one object a line.
    Each may be compressed (.gz, .xz). A folder is a prepared ArrayRecord data set.

    Args:
        data: the options.
        option: the name, in errors, of the option that the user named the file by.

    Raises:
        DataError: there is no such file, its extension or folder is of no known kind, it is empty, it lacks a
            column of `data.columns`, or that is empty and the columns could mean anything; pairs of documents of a
            source that has none.
    """
    if data.reads_documents:
        reason = _without_documents(data)
        if not reason:
            return corpus_of(open_documents(data), data)
        if data.documents == "blank_lines":
            raise DataError(
                f"{data.train_file}: {reason}; data.documents='blank_lines' is for txt files with one sentence a "
                "line: use one, or set data.documents='auto'"
            )
        if data.pairs != "dropout" or data.held_out:
            asks = "data.held_out" if data.held_out else f"data.pairs={data.pairs!r}"
            raise DataError(
                f"{data.train_file}: {reason}; {asks} is for documents: of a txt or jsonl file, of a folder of txt and "
                "markdown files, or docstrings"
            )
    if data.train_file == "docstrings":
        return _docstring_corpus(data)
    path = _path_of(data, option)
    if path.is_dir():
        return _array_record_corpus(path, data)
    return _file_corpus("wiki1m" if data.train_file == "wiki1m" else str(path), path, data)


def open_documents(data: DataConfig) -> Documents:
    """The documents that `data.train_file` names, those that are held out included.

    Raises:
        DataError: a source that cannot be read, or has no documents; columns of text that has none.
    """
    reason = _without_documents(data)
    if reason:
        raise DataError(f"{data.train_file}: {reason}")
    if data.columns and _extension(Path(data.train_file)) != ".jsonl":
        raise DataError(f"{data.train_file}: these documents have no columns; leave data.columns empty")
    if data.train_file == "docstrings":
        return documents.of_docstrings()
    path = _path_of(data)
    if path.is_dir():
        return documents.of_folder(path)
    fingerprint = functools.partial(sha256, [path])
    if _extension(path) == ".jsonl":
        return documents.of_json_lines(path, data.columns, fingerprint)
    return documents.of_text_file(path, fingerprint, sentence_a_line=data.documents == "blank_lines")


def _without_documents(data: DataConfig) -> str:
    """The reason for which `data.train_file` has no documents in the form of `data.documents`; empty if it has."""
    if data.train_file == "wiki1m":
        return "its sentences are in no order"
    blank_lines = data.documents == "blank_lines"
    if data.train_file == "docstrings":
        return "docstrings are no lines of sentences" if blank_lines else ""
    path = _path_of(data)
    if path.is_dir():
        if blank_lines:
            return "a folder has no blank lines between documents"
        found = documents.files_of(path) and not _is_prepared(path)
        return "" if found else "a folder of ArrayRecord shards, or without txt and markdown files"
    extension = _extension(path)
    if extension == ".txt" or (extension == ".jsonl" and not blank_lines):
        return ""
    return f"a {extension} file has no {'blank lines between ' * blank_lines}documents"


def _path_of(data: DataConfig, option: str = "data.train_file") -> Path:
    """The file or folder of `data.train_file`, which can be read."""
    if data.train_file == "wiki1m":
        return hub_file(WIKI1M_FILE, f"fetch it and set data.train_file=/path/{WIKI1M_FILE}")
    if not data.train_file:
        raise DataError(f"{option} is empty; it must name a file, a folder, wiki1m or docstrings")
    path = expanded(data.train_file)
    if not os.path.isdir(path) and (problem := unreadable(path)):
        raise DataError(f"{option}: {problem}{_nearest_name(path)}; known names: wiki1m, docstrings")
    return path


def _extension(path: Path) -> str:
    """The extension, without the one of a compressed file."""
    return (path.with_suffix("") if path.suffix in (".gz", ".xz") else path).suffix


def sha256(paths: Sequence[Path]) -> str:
    """The SHA-256 of the files' bytes, one file after the other, as hexadecimal digits."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _file_corpus(name: str, path: Path, data: DataConfig) -> Corpus:
    columns: tuple[str, ...] = ("sentence",)
    match extension := _extension(path):
        case ".txt":
            records = functools.partial(text_files.text_records, path)
            if data.columns:
                raise DataError(f"{name}: a text file has no columns; leave data.columns empty")
        case ".csv" | ".tsv":
            delimiter = "\t" if extension == ".tsv" else ","
            header = text_files.table_header(path, delimiter)
            columns = _choose_columns(name, header, data.columns)
            wanted = [header.index(column) for column in columns]
            records = functools.partial(text_files.table_records, path, delimiter, len(header), wanted)
        case ".jsonl":
            columns = _choose_columns(name, text_files.first_keys(path), data.columns)
            records = functools.partial(text_files.json_records, path, columns)
        case _:
            raise DataError(f"{name}: unknown extension; known: .txt, .csv, .tsv, .jsonl, each also .gz or .xz")
    return Corpus(name, columns, records, functools.partial(sha256, [path]), data.on_bad_line)


def _docstring_corpus(data: DataConfig) -> Corpus:
    from diffcse_jax.data.docstrings import docstring_sentences

    if data.columns:
        raise DataError("docstrings has no columns to choose; leave data.columns empty")
    return Corpus(
        "docstrings",
        ("sentence",),
        lambda: ((number, (sentence,)) for number, sentence in enumerate(docstring_sentences(), 1)),
        lambda: hashlib.sha256("\n".join(docstring_sentences()).encode()).hexdigest(),
        data.on_bad_line,
    )


def _array_record_corpus(folder: Path, data: DataConfig) -> Corpus:
    if documents.files_of(folder) and not _is_prepared(folder):
        raise DataError(
            f"{folder}: a folder of txt and markdown files is read as documents; set data.pairs, to 'lead' for example"
        )
    # Here, as it loads tensorflow_datasets, which other sources do not need.
    from diffcse_jax.data.array_record_reader import open_prepared

    prepared = open_prepared(folder)
    columns = _choose_columns(str(folder), prepared.columns, data.columns)
    return Corpus(
        str(folder),
        columns,
        functools.partial(prepared.records, columns),
        functools.partial(sha256, prepared.files),
        data.on_bad_line,
    )


def _is_prepared(folder: Path) -> bool:
    """True if an ArrayRecord data set is somewhere in the folder."""
    return any(folder.rglob("dataset_info.json"))


def _choose_columns(name: str, available: Sequence[str], wanted: Sequence[str]) -> tuple[str, ...]:
    """The columns to read: `wanted`; where none is, the only one or those whose names tell their roles."""
    missing = [column for column in wanted if column not in available]
    if missing:
        raise DataError(f"{name}: no column {missing[0]!r} (data.columns); it has: {', '.join(available)}")
    chosen = tuple(wanted or _columns_by_name(available))
    if chosen:
        return chosen
    raise DataError(f"{name}: name one or more of its {len(available)} columns in data.columns: {', '.join(available)}")


def _columns_by_name(available: Sequence[str]) -> Sequence[str]:
    """All columns, in the order of their roles; none where the names do not tell the roles."""
    if len(available) == 1:
        return available
    known = (column_names(len(available), roles) for roles in KNOWN_ROLES)
    return next((names for names in known if {*available} == {*names}), ())


def _nearest_name(path: Path) -> str:
    if os.path.exists(path):
        return ""
    names = os.listdir(path.parent) if os.path.isdir(path.parent) and os.access(path.parent, os.R_OK) else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" (did you mean {path.with_name(near[0])}?)" if near else ""
