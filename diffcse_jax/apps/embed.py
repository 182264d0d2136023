"""Embed text files: `encode` writes one file or standard output, `embed` a folder of Parquet files and can resume.

`embed` names its Parquet files after the input: `papers.csv.000000.parquet`, and so on. Each holds a run of texts and
gets its name when it is complete. The folder `OUTPUT.state` holds the settings of all files, and for each input its
SHA-256 and the list of its files. The same command, started again after a crash, embeds what is missing.
"""

import contextlib
import dataclasses
import glob
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow.parquet as pq
from jaxtyping import Float32

from diffcse_jax import hosts
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import CheckpointError, ConfigError, DataError, Interrupted, InUseError, NoSentencesError
from diffcse_jax.hosts import Progress, log_line
from diffcse_jax.io import disk_errors, expand_path, lock, read_json_object, sync, write_json
from diffcse_jax.search.records import TEXT, Record, Records, in_chunks, read_all, read_records, table_of
from diffcse_jax.search.vector_store import (
    SETTINGS_FILE,
    EncoderRecord,
    input_record,
    read_settings,
    state_of,
    vector_table,
)

FORMATS = (".jsonl", ".npy", ".parquet")
TEXTS_AT_ONCE = 2048  # encoded together, sorted by length; progress is reported after each
ROWS_PER_FILE = 5_000  # a minute or two of work on a slow machine, which is what a crash can cost
CHARACTERS_PER_FILE = 1 << 28  # because the texts of a Parquet file are held in memory until it is written
COUNTED_BYTES = 1 << 30  # larger inputs are not counted for the progress bar
PARQUET: dict[str, Any] = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}

Chunks = Iterable[tuple[list[Record], Float32[np.ndarray, "rows dimension"]]]


# One file


def encode(
    inputs: Sequence[str],
    output: str,
    load: Callable[[], SentenceEncoder],
    *,
    batch_size: int = 64,
    normalize: bool = False,
    columns: Sequence[str] = (),
    id_column: str = "",
) -> None:
    """Encode the texts of all inputs into one file, which gets its name when it is complete.

    Args:
        inputs: What training reads, or `-` for standard input.
        output: `-` for JSONL on standard output; a file `.jsonl` or `.parquet` (texts, places and embeddings); or a
            file `.npy` (embeddings alone, one row for each line, so a line without text is an error).
        load: Loads the encoder, once the inputs are open.
        batch_size: Sentences in a call of the compiled function.
        normalize: Scale embeddings to length 1.
        columns: Columns of text, in files that have columns.
        id_column: A column whose values are kept as `id`.

    Raises:
        ConfigError: The output has an unknown suffix.
        DataError: An input cannot be read.
    """
    check_format(output)
    path = expand_path(output)
    records = read_all(inputs, columns=columns, id_column=id_column, every_line=path.suffix == ".npy")
    encoder = load()
    with Progress("encoding", "sentences") as progress:
        chunks = (
            (chunk, _encode_chunk(chunk, encoder, batch_size, normalize, progress))
            for chunk in in_chunks(records, TEXTS_AT_ONCE)
        )
        if output == "-":
            _write_lines(sys.stdout, chunks)
            return
        partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with disk_errors(path, safe="Nothing else was changed."), contextlib.ExitStack() as cleaning:
            cleaning.callback(partial.unlink, missing_ok=True)
            if path.suffix == ".jsonl":
                with partial.open("w", encoding="utf-8") as file:
                    _write_lines(file, chunks)
            elif path.suffix == ".npy":
                _write_rows(partial, chunks, encoder.dimension)
            else:
                _write_parquet(partial, chunks, dataclasses.asdict(encoder.record()) | {"normalize": normalize})
            partial.replace(path)


def check_format(output: str) -> None:
    """Refuse an output file whose suffix is unknown.

    Raises:
        ConfigError: The suffix is unknown.
    """
    if output != "-" and Path(output).suffix not in FORMATS:
        raise ConfigError(f"--output {output}: the suffix chooses the format. Use one of: {', '.join(FORMATS)}")


