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
from diffcse_jax.data import docstrings, documents, readers
from diffcse_jax.data.documents import Documents, Placed
from diffcse_jax.data.formats import READERS
from diffcse_jax.data.pairs import corpus_of, digest, is_in_share
from diffcse_jax.data.readers import Corpus, Fault, Place, Row, RowFile, extension, listed, open_file
from diffcse_jax.errors import DataError, NoSentencesError, counted
from diffcse_jax.io import cache_folder, disk_errors, expand_path, hub_file, sha256, why_unreadable, write_text

WIKI1M_FILE = "wiki1m_for_simcse.txt"
KNOWN_NAMES = "Known names: wiki1m, docstrings"
KNOWN_EXTENSIONS = tuple(dict.fromkeys((*readers.EXTENSIONS, *READERS)))
ROLES = ("sentence", "positive", "hard_negative")
SIMCSE_ROLES = ("sent0", "sent1", "hard_neg")
PASSAGE_TOKENS = 128  # approximate length of the passages into which `open_text` splits documents
EXPECTED = "Give strings; tuples of strings (sentence, positive, hard negatives); or dicts, whose keys are columns"

Text = str | Sequence[str] | Mapping[str, object]  # a sentence or document; a pair, triple, ...; columns by name


class Source(NamedTuple):
    """The text that a name stands for: `docstrings`, or files."""

    name: str  # as it was given
    root: Path = Path()  # the folder that contains the files
    files: tuple[Path, ...] = ()  # those of known kinds, in the order of their names
    note: str = ""  # which other files were skipped
    is_file: bool = False  # the name is that of one file
    is_prepared: bool = False  # the folder contains an ArrayRecord data set

    def of_kinds(self, kinds: Sequence[str]) -> list[Path]:
        """Return the files with one of these extensions."""
        return [file for file in self.files if extension(file) in kinds]

    def tables(self, wanted: Sequence[str], kinds: Sequence[str] = readers.TABLES) -> list[RowFile]:
        """Open the files with one of these extensions, without empty ones, to read the `wanted` columns."""
        return [table for file in self.of_kinds(kinds) if (table := open_file(file, wanted)).columns]


def open_corpus(data: DataConfig) -> Corpus:
    """Open the rows that `data.train_file` names, or the rows made of its documents."""
    if data.reads_documents:
        return corpus_of(open_documents(data), data)
    return _rows(find_source(data.train_file), data.columns, "Name the columns in data.columns", data.on_bad_line)


def open_documents(data: DataConfig) -> Documents:
    """Open the documents that `data.train_file` names, including those that are held out."""
    return _documents(find_source(data.train_file), data.columns)


def open_text(
    name: str | Path,
    option: str = "--input",
    *,
    columns: Sequence[str] = (),
    on_bad_line: str = "skip",
    titled: bool = False,
) -> Corpus:
    """Open any text that a user may name; see `find_source`. Errors name the `option` that named it.

    Documents (markdown, html, rst, pdf, folders of them, tables with `title` and `text`) become passages of about 100
    words. With `titled`, the title of a section is on a line above each of its passages. Other files keep their rows.
    Without `columns`, the only column is read, or those with known names.
    """
    source = find_source(str(name), option)
    if columns or not _has_documents(source):
        advice = "Name the columns in --columns" if option == "--input" else "Give a file with one column"
        return _rows(source, columns, advice, on_bad_line)
    pairs = "titled" if titled else "passages"
    data = DataConfig(str(name), pairs=pairs, max_length=PASSAGE_TOKENS, on_bad_line=on_bad_line)
    return corpus_of(_documents(source, ()), data)


def find_source(name: str, option: str = "data.train_file") -> Source:
    """Find what a name stands for, or raise a `DataError` that names the option.

    It is a file; a folder; a pattern with `*`, `?`, `[...]` or `**` (folders of any depth); `wiki1m` or `docstrings`.
    """
    if name == "docstrings":
        return Source(name)
    if not name:
        raise DataError(f"{option} is empty. Name a file or a folder. {KNOWN_NAMES}")
    if name == "wiki1m":
        path = hub_file(WIKI1M_FILE, f"fetch it and set {option}=/path/{WIKI1M_FILE}")
    else:
        path = expand_path(name)
    is_pattern = glob.has_magic(name) and not os.path.exists(path)
    is_file = not is_pattern and not os.path.isdir(path)
    if is_file:
        root, found = path.parent, [path]
    elif is_pattern:
        matches = map(Path, glob.glob(os.path.expanduser(name), recursive=True))
        found = _once(each for each in matches if not each.is_dir())
        root = Path(os.path.commonpath([file.parent for file in found])) if found else path
    else:
        root, found = path, _files_below(path)
        if any(file.name == readers.PREPARED for file in found):
            return Source(name, path, is_prepared=True)
    collected = {file.parent for file in found if file.name.startswith("corpus.jsonl")}  # folders of search collections
    reasons = [_why_skipped(file, collected, is_named=is_file) for file in found]
    files = tuple(file for file, reason in zip(found, reasons, strict=True) if not reason)
    for file in found if is_file else files:
        if problem := why_unreadable(file):
            raise DataError(f"{option}: {problem}. {KNOWN_NAMES}")
    skipped = f"skipped files: {_counts(filter(None, reasons))}" if len(files) < len(found) else ""
    if not files:
        kinds = ", ".join(KNOWN_EXTENSIONS)
        raise DataError(f"{option}: {name}: no file of a known kind ({skipped or 'none found'}). Known: {kinds}")
    return Source(name, root, files, skipped, is_file)


