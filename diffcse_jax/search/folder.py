"""The folder of an index: a manifest, and the files that it names. Reading checks all of it.

The manifest, `index.json`, is replaced at once. The other files never change: each save writes new
ones, whose names contain the id of the save, and those of the save before stay until the next
one. So a reader finds the old index or the new one. Whatever else is in the folder is neither read
nor removed.
"""

import contextlib
import dataclasses
import hashlib
import math
import mmap
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import pyarrow as pa
from jaxtyping import Shaped

from diffcse_jax.errors import CheckpointError, UserError
from diffcse_jax.hosts import log_line
from diffcse_jax.io import (
    INDEX_FORMAT,
    INDEX_MANIFEST,
    disk_errors,
    has_index_manifest,
    is_partial,
    json_digest,
    lock,
    read_json_object,
    remove,
    sync,
    why_unreadable,
    write_sealed,
)
from diffcse_jax.search.contents import (
    DOCUMENTS,
    PASSAGES,
    Contents,
    Typical,
    searched_texts,
    whole_numbers,
)
from diffcse_jax.search.embeddings import StoredEmbeddings, expected_arrays
from diffcse_jax.search.lexical import LexicalIndex
from diffcse_jax.search.modes import MODES, STORAGES
from diffcse_jax.search.settings import IndexSettings, Input
from diffcse_jax.search.vector_store import EncoderRecord
from diffcse_jax.search.words import WORD_RULES

MANIFEST = INDEX_MANIFEST
REMEDY = "Build the index again"

_LOCK = ".lock"
_KINDS = "documents|passages|vectors|scale|center|precise|words"
_FILE = re.compile(rf"(?:{_KINDS})-([0-9a-f]{{32}})(?:\.arrow|\.npy)?")
_ATTEMPTS = 1000  # to read an index that other processes replace
_BLOCK = 1 << 22  # numbers that are checked at once
_SAFE = "An earlier index there is unchanged."

Built = TypeVar("Built")
Arrays = Mapping[str, Shaped[np.ndarray, "..."]]


def is_index(folder: Path) -> bool:
    """Return whether a folder holds an index of ours, complete or damaged."""
    try:
        return (folder / MANIFEST).is_file() and (
            has_index_manifest(folder)
            or any(_FILE.fullmatch(path.name) for path in folder.iterdir())
        )
    except PermissionError as error:
        raise _denied(folder) from error


def _denied(path: Path) -> CheckpointError:
    return CheckpointError(f"cannot read {path}: permission denied. Change its permissions")


@dataclasses.dataclass(frozen=True)
class Stored:
    """An index without its encoder."""

    settings: IndexSettings
    contents: Contents
    encoder: EncoderRecord | None = None  # None if there are no embeddings
    inputs: tuple[Input, ...] = ()


# Writing


@contextlib.contextmanager
def writing(folder: Path, *, wait: bool) -> Iterator["Writer"]:
    """Lock a folder, which must be missing, empty or an index of ours, for one writer.

    With `wait`, a second writer waits until the first has ended. Otherwise it raises `InUseError`.
    """
    with disk_errors(folder, safe=_SAFE):
        folder = folder.resolve()  # a symbolic link stays a link
        _require_own(folder)
        held = lock(folder / _LOCK, wait=wait)
    with held:
        yield Writer(folder)


