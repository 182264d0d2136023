"""The sources of text that `data.train_file` names: files, a folder, `wiki1m`, `docstrings`."""

import difflib
import functools
import hashlib
import os
from pathlib import Path

from diffcse_jax.data import documents
from diffcse_jax.data.corpus import Corpus
from diffcse_jax.data.documents import Documents
from diffcse_jax.data.file_corpus import choose_columns, corpus_of_files, fingerprint_of, objects_of_all, open_all
from diffcse_jax.data.file_sets import MARKDOWN, PROSE, FileSet, files_named
from diffcse_jax.data.formats import EXTENSIONS, OBJECTS
from diffcse_jax.data.pairs import corpus_of
from diffcse_jax.errors import DataError
from diffcse_jax.groups import DataConfig
from diffcse_jax.io import expand_path, hub_file, sha256

WIKI1M_FILE = "wiki1m_for_simcse.txt"


def open_corpus(data: DataConfig, option: str = "data.train_file", *, id_column: str = "") -> Corpus:
    """The corpus that `data.train_file` names: its lines as rows, or, for pairs of documents, the rows made of these.

    Text is one sentence a line; csv and tsv have a header and the csv module's quoting, and what separates their fields
    is found out; jsonl has one object a line, json that or a list, Parquet columns of strings. Each but Parquet may be
    compressed (.gz, .xz). A pattern or a folder stands for files of one of these kinds, in the order of their names; a
    folder may also be a prepared ArrayRecord data set.

    Args:
        data: the options.
        option: the name, in errors, of the option that the user named the file by.
        id_column: among `data.columns` the one that names rows; of jsonl and json also by whole numbers.

    Raises:
        DataError: there is no such file, its extension or folder is of no known kind, it is empty, it lacks a
            column of `data.columns`, or that is empty and the columns could mean anything; pairs of documents of a
            source that has none.
    """
    if data.reads_documents:
        reason = _without_documents(data, option)
        if not reason:
            return corpus_of(open_documents(data), data)
        if data.documents == "blank_lines":
            raise DataError(
                f"{data.train_file}: {reason}; data.documents='blank_lines' is for a txt file with one sentence a "
                "line: use one, or set data.documents='auto'"
            )
        if data.pairs != "dropout" or data.held_out:
            asks = "data.held_out" if data.held_out else f"data.pairs={data.pairs!r}"
            raise DataError(
                f"{data.train_file}: {reason}; {asks} is for documents: of a txt, jsonl, json or Parquet file, of a "
                "folder or pattern of these or of markdown files, or docstrings"
            )
    if data.train_file == "docstrings":
        return _docstring_corpus(data)
    found = _files(data, option)
    if not found.files:
        return _array_record_corpus(found.root, data)
    if {*found.kinds} <= {*MARKDOWN}:
        raise DataError(f"{found.name}: markdown files are read as documents; set data.pairs, to 'lead' for example")
    return corpus_of_files(_of_sentences(found).of_one_kind(), data.columns, data.on_bad_line, id_column)


def open_documents(data: DataConfig) -> Documents:
    """The documents that `data.train_file` names, those that are held out included.

    Raises:
        DataError: a source that cannot be read, or has no documents; columns of text that has none.
    """
    reason = _without_documents(data)
    if reason:
        raise DataError(f"{data.train_file}: {reason}")
    files = None if data.train_file == "docstrings" else _files(data)
    if files and _is_of_objects(files):
        files = _of_sentences(files).of_one_kind()
        opened = open_all(files, data.columns)
        objects = functools.partial(objects_of_all, opened)
        return documents.of_objects(files.name, opened[0].columns, objects, data.columns, fingerprint_of(opened))
    if data.columns:
        raise DataError(f"{data.train_file}: these documents have no columns; leave data.columns empty")
    if not files:
        return documents.of_docstrings()
    if beside := tuple(file for file in files.of_kinds(OBJECTS).files if not file.name.startswith("_")):
        # Which of them are the documents cannot be known: refused, with their numbers.
        files._replace(files=(*files.of_kinds(PROSE).files, *beside)).of_one_kind()
    if not files.is_file or files.kinds != (".txt",):
        return documents.of_files(files.name, files.root, files.of_kinds(PROSE).files)
    (path,) = files.files
    fingerprint = functools.partial(sha256, [path])
    return documents.of_text_file(path, fingerprint, sentence_a_line=data.documents == "blank_lines")


def _without_documents(data: DataConfig, option: str = "data.train_file") -> str:
    """The reason for which `data.train_file` has no documents in the form of `data.documents`; empty if it has."""
    if data.train_file == "wiki1m":
        return "its sentences are in no order"
    blank_lines = data.documents == "blank_lines"
    if data.train_file == "docstrings":
        return "docstrings are no lines of sentences" if blank_lines else ""
    files = _files(data, option)
    if not files.is_file and blank_lines:
        return "several files, or a folder, have no blank lines between documents"
    if files.kinds == (".txt",) or (not blank_lines and (files.of_kinds(PROSE).files or _is_of_objects(files))):
        return ""
    if not files.is_file:
        return "ArrayRecord shards, or no files of txt, markdown, jsonl, json or Parquet"
    return f"a {files.kinds[0]} file has no {'blank lines between ' * blank_lines}documents"


def _is_of_objects(files: FileSet) -> bool:
    """True if documents are objects of these files, and not the files themselves."""
    return bool(files.of_kinds(OBJECTS).files) and not files.of_kinds(PROSE).files


def _of_sentences(files: FileSet) -> FileSet:
    """Those that hold sentences, without those that other programs keep beside a data set (`_metadata.json`)."""
    kept = tuple(file for file in files.of_kinds(EXTENSIONS).files if not file.name.startswith("_"))
    return files._replace(files=kept) if kept and not files.is_file else files


def _files(data: DataConfig, option: str = "data.train_file") -> FileSet:
    """The files that `data.train_file` stands for."""
    if data.train_file == "wiki1m":
        path = hub_file(WIKI1M_FILE, f"fetch it and set data.train_file=/path/{WIKI1M_FILE}")
        return FileSet("wiki1m", path.parent, (path,), is_file=True)
    if not data.train_file:
        raise DataError(f"{option} is empty; it must name a file, a folder, wiki1m or docstrings")
    try:
        return files_named(data.train_file)
    except DataError as error:
        near = _nearest_name(expand_path(data.train_file))
        raise DataError(f"{option}: {error}{near}; known names: wiki1m, docstrings") from error


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
    # Here, as it loads tensorflow_datasets, which other sources do not need.
    from diffcse_jax.data.array_record_reader import open_prepared

    prepared = open_prepared(folder)
    columns = choose_columns(str(folder), prepared.columns, data.columns or prepared.usual)
    return Corpus(
        str(folder),
        columns,
        functools.partial(prepared.records, columns),
        functools.partial(sha256, prepared.files),
        data.on_bad_line,
    )


def _nearest_name(path: Path) -> str:
    if os.path.exists(path):
        return ""
    names = os.listdir(path.parent) if os.path.isdir(path.parent) and os.access(path.parent, os.R_OK) else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" (did you mean {path.with_name(near[0])}?)" if near else ""