def _files_below(folder: Path) -> list[Path]:
    """Return the files in a folder and the folders below it, without hidden ones. Links to folders are not followed."""

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read the folder {error.filename}: {error.strerror}")

    walk = os.walk(folder, onerror=refuse)
    paths = (Path(root, name).relative_to(folder) for root, _, names in walk for name in names)
    return _once(folder / path for path in paths if not any(part.startswith(".") for part in path.parts))


def _once(files: Iterable[Path]) -> list[Path]:
    """Return files in the order of their names. A link to a file that is also there is left out."""
    links_first = sorted(files, key=lambda file: (file.is_symlink(), file), reverse=True)
    return sorted({os.path.realpath(file): file for file in links_first}.values())


def _why_skipped(file: Path, collected: set[Path], *, is_named: bool) -> str:
    """Return why a file is not read, or an empty string. `collected` are folders with a `corpus.jsonl`."""
    is_queries = file.name.startswith("queries.jsonl") and file.parent in collected
    if is_queries or (file.parent.name == "qrels" and file.parent.parent in collected):
        return "with queries and judgements"
    if extension(file) in readers.TABLES and file.name.startswith("_") and not is_named:
        return "named _*"  # tables of other programs
    return "" if extension(file) in KNOWN_EXTENSIONS else file.suffix or "without extension"


def _counts(kinds: Iterable[str]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in collections.Counter(kinds).most_common())


# Documents


def _has_documents(source: Source) -> bool:
    """Return whether a source has documents: prose, or tables with a text and other columns."""
    if any(extension(file) not in readers.EXTENSIONS for file in source.files):
        return True
    if tables := source.of_kinds(readers.TABLES):
        columns = next(filter(None, (open_file(table).columns for table in tables)), ())
        return "text" in columns and len(columns) > 1
    return not source.is_file and any(map(documents.has_blank_lines, source.files[:10]))


def _documents(source: Source, columns: Sequence[str]) -> Documents:
    """Open documents. The columns of tables are title and text, or text."""
    name, root = source.name, source.root
    if columns and not (source.is_prepared or source.of_kinds(readers.TABLES)):
        raise DataError(f"{name} has no columns. Leave data.columns empty")
    if name == "docstrings":
        return docstrings.docstring_documents()
    if source.is_prepared:
        raise DataError(f"{name}: an ArrayRecord data set has rows, not documents. Set data.pairs='columns'")
    if len(columns) > 2:
        raise DataError(f"{name}, data.columns={columns}: name a title and a text, or set data.pairs='columns'")
    if source.is_file and extension(source.files[0]) == ".txt":
        (file,) = source.files
        return Documents(name, lambda: documents.in_text_file(file), lambda: _fingerprint([file]))
    notes = [source.note] if source.note else []
    prose = source.of_kinds(tuple(READERS))
    if columns and prose:
        notes.append(f"skipped {counted(len(prose), 'file{s} without columns')}")
        prose = []
    columns = columns or ("title", "text")
    found = source.tables(columns)
    tables = [table for table in found if columns[-1] in table.columns]
    if not prose and not tables:
        has = f"It has: {listed(found[0].columns)}" if found else "It is empty"
        advice = "Name the columns of title and text, or of the text alone (data.columns or --columns)"
        raise DataError(f"{name}: no column {columns[-1]!r}. {has}. {advice}")
    if left_out := len(found) - len(tables):
        notes.append(f"skipped {counted(left_out, 'table{s} without texts')}")

    def read() -> Iterator[Placed]:
        for path in prose:
            yield path.relative_to(root).as_posix(), documents.of_file(path)
        for place, entry in readers.placed_entries(tables, columns, root if len(tables) > 1 or prose else None):
            row = readers.row_of(entry, columns, optional=columns[:-1])
            yield place, row if isinstance(row, Fault) else documents.of_texts(*row)

    def fingerprint() -> str:
        return _fingerprint([*prose, *(table.path for table in tables)], columns)

    return Documents(name, read, fingerprint, "; ".join(notes))


