"""Embed text files: `encode` writes one file or standard output, `embed` a folder of Parquet files and can resume.

`embed` names its Parquet files after the input: `papers.csv.000000.parquet`, and so on. Each holds a run of texts and
gets its name when it is complete. The folder `OUTPUT.state` holds the settings of all files, and for each input its
SHA-256 and the list of its files. The same command, started again after a crash, embeds what is missing.
"""

import contextlib
import dataclasses
import functools
import glob
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
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
from diffcse_jax.search.records import Record, Records, in_chunks, read_all, read_records, searched_texts, table_of
from diffcse_jax.search.vector_store import (
    SETTINGS_FILE,
    EncoderRecord,
    input_record,
    read_settings,
    state_of,
    vector_table,
)

FORMATS = (".jsonl", ".npy", ".parquet")
ROWS_PER_FILE = 5_000  # a minute or two of work on a slow machine, which is what a crash can cost
PARQUET: dict[str, Any] = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}


# One file


def encode(
    inputs: Sequence[str],
    output: str,
    load: Callable[[], SentenceEncoder],
    *,
    batch_size: int = 64,
    normalize: bool = False,
    prompt_name: str | None = None,
    columns: Sequence[str] = (),
    id_column: str = "",
) -> None:
    """Encode the texts of all inputs into one file, which gets its name when it is complete.

    Arguments are the options of `diffcse encode`; `load` loads the encoder, once the inputs are open.
    """
    path = expand_path(output)
    if output != "-" and path.suffix not in FORMATS:
        raise ConfigError(f"--output {output}: the suffix chooses the format. Use one of: {', '.join(FORMATS)}")
    records = [*read_all(inputs, columns=columns, id_column=id_column, every_line=path.suffix == ".npy")]
    encoder = load()
    prompt = encoder.prompts.choose(prompt_name=prompt_name)
    texts = searched_texts(table_of(records))
    vectors = encoder.encode(texts, batch_size, normalize=normalize, show_progress=True, prompt=prompt)
    if output == "-":
        _write_lines(sys.stdout, records, vectors)
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path, safe="Nothing else was changed."), contextlib.ExitStack() as cleaning:
        cleaning.callback(partial.unlink, missing_ok=True)
        if path.suffix == ".parquet":
            settings = dataclasses.asdict(encoder.record(prompt)) | {"normalize": normalize}
            pq.write_table(vector_table(table_of(records), vectors, settings), partial, **PARQUET)
        elif path.suffix == ".npy":
            with partial.open("wb") as file:
                np.save(file, vectors)
        else:
            with partial.open("w", encoding="utf-8") as lines:
                _write_lines(lines, records, vectors)
        partial.replace(path)


def _write_lines(file: Any, records: list[Record], vectors: Float32[np.ndarray, "rows dimension"]) -> None:
    """Write an object on each line, with the shortest numbers that are exact in float32."""
    for record, vector in zip(records, vectors, strict=True):
        text = json.dumps(dict(record), ensure_ascii=False)
        file.write(f'{text[:-1]}, "embedding": [{", ".join(map(str, vector))}]}}\n')


# A folder


def embed(
    inputs: Sequence[str],
    output: Path,
    load: Callable[[], SentenceEncoder],
    *,
    rows_per_file: int | None = None,
    batch_size: int = 64,
    dtype: str = "float32",
    normalize: bool = False,
    prompt_name: str | None = None,
    columns: Sequence[str] = (),
    id_column: str = "",
    distributed: bool = False,
    passages: bool = False,
    command: str = "the same command",
) -> None:
    """Embed the texts of the inputs that are not in the folder yet.

    Arguments are the options of `diffcse embed`; `load` loads the encoder, once the inputs are open, and `command`
    resumes the work, for messages.

    Raises:
        Interrupted: Ctrl-C or SIGTERM; complete files are kept.
    """
    index, count = hosts.process_from_environment() or (0, 1)
    if distributed:
        hosts.join()
        index, count = jax.process_index(), jax.process_count()
    names = find_inputs(inputs)
    mine = [_Input(name, output, columns, id_column, passages) for name in names[index::count]]
    encoder = load()
    prompts = encoder.prompts
    prompt = prompts.document if prompt_name is None else prompts.choose(prompt_name=prompt_name)
    settings = {"dtype": dtype, "normalize": normalize, "columns": [*columns], "id_column": id_column}
    settings |= {"passages": passages, "rows_per_file": rows_per_file}
    settings = _begin(output, settings, encoder.record(prompt), [Path(name).name for name in names])
    job = _Job(output, encoder, settings, batch_size, prompt)
    try:
        with hosts.terminated_like_interrupted(), disk_errors(output, safe="Complete Parquet files are kept."):
            job.run(mine)
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"interrupted after {job.embedded:,} sentences; complete Parquet files are kept. To resume, run {command}"
        ) from error
    print(f"process {index} of {count}: {job.embedded:,} sentences of {len(mine)} files embedded", file=sys.stderr)
    hosts.wait_for_all()


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """Return the inputs that the patterns match, in the order of their names; a pattern may also be a file's name."""
    found = set()
    for pattern in patterns:
        expanded = os.path.expanduser(pattern)
        if os.path.exists(expanded) or not glob.has_magic(expanded):
            found.add(expanded)  # `read_records` reports it if it does not exist
        elif not (matches := glob.glob(expanded)):
            raise DataError(f"--input: nothing matches {pattern}. Check the pattern, and put it in quotes")
        else:
            found.update(matches)
    by_name: dict[str, str] = {}
    for path in sorted(found, key=lambda path: (Path(path).name, path)):
        if (other := by_name.setdefault(Path(path).name, path)) != path:
            raise DataError(
                f"--input: {other} and {path} have the same name, which names the Parquet files. Embed them into two "
                "folders"
            )
    return [*by_name.values()]


