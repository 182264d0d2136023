"""The sources of text that `data.train_file` names: a file, a folder of ArrayRecord shards, `wiki1m`, `docstrings`."""

import difflib
import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from diffcse_jax.data import text_files
from diffcse_jax.data.cache import hub_file
from diffcse_jax.data.corpus import ROLES, Corpus, column_names
from diffcse_jax.data.lines import expanded, unreadable
from diffcse_jax.errors import DataError
from diffcse_jax.groups import DataConfig

WIKI1M_FILE = "wiki1m_for_simcse.txt"
KNOWN_ROLES = (ROLES, ("sent0", "sent1", "hard_neg"))  # ours, and SimCSE's


def open_corpus(data: DataConfig, option: str = "data.train_file") -> Corpus:
    """The corpus that `data.train_file` names.

    Text is one sentence a line; csv and tsv have a header and the csv module's quoting; jsonl has one object a line.
    Each may be compressed (.gz, .xz). A folder is a prepared ArrayRecord data set.

    Args:
        data: the options.
        option: the name, in errors, of the option that the user named the file by.

    Raises:
        DataError: there is no such file, its extension or folder is of no known kind, it is empty, it lacks a
            column of `data.columns`, or that is empty and the columns could mean anything; `data.documents` of a source
            that has none.
    """
    if data.train_file == "docstrings":
        return _docstring_corpus(data)
    if data.train_file == "wiki1m":
        _refuse_documents("wiki1m", data, "its sentences are in no order")
        path = hub_file(WIKI1M_FILE, f"fetch it and set data.train_file=/path/{WIKI1M_FILE}")
        return _file_corpus("wiki1m", path, data)
    if not data.train_file:
        raise DataError(f"{option} is empty; it must name a file, a folder, wiki1m or docstrings")
    path = expanded(data.train_file)
    if os.path.isdir(path):
        return _array_record_corpus(path, data)
    if problem := unreadable(path):
        raise DataError(f"{option}: {problem}{_nearest_name(path)}; known names: wiki1m, docstrings")
    return _file_corpus(str(path), path, data)


def sha256(paths: Sequence[Path]) -> str:
    """The SHA-256 of the files' bytes, one file after the other, as hexadecimal digits."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _file_corpus(name: str, path: Path, data: DataConfig) -> Corpus:
    extension = (path.with_suffix("") if path.suffix in (".gz", ".xz") else path).suffix
    columns: tuple[str, ...] = ("sentence",)
    if extension != ".txt":
        _refuse_documents(name, data, f"a {extension} file has no blank lines between documents")
    match extension:
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
    documents = data.documents == "blank_lines"
    return Corpus(name, columns, records, functools.partial(sha256, [path]), data.on_bad_line, documents)


def _refuse_documents(name: str, data: DataConfig, reason: str) -> None:
    if data.documents != "none":
        raise DataError(
            f"{name}: {reason}; data.documents={data.documents!r} is for txt files with one sentence a line: use one, "
            "or set data.documents='none'"
        )


def _docstring_corpus(data: DataConfig) -> Corpus:
    from diffcse_jax.data.docstrings import docstring_sentences

    _refuse_documents("docstrings", data, "its sentences know no documents")
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
    # Here, as it loads tensorflow_datasets, which other sources do not need.
    from diffcse_jax.data.array_record_reader import open_prepared

    _refuse_documents(str(folder), data, "an ArrayRecord data set has no blank lines between documents")
    prepared = open_prepared(folder)
    columns = _choose_columns(str(folder), prepared.columns, data.columns)
    return Corpus(
        str(folder),
        columns,
        functools.partial(prepared.records, columns),
        functools.partial(sha256, prepared.files),
        data.on_bad_line,
    )


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