def _fingerprint(files: Iterable[Path], columns: Sequence[str] = ()) -> str:
    """Return the SHA-256 of the content of files in hexadecimal. Their names do not matter."""
    parts = [f"{extension(file)} {sha256([file])}" for file in files]
    return hashlib.sha256("\n".join([*parts, *columns]).encode(errors="surrogateescape")).hexdigest()


# Rows


def _rows(source: Source, wanted: Sequence[str], advice: str, on_bad_line: str) -> Corpus:
    """Open rows. Errors about columns end with the advice."""
    name, kinds = source.name, collections.Counter(map(extension, source.of_kinds(readers.EXTENSIONS)))
    if len(kinds) > 1:
        raise DataError(
            f"{name}: files of several kinds ({_counts(kinds.elements())}). Name the files of one kind with a pattern, "
            f"such as '{source.root}/**/*{next(iter(kinds))}'"
        )
    if name == "docstrings":
        files = [readers.single_column(Path(name), docstrings.docstring_sentences)]
    elif source.is_prepared:
        files = [readers.open_prepared(source.root)]
    elif not kinds:
        remedy = "Do not name columns" if wanted else "Set data.pairs, for example to 'lead'"
        raise DataError(f"{name}: these files contain documents. {remedy}")
    else:
        files = source.tables(wanted, readers.EXTENSIONS)
    if not files:
        raise NoSentencesError(f"{name}: no JSON object found. A line has one object; json may also be a list")
    columns = tuple(wanted) or _known_columns(files[0].columns)
    if not columns:
        raise DataError(f"{name}: it has {len(files[0].columns)} columns: {listed(files[0].columns)}. {advice}")
    for file in files:
        if missing := [column for column in columns if column not in file.columns]:
            raise DataError(f"{file.path}: no column {missing[0]!r}. It has: {listed(file.columns)}. {advice}")

    def records() -> Iterator[tuple[Place, Row | Fault]]:
        for place, entry in readers.placed_entries(files, columns, source.root if len(files) > 1 else None):
            yield place, readers.row_of(entry, columns)

    def fingerprint() -> str:
        if name == "docstrings":
            return docstrings.docstring_fingerprint()
        shards = sorted(files[0].path.glob("*.array_record*")) if source.is_prepared else []
        return _fingerprint(shards or source.of_kinds(readers.EXTENSIONS))

    return Corpus(name, columns, records, fingerprint, on_bad_line, note=source.note)


def _known_columns(available: Sequence[str]) -> tuple[str, ...]:
    """Return the only column, or those with known names in the order of their roles, or none."""
    if len(available) == 1:
        return tuple(available)
    known = [column_names(len(available), roles) for roles in (ROLES, SIMCSE_ROLES)]
    return next((names for names in known if set(names) == set(available)), ())


def column_names(count: int, roles: Sequence[str] = ROLES) -> tuple[str, ...]:
    """Return names for columns: the roles, then `hard_negative_2`, `hard_negative_3`, ..."""
    return (*roles, *(f"{roles[-1]}_{number}" for number in range(2, count - 1)))[:count]


# Text in memory, which is written to a file from which a run trains and, after an interruption, resumes


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
    """Write pairs (or triples, ...) to two files: rows to train on, as `write_sentences` does, and pairs to score.

    A hash of the first text decides, so that all rows of an anchor stay together. Training rows that share a text with
    a held-out row are left out. Unusable rows stay with the training rows, where they are skipped and counted.
    """
    rows = [tuple(map(str, row.values())) for row in _columns(texts)]
    held_out = [row for row in rows if is_in_share(row[0], share) and not isinstance(readers.checked(row), Fault)]
    kept_out = {digest(text) for row in held_out for text in row}
    trained_on = [row for row in rows if kept_out.isdisjoint(map(digest, row))]
    if not trained_on or len(held_out) < 2:
        raise DataError(
            f"data.held_out={share} leaves {len(trained_on)} of {len(rows)} rows for training and {len(held_out)} for "
            "evaluation, which needs at least 2. Give more rows, change data.held_out, or set eval.metric"
        )
    pairs = dict.fromkeys("\t".join(" ".join(text.split()) for text in row[:2]) for row in held_out)
    return write_sentences(trained_on), _write(pairs, ".tsv")


def _write(lines: Iterable[str], suffix: str) -> Path:
    """Write lines to a file in the cache folder, whose name is a hash of them."""
    text = "".join(f"{line}\n" for line in lines)
    path = cache_folder("text") / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}{suffix}"
    partial = path.with_name(f"{os.getpid()}-{path.name}")  # several processes may write the same text
    with disk_errors(path.parent, safe="Nothing was started.", instead="set XDG_CACHE_HOME to another folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(partial, text)
        return partial.replace(path)


def _columns(texts: Iterable[Text]) -> Iterator[dict[str, object]]:
    """Yield the texts as dicts of their columns."""
    width = 0
    for number, text in enumerate(texts, 1):
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