class _Input:
    """An input of `embed`, and what its state file says. An input without any text is not an error."""

    def __init__(self, name: str, output: Path, columns: Sequence[str], id_column: str, titled: bool):
        self.name, self.file, self.output, self.note = name, Path(name).name, output, ""
        self.state = input_record(output, self.file)
        self.records: Records | None = None
        try:
            self.records = read_records(name, columns=columns, id_column=id_column, titled=titled)
        except NoSentencesError as error:
            self.note = str(error)

    @functools.cached_property
    def digest(self) -> str:
        return self.records.digest if self.records else ""

    def is_done(self) -> bool:
        """Return whether the input is embedded and its Parquet files exist; refuse an input that has changed."""
        earlier = _read_state(self.state)
        parts = earlier.get("parts")
        if parts != [] and earlier.get("sha256", self.digest) != self.digest:
            raise DataError(
                f"{self.name} is not the text that was embedded into {self.output} under this name: its SHA-256 has "
                f"changed. Give another --output, or remove {self.state} and the Parquet files of this name"
            )
        written = isinstance(parts, list) and all((self.output / str(part)).is_file() for part in parts)
        return written and earlier.get("sha256") == self.digest


def _begin(output: Path, settings: dict[str, Any], record: EncoderRecord, names: list[str]) -> dict[str, Any]:
    """Write the settings of a new folder, or refuse other settings than those that it was begun with; return them."""
    path = state_of(output) / SETTINGS_FILE
    settings = dataclasses.asdict(record) | settings
    with (
        disk_errors(output, safe="Nothing was changed.", instead="give another --output"),
        lock(path.with_suffix(".lock"), wait=True),
    ):
        output.mkdir(parents=True, exist_ok=True)
        parts = sorted(output.glob("*.parquet"))
        earlier = _read_state(path) or (read_settings(parts[0]) if parts else {})
        settings["rows_per_file"] = settings["rows_per_file"] or earlier.get("rows_per_file") or ROWS_PER_FILE
        if earlier:
            EncoderRecord.read(earlier, path).require(record, output)
            settings["model"] = earlier["model"]
            changed = [
                f"{key}: {earlier.get(key)!r} then, {value!r} now"
                for key, value in settings.items()
                if earlier.get(key) != value
            ]
            if changed:
                raise ConfigError(
                    f"{output} was begun with other settings: {'; '.join(changed)}. Use the earlier settings, or give "
                    f"another --output, or remove {output} and {state_of(output)}"
                )
        inputs = sorted({*earlier.get("inputs", []), *names})
        if inputs != earlier.get("inputs"):
            write_json(path, settings | {"inputs": inputs})
    return settings


@dataclasses.dataclass
class _Job:
    """One call of `embed`."""

    output: Path
    encoder: SentenceEncoder
    settings: Mapping[str, Any]
    batch_size: int
    prompt: str
    embedded: int = 0

    def run(self, inputs: Sequence[_Input]) -> None:
        """Embed what is missing of the inputs."""
        pending = [each for each in inputs if not each.is_done()]
        if parts := len([*self.output.glob("*.parquet")]):
            print(
                f"resuming {self.output}: {len(inputs) - len(pending)} of {len(inputs)} inputs are complete, "
                f"{parts:,} Parquet files exist",
                file=sys.stderr,
            )
        with self.encoder.warning_once(), Progress("embedding", "sentences") as progress:
            for each in pending:
                try:
                    held = lock(each.state.with_suffix(".lock"))
                except InUseError as error:
                    raise InUseError(
                        f"{error}. Wait until it ends, or divide the inputs: give each process JAX_PROCESS_ID and "
                        "JAX_NUM_PROCESSES"
                    ) from error
                with held:
                    self._embed_input(each, progress)

    def _embed_input(self, source: _Input, progress: Progress) -> None:
        write_json(source.state, {"sha256": source.digest, "parts": None})
        parts: list[str] = []
        note = source.note
        if source.records:
            try:
                for chunk in in_chunks(source.records, self.settings["rows_per_file"]):
                    parts.append(f"{source.file}.{len(parts):06d}.parquet")
                    if (self.output / parts[-1]).is_file():
                        progress.update(len(chunk))
                    else:
                        self._write_part(parts[-1], chunk, progress)
                skipped = source.records.corpus.skipped_summary()
                note = f"{source.name}: {skipped}" if skipped else ""
            except NoSentencesError as error:  # lines without text
                note = str(error)
        if note:
            log_line(note)
        write_json(source.state, {"sha256": source.digest, "parts": parts})

    def _write_part(self, name: str, chunk: Sequence[Record], progress: Progress) -> None:
        count = len(chunk)
        if self.settings["passages"]:
            chunk = self.encoder.split(chunk, self.prompt)
        table = table_of(chunk)
        options = {"normalize": self.settings["normalize"], "prompt": self.prompt}
        vectors = self.encoder.encode(searched_texts(table), batch_size=self.batch_size, **options)
        partial = state_of(self.output) / "inputs" / f"{name}.tmp"
        try:
            stored = vector_table(table, vectors.astype(self.settings["dtype"]), self.settings)
            pq.write_table(stored, partial, **PARQUET)
            sync(partial)
            partial.replace(self.output / name)
        finally:
            partial.unlink(missing_ok=True)
        self.embedded += count
        progress.update(count)


def _read_state(path: Path) -> Mapping[str, Any]:
    """Read a state file; empty if it does not exist yet."""
    try:
        return read_json_object(path) if path.exists() else {}
    except CheckpointError as error:
        raise DataError(f"{error}. Remove that file and run the same command again") from error