def _write_lines(file: Any, chunks: Chunks) -> None:
    """Write an object on each line, with the shortest numbers that are exact in float32."""
    for records, vectors in chunks:
        for record, vector in zip(records, vectors, strict=True):
            text = json.dumps(dict(record), ensure_ascii=False)
            file.write(f'{text[:-1]}, "embedding": [{", ".join(map(str, vector))}]}}\n')
        file.flush()


def _write_rows(path: Path, chunks: Chunks, dimension: int) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": (0, dimension)}
    rows = 0
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for _, vectors in chunks:
            file.write(np.ascontiguousarray(vectors, np.float32).data)
            rows += len(vectors)
        file.seek(0)  # the header has the same length for any number of rows
        np.lib.format.write_array_header_1_0(file, header | {"shape": (rows, dimension)})


def _write_parquet(path: Path, chunks: Chunks, settings: Mapping[str, Any]) -> None:
    with contextlib.ExitStack() as stack:
        file: pq.ParquetWriter | None = None
        for records, vectors in chunks:
            table = vector_table(table_of(records), vectors, settings)
            file = file or stack.enter_context(pq.ParquetWriter(path, table.schema, **PARQUET))
            file.write_table(table)


def _encode_chunk(
    chunk: Sequence[Record], encoder: SentenceEncoder, batch_size: int, normalize: bool, progress: Progress
) -> Float32[np.ndarray, "rows dimension"]:
    vectors = []
    for start in range(0, len(chunk), TEXTS_AT_ONCE):
        texts = [record[TEXT] for record in chunk[start : start + TEXTS_AT_ONCE]]
        vectors.append(encoder.encode(texts, batch_size=batch_size, normalize=normalize))
        progress.update(len(texts))
    return np.concatenate(vectors)


# A folder


def embed(
    inputs: Sequence[str],
    output: Path,
    load: Callable[[], SentenceEncoder],
    *,
    rows_per_file: int = 0,
    batch_size: int = 64,
    dtype: str = "float32",
    normalize: bool = False,
    columns: Sequence[str] = (),
    id_column: str = "",
    process: tuple[int, int] = (0, 1),
    command: str = "the same command",
) -> int:
    """Embed the texts of the inputs that the folder does not hold yet.

    Args:
        inputs: Files, patterns or folders, as training reads them. Lines without text are skipped and reported.
        output: The folder of Parquet files.
        load: Loads the encoder, once the inputs are open.
        rows_per_file: Texts in a Parquet file. By default as many as in the existing files, or 5,000.
        batch_size: Sentences in a call of the compiled function.
        dtype: The type of the stored embeddings, `float32` or `float16`.
        normalize: Scale embeddings to length 1.
        columns: Columns of text, in files that have columns.
        id_column: A column whose values are kept as `id`.
        process: The number of this process, and how many share the inputs: process i of n takes every n-th input.
        command: What resumes the work, for messages.

    Returns:
        The number of texts that this call has embedded.

    Raises:
        ConfigError: The folder was begun with another encoder or other settings.
        DataError: An input cannot be read, or has changed since it was embedded.
        InUseError: Another process embeds the same input.
        Interrupted: Ctrl-C or SIGTERM; complete files are kept.
    """
    names = find_inputs(inputs)
    mine = {name: _open(name, columns, id_column) for name in names[process[0] :: process[1]]}
    settings = {"dtype": dtype, "normalize": normalize, "columns": [*columns], "id_column": id_column}
    job = _Job(output, load(), settings, batch_size)
    is_new = job.start(rows_per_file, [Path(name).name for name in names])
    try:
        with hosts.terminated_like_interrupted(), disk_errors(output, safe="Complete Parquet files are kept."):
            job.run(mine)
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"interrupted after {job.embedded:,} sentences; complete Parquet files are kept. To resume, run {command}"
        ) from error
    finally:
        if is_new and process[1] == 1 and not any(output.glob("*.parquet")):  # nothing is left of a failure
            shutil.rmtree(state_of(output), ignore_errors=True)
            with contextlib.suppress(OSError):
                output.rmdir()
    print(
        f"process {process[0]} of {process[1]}: {job.embedded:,} sentences of {len(mine)} files embedded",
        file=sys.stderr,
    )
    hosts.wait_for_all()
    return job.embedded