def _require_own(folder: Path) -> None:
    """Raise `CheckpointError` for a file, and for a folder with something else than an index."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder. Choose another folder")
    if is_index(folder):
        return
    for path in sorted(folder.iterdir()):
        if not _is_leftover(path):
            raise CheckpointError(
                f"{folder} is not empty and not an index of this program: it holds {path.name}. "
                "Choose another folder"
            )


def _is_leftover(path: Path) -> bool:
    """Return whether a first save that did not end has left this file."""
    return path.name == _LOCK or is_partial(path) or bool(_FILE.fullmatch(path.name))


def require_ended(folder: Path) -> None:
    """Raise `CheckpointError` for a folder whose first save did not end."""
    try:
        inside = [*folder.iterdir()] if folder.is_dir() else []
    except PermissionError as error:
        raise _denied(folder) from error
    if inside and (folder / _LOCK).exists() and all(map(_is_leftover, inside)):
        raise CheckpointError(
            f"{folder} is not an index yet: the command that writes it is still running, or was "
            "stopped. Run it again"
        )


@dataclasses.dataclass(frozen=True)
class Writer:
    """A folder that this process has locked."""

    folder: Path

    def write(self, stored: Stored) -> None:
        """Replace the index. What is written may be mapped from the same folder."""
        contents = stored.contents
        tables = {"documents": contents.documents, "passages": contents.passages}
        arrays = contents.embeddings.arrays() if contents.embeddings else {}
        save_id = uuid.uuid4().hex
        previous = self._saved_id()
        try:
            with disk_errors(self.folder, safe=_SAFE):
                for name, table in tables.items():
                    with pa.ipc.new_file(
                        self.folder / f"{name}-{save_id}.arrow", table.schema
                    ) as sink:
                        sink.write_table(table)
                for name, array in arrays.items():
                    np.save(self.folder / f"{name}-{save_id}.npy", array)
                if contents.lexical:
                    words = self.folder / f"words-{save_id}"
                    words.mkdir()
                    contents.lexical.save(words)
                self._publish(_manifest(stored), save_id)
        finally:
            is_published = self._saved_id() == save_id
            kept = (save_id, previous)
            self._remove(lambda other: other not in kept if is_published else other == save_id)

    def _publish(self, manifest: Mapping[str, Any], save_id: str) -> None:
        """Write the manifest, once all files are on disk."""
        paths = [path for path in self.folder.iterdir() if _save_id_of(path) == save_id]
        files = [path for each in paths for path in (each.iterdir() if each.is_dir() else [each])]
        for path in (*files, *filter(Path.is_dir, paths), self.folder):
            sync(path)
        content = {"format": INDEX_FORMAT, "number": save_id, **manifest}
        write_sealed(self.folder / MANIFEST, content, files)
        sync(self.folder)

    def _saved_id(self) -> str:
        """Return the id of the save that the manifest names; empty if there is none."""
        with contextlib.suppress(CheckpointError):
            return str(read_json_object(self.folder / MANIFEST).get("number", ""))
        return ""

    def _remove(self, is_old: Callable[[str], bool]) -> None:
        """Remove the files of some saves, by their ids. Readers keep what they have opened."""
        for path in self.folder.iterdir():
            save_id = _save_id_of(path)
            if save_id and is_old(save_id):
                remove(path)


def _save_id_of(path: Path) -> str:
    """Return the id of the save that wrote a file; empty if it is not ours."""
    name = _FILE.fullmatch(path.name)
    return name[1] if name else ""


def _manifest(stored: Stored) -> Mapping[str, Any]:
    """Return what the manifest says of an index, beside its files."""
    contents = stored.contents
    embeddings, lexical = contents.embeddings, contents.lexical
    return {
        "settings": dataclasses.asdict(stored.settings),
        "encoder": dataclasses.asdict(stored.encoder) if stored.encoder else None,
        "inputs": [dataclasses.asdict(each) for each in stored.inputs],
        "documents": len(contents.documents),
        "passages": len(contents.passages),
        "measured": embeddings.measured if embeddings else 0,
        "typical": list(contents.typical),
        "language": lexical.language if lexical else "",
        "words": WORD_RULES,
    }


# Reading: the files


class _Damaged(CheckpointError):
    """A file that is missing, invalid or not the one that the manifest names."""


def read_index(folder: Path) -> Stored:
    """Read an index. If another process replaces it meanwhile, read the new one.

    Raises:
        CheckpointError: The index is missing or damaged.
    """
    try:
        for _ in range(_ATTEMPTS):
            reader = _read_manifest(folder)
            try:
                return _stored(reader)
            except _Damaged:
                if _read_manifest(folder).save_id == reader.save_id:
                    raise
    except _Damaged as error:
        raise CheckpointError(f"{error}. {REMEDY}") from error
    raise CheckpointError(f"{folder} was replaced {_ATTEMPTS:,} times while it was read. Try again")


def _read_manifest(folder: Path) -> "Reader":
    path = folder / MANIFEST
    _require_permission(path)
    try:
        content = read_json_object(path)
    except CheckpointError as error:
        raise _Damaged(str(error)) from error
    if content.pop("sha256", None) != json_digest(content):
        raise _Damaged(f"{path} differs from its checksum")
    if content.get("format") != INDEX_FORMAT:
        raise _Damaged(f"{path} has the format {content.get('format')!r}, not {INDEX_FORMAT!r}")
    save_id, files = content.get("number"), content.get("files")
    if not isinstance(save_id, str) or not isinstance(files, dict):
        raise _Damaged(f"{path} has no valid `number` and `files`")
    return Reader(folder, save_id, files, content)


@dataclasses.dataclass(frozen=True)
class Reader:
    """An index folder, as one manifest describes it."""

    folder: Path
    save_id: str
    files: Mapping[str, Any]  # their SHA-256
    manifest: Mapping[str, Any]

    def damaged(self, problem: str) -> CheckpointError:
        """Return an error about the manifest."""
        return _Damaged(f"{self.folder / MANIFEST}: {problem}")

    def table(self, name: str, schema: pa.Schema) -> pa.Table:
        """Map a table, and require its schema."""
        path = self.folder / f"{name}-{self.save_id}.arrow"
        try:
            with self._opened(path) as file:
                buffer = pa.py_buffer(_mapped(file))
            table = pa.ipc.open_file(pa.BufferReader(buffer)).read_all()
            table.validate(full=True)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise _Damaged(f"{path} cannot be read: {error}") from error
        if not table.schema.equals(schema):
            raise _Damaged(
                f"{path} has the columns {table.schema.names}, not {schema.names}, or other types"
            )
        if empty := [column for column in schema.names if table[column].null_count]:
            raise _Damaged(f"{path}: the column {empty[0]!r} lacks values")
        return table

    def array(self, name: str, dtype: str, shape: tuple[int, ...]) -> Shaped[np.ndarray, "..."]:
        """Map an array, and require its type, its shape and finite numbers."""
        path = self.folder / f"{name}-{self.save_id}.npy"
        with self._opened(path) as file:
            array = _mapped_array(file, path)
        if (array.dtype.name, array.shape) != (dtype, shape):
            raise _Damaged(f"{path} has {array.dtype.name} {array.shape}, not {dtype} {shape}")
        _require_finite(array, path)
        return array

    def words(self, load: Callable[[Path, Arrays], Built]) -> Built:
        """Load the words of BM25 by a function of their folder and the arrays in it.

        The files are compared with their checksums before, and stay open.
        """
        folder = self.folder / f"words-{self.save_id}"
        names = [name for name in self.files if name.startswith(f"{folder.name}/")]
        if not names:
            raise self.damaged("it names no words")
        with contextlib.ExitStack() as stack:
            opened, arrays = {}, {}
            for name in names:
                path = folder / name.partition("/")[2]
                opened[path] = stack.enter_context(self._opened(path))
                if path.suffix == ".npy":
                    arrays[path.name.partition(".")[0]] = array = _mapped_array(opened[path], path)
                    _require_finite(array, path)
            try:
                words = load(folder, arrays)
            except UserError:
                raise
            except Exception as error:  # the library raises many types
                raise _Damaged(
                    f"{folder} cannot be read: {type(error).__name__}: {error}"
                ) from error
            for path, file in opened.items():  # the library opens them by name
                if not path.is_file() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    raise _Damaged(f"{path} was replaced while it was read")
        return words

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[BinaryIO]:
        """Open a file whose bytes have the checksum of the manifest."""
        expected = self.files.get(path.relative_to(self.folder).as_posix())
        if expected is None:
            raise self.damaged(f"it does not name {path.name}")
        _require_permission(path)
        if problem := why_unreadable(path):
            raise _Damaged(problem)
        try:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    raise _Damaged(f"{path} differs from its checksum")
                yield file
        except OSError as error:
            raise _Damaged(f"cannot read {path}: {error.strerror or error}") from error


def _require_permission(path: Path) -> None:
    """Raise `CheckpointError` for a file that is there and that this user may not read."""
    try:
        is_denied = path.is_file() and not os.access(path, os.R_OK)
    except PermissionError as error:
        raise _denied(path.parent) from error
    if is_denied:
        raise _denied(path)


def _mapped(file: BinaryIO) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _mapped_array(file: BinaryIO, path: Path) -> Shaped[np.ndarray, "..."]:
    """Map an array that `numpy.save` has written."""
    try:
        file.seek(0)
        np.lib.format.read_magic(file)
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
        if is_fortran or dtype.hasobject:
            raise _Damaged(f"{path} has numbers of another kind")
        return np.ndarray(shape, dtype, _mapped(file), offset=file.tell())
    except (ValueError, TypeError, EOFError) as error:
        raise _Damaged(f"{path} cannot be read: {error}") from error


def _require_finite(array: Shaped[np.ndarray, "..."], path: Path) -> None:
    """Raise an error if a number is NaN or infinite."""
    if array.dtype.kind != "f":
        return
    flat = array.reshape(-1)
    for start in range(0, len(flat), _BLOCK):
        if not np.isfinite(flat[start : start + _BLOCK]).all():
            raise _Damaged(f"{path} contains NaN or infinite numbers")


# Reading: the index


def _stored(reader: Reader) -> Stored:
    """Read the index that a manifest describes."""
    settings = _settings(reader)
    encoder = _encoder(reader) if settings.mode != "lexical" else None
    try:
        inputs = tuple(
            Input(each["name"], tuple(each["columns"]), each["id_column"], each["follow_links"])
            for each in _value(reader, "inputs", list)
        )
    except (TypeError, KeyError) as error:
        raise reader.damaged(f"`inputs` is invalid: {error}") from error
    return Stored(settings, _contents(reader, settings, encoder), encoder, inputs)


def _value(
    reader: Reader, key: str, kind: type[Any], is_valid: Callable[[Any], bool] = lambda value: True
) -> Any:
    """Return a value of the manifest; raise an error if it is missing or invalid."""
    value = reader.manifest.get(key)
    if type(value) is not kind or not is_valid(value):
        raise reader.damaged(f"`{key}` is {value!r:.60}")
    return value


def _settings(reader: Reader) -> IndexSettings:
    values: Mapping[str, Any] = _value(reader, "settings", dict)
    fields = {field.name: type(field.default) for field in dataclasses.fields(IndexSettings)}
    for name, kind in fields.items():
        if type(values.get(name)) not in ((kind, int) if kind is float else (kind,)):
            raise reader.damaged(f"`settings`: {name} is {values.get(name)!r:.60}")
    settings = IndexSettings(**{name: values[name] for name in fields})
    is_usual = settings.mode in MODES and settings.storage in STORAGES and 0 <= settings.weight <= 1
    if not is_usual:
        raise reader.damaged(f"`settings` are invalid: {settings}")
    return settings


def _encoder(reader: Reader) -> EncoderRecord:
    try:
        encoder = EncoderRecord.read(_value(reader, "encoder", dict), reader.folder)
    except CheckpointError as error:
        raise reader.damaged(str(error)) from error
    if type(encoder.dimension) is not int or encoder.dimension < 1:
        raise reader.damaged(f"`encoder`: dimension is {encoder.dimension!r:.60}")
    return encoder


def _contents(reader: Reader, settings: IndexSettings, encoder: EncoderRecord | None) -> Contents:
    documents = reader.table("documents", DOCUMENTS)
    passages = reader.table("passages", PASSAGES)
    for name, table in (("documents", documents), ("passages", passages)):
        if len(table) != _value(reader, name, int):
            raise reader.damaged(
                f"`{name}` is {reader.manifest[name]}, but the table has {len(table)} rows"
            )
    numbers = whole_numbers(passages["document"])
    if len(numbers) and (
        numbers[0] < 0 or numbers[-1] >= len(documents) or (np.diff(numbers) < 0).any()
    ):
        raise reader.damaged("the passages name documents that are not there")
    embeddings = None
    if encoder:
        expected = expected_arrays(settings.storage, len(passages), encoder.dimension)
        arrays = {name: reader.array(name, *each) for name, each in expected.items()}
        embeddings = StoredEmbeddings(**arrays, measured=_value(reader, "measured", int))
    typical = _value(
        reader, "typical", list, lambda pair: len(pair) == 2 and all(map(_is_number, pair))
    )
    contents = Contents(documents, passages, embeddings, known_typical=Typical(*typical))
    if settings.mode == "dense" or not _value(reader, "language", str):  # no passage has a word
        return contents
    return dataclasses.replace(contents, lexical=_lexical(reader, settings, contents))


def _lexical(reader: Reader, settings: IndexSettings, contents: Contents) -> LexicalIndex:
    """Load the words of BM25; count those of an older index again, by today's rules."""
    language = _value(reader, "language", str)
    rows = len(contents.passages)
    lexical = reader.words(lambda folder, arrays: _words(folder, arrays, language, rows))
    if reader.manifest.get("words") == WORD_RULES:
        return lexical
    log_line(f"notice: {reader.folder} counts words by older rules; they are counted again")
    return LexicalIndex.build(searched_texts(contents.passages), settings.language)


def _words(folder: Path, arrays: Arrays, language: str, rows: int) -> LexicalIndex:
    """Load BM25's files, whose arrays are a sparse matrix of words and passages."""
    data, indices, indptr = (arrays[name] for name in ("data", "indices", "indptr"))
    fits = (
        len(data) == len(indices) == indptr[-1]
        and (np.diff(indptr, prepend=0) >= 0).all()
        and indices.min(initial=0) >= 0
        and indices.max(initial=0) < rows
    )
    lexical = LexicalIndex.load(folder, language)
    if not fits or len(lexical.scores("")) != rows:
        raise ValueError("the arrays do not fit together")
    return lexical


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