class _Job:
    """One call of `embed`."""

    def __init__(self, output: Path, encoder: SentenceEncoder, settings: dict[str, Any], batch_size: int):
        self.output, self.encoder, self.batch_size = output, encoder, batch_size
        self.record = encoder.record()
        self.settings = dataclasses.asdict(self.record) | settings
        self.embedded = 0

    def start(self, rows_per_file: int, names: list[str]) -> bool:
        """Write the settings of a new folder, or compare them; return whether the folder is new.

        Raises:
            ConfigError: The folder has another encoder or other settings, or cannot be written.
        """
        path = state_of(self.output) / SETTINGS_FILE
        with (
            disk_errors(self.output, safe="Nothing was changed.", instead="give another --output"),
            lock(path.with_suffix(".lock"), wait=True),
        ):
            self.output.mkdir(parents=True, exist_ok=True)
            earlier = self._earlier_settings(path)
            self.settings["rows_per_file"] = rows_per_file or earlier.get("rows_per_file") or ROWS_PER_FILE
            if earlier:
                EncoderRecord.read(earlier, path).require(self.record, self.output)
                changed = [
                    f"{key}: {earlier.get(key)!r} then, {value!r} now"
                    for key, value in self.settings.items()
                    if key != "model" and earlier.get(key) != value
                ]
                if changed:
                    raise ConfigError(
                        f"{self.output} was begun with other settings: {'; '.join(changed)}. Use the earlier settings, "
                        f"or give another --output, or remove {self.output} and {state_of(self.output)}"
                    )
                self.settings["model"] = earlier["model"]
            inputs = sorted({*earlier.get("inputs", []), *names})
            if inputs != earlier.get("inputs"):
                write_json(path, self.settings | {"inputs": inputs})
        return not earlier

    def _earlier_settings(self, path: Path) -> dict[str, Any]:
        """Return the settings that the folder was begun with, from the state folder or from a Parquet file."""
        if path.is_file():
            try:
                return read_json_object(path)
            except CheckpointError as error:
                raise DataError(f"{error}. Remove that file and run the same command again") from error
        parts = sorted(self.output.glob("*.parquet"))
        return dict(read_settings(parts[0])) if parts else {}

    def run(self, inputs: Mapping[str, Records | NoSentencesError]) -> None:
        """Embed what is missing of the inputs."""
        pending = {name: records for name, records in inputs.items() if not self._is_done(name, records)}
        parts = len([*self.output.glob("*.parquet")])
        if parts:
            print(
                f"resuming {self.output}: {len(inputs) - len(pending)} of {len(inputs)} inputs are complete, "
                f"{parts:,} Parquet files exist",
                file=sys.stderr,
            )
        with Progress("embedding", "sentences", _count(pending)) as progress:
            for name, records in pending.items():
                with _alone(input_record(self.output, Path(name).name).with_suffix(".lock")):
                    self._embed_input(name, records, progress)

    def _is_done(self, name: str, records: Records | NoSentencesError) -> bool:
        """Tell whether the input is embedded and its Parquet files exist.

        Raises:
            DataError: The input has changed since, or its state file is damaged.
        """
        path = input_record(self.output, Path(name).name)
        try:
            earlier = read_json_object(path) if path.exists() else {}
        except CheckpointError as error:
            raise DataError(f"{error}. Remove that file and run the same command again") from error
        parts = earlier.get("parts")
        if parts != [] and earlier.get("sha256", _digest(records)) != _digest(records):
            raise DataError(
                f"{name} is not the text that {self.output} holds embeddings of under this name: its SHA-256 has "
                f"changed. Give another --output, or remove {path} and the Parquet files of this name"
            )
        written = isinstance(parts, list) and all((self.output / str(part)).is_file() for part in parts)
        return written and earlier.get("sha256") == _digest(records)

    def _embed_input(self, name: str, records: Records | NoSentencesError, progress: Progress) -> None:
        path, digest = input_record(self.output, Path(name).name), _digest(records)
        write_json(path, {"sha256": digest, "parts": None})
        parts: list[str] = []
        note = str(records)
        if isinstance(records, Records):
            try:
                for chunk in in_chunks(records, self.settings["rows_per_file"], CHARACTERS_PER_FILE):
                    parts.append(f"{Path(name).name}.{len(parts):06d}.parquet")
                    if (self.output / parts[-1]).is_file():
                        progress.update(len(chunk))
                    else:
                        self._write_part(parts[-1], chunk, progress)
                skipped = records.corpus.skipped_summary()
                note = f"{name}: {skipped}" if skipped else ""
            except NoSentencesError as error:  # lines without text
                note = str(error)
        if note:
            log_line(note)
        write_json(path, {"sha256": digest, "parts": parts})

    def _write_part(self, name: str, chunk: Sequence[Record], progress: Progress) -> None:
        vectors = _encode_chunk(chunk, self.encoder, self.batch_size, self.settings["normalize"], progress)
        partial = state_of(self.output) / "inputs" / f"{name}.tmp"
        try:
            table = vector_table(table_of(chunk), vectors.astype(self.settings["dtype"]), self.settings)
            pq.write_table(table, partial, **PARQUET)
            sync(partial)
            partial.replace(self.output / name)
        finally:
            partial.unlink(missing_ok=True)
        self.embedded += len(chunk)


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """Return the inputs that the patterns match, in the order of their names; a pattern may also be a file's name.

    Raises:
        DataError: A pattern matches nothing, or two inputs have the same name, which names their Parquet files.
    """
    found = set()
    for pattern in patterns:
        expanded = os.path.expanduser(pattern)
        if os.path.exists(expanded) or not glob.has_magic(expanded):
            found.add(expanded)  # `read_records` reports it if it does not exist
        elif matches := glob.glob(expanded):
            found |= {*matches}
        else:
            raise DataError(f"--input: nothing matches {pattern}. Check the pattern, and put it in quotes")
    by_name: dict[str, str] = {}
    for path in sorted(found, key=lambda path: (Path(path).name, path)):
        other = by_name.setdefault(Path(path).name, path)
        if other != path:
            raise DataError(
                f"--input: {other} and {path} have the same name, which names the Parquet files. Embed them into two "
                "folders"
            )
    return [*by_name.values()]


def process_of(distributed: bool) -> tuple[int, int]:
    """Return the number of this process, and how many there are.

    Raises:
        ConfigError: JAX_PROCESS_ID and JAX_NUM_PROCESSES are invalid, or JAX finds no other processes.
    """
    if distributed:
        hosts.join()
        return jax.process_index(), jax.process_count()
    return hosts.process_from_environment() or (0, 1)


def _open(name: str, columns: Sequence[str], id_column: str) -> Records | NoSentencesError:
    """Open an input; an input without any text is not an error."""
    try:
        return read_records(name, columns=columns, id_column=id_column)
    except NoSentencesError as error:
        return error


def _digest(records: Records | NoSentencesError) -> str:
    return records.digest if isinstance(records, Records) else ""


def _count(inputs: Mapping[str, Records | NoSentencesError]) -> int | None:
    """Count the texts of the inputs; None if that takes long."""
    if sum(os.path.getsize(name) for name in inputs if os.path.isfile(name)) > COUNTED_BYTES:
        return None
    count = 0
    for records in inputs.values():
        with contextlib.suppress(NoSentencesError):
            count += sum(1 for _ in records) if isinstance(records, Records) else 0
    return count


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes from the same input.

    Raises:
        InUseError: Another process works on it.
    """
    try:
        held = lock(path)
    except InUseError as error:
        raise InUseError(
            f"{error}. Wait for its end, or share the inputs: give each process JAX_PROCESS_ID and JAX_NUM_PROCESSES"
        ) from error
    with held:
        yield
