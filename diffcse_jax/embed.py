r"""Embeds files of sentences, as many as there are, into Parquet.

  diffcse embed --model runs/diffcse_base --input 'shards/*.txt.gz' \
      --output vectors
  diffcse embed --model minilm --input papers.csv --columns title abstract \
      --id_column doi --normalize --output vectors

Each output file holds a run of lines of one input file: `line` (its number
there, from 1), `id` (with --id_column), `column` (with several --columns: of
each line a row for every one of them), `sentence` and `embedding`. The folder
holds nothing else, and is read as it is by polars, pyarrow, datasets and
`diffcse search --corpus vectors`.

An output file appears under its name when it is complete, so that the same
command, started again after a crash, goes on with what is missing: nothing is
embedded twice, nothing is left out. What that takes is in `vectors.state`.

Several processes share the input files: process i of n (JAX_PROCESS_ID and
JAX_NUM_PROCESSES) takes every n-th one. They do not wait for one another, so
that one that dies stops no other, and a restart may use another number of them.
Each uses all devices of its host. With --distributed JAX finds out i and n, as
on a TPU pod; it then holds the processes together: one that is done waits for
the others, and one that dies ends them.
"""

import argparse
import contextlib
import dataclasses
import glob
import itertools
import json
import os
import re
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import pyarrow as pa
import pyarrow.parquet as pq

from diffcse_jax import hosts
from diffcse_jax.commands.encoder_options import add_encoder_options, add_text_options, check_positive, load_encoder
from diffcse_jax.commands.encoding import encode_chunk
from diffcse_jax.data.entries import in_chunks, read_entries, table_of
from diffcse_jax.data.vector_folder import OLD_SETTINGS_FILE, SETTINGS_FILE, state_of, vector_table
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import CheckpointError, ConfigError, DataError, InUseError, NoSentencesError, reported_to_user
from diffcse_jax.hosts import Progress
from diffcse_jax.io import lock, read_json_object, sha256, why_unreadable

CHARACTERS_PER_FILE = 1 << 28  # of an output file, which is held in memory until it is written
ROWS_PER_FILE = 5_000  # a minute of work or two on a slow machine, which is what a crash can cost
_REMEDY = "if neither the input nor the settings have changed since, remove that file, and the same command goes on"


def embed(
    inputs: Sequence[Path],
    output: Path,
    encoder: SentenceEncoder,
    *,
    rows_per_file: int,
    batch_size: int,
    dtype: str,
    normalize: bool = False,
    columns: Sequence[str] = (),
    id_column: str = "",
) -> int:
    """Embeds those sentences of the input files that are not embedded yet.

    Args:
        inputs: files that training reads. Lines that hold no sentence are left out, and told of; a file may hold none
            at all.
        output: the folder of Parquet files.
        encoder: turns sentences into vectors.
        rows_per_file: sentences in an output file; the last one of an input file may have fewer.
        batch_size: sentences per call of the compiled function.
        dtype: `float32` or `float16`, of the stored vectors.
        normalize: scale vectors to length 1.
        columns: of the text, in files that have some; empty: the only one, or the first whose name tells its role.
        id_column: a column whose values are kept as `id`.

    Returns:
        How many sentences this call has embedded.

    Raises:
        DataError: an input that cannot be read, or is not the file of this name that was embedded before.
    """
    settings = dataclasses.asdict(encoder.record()) | {"normalize": normalize}
    state = _state_of_inputs(output)
    state.mkdir(parents=True, exist_ok=True)
    embedded = 0
    with Progress("embedding", "sentences") as progress:
        for path in inputs:
            _require_same_file(output, path)
            done = state / f"{path.name}.done"
            with _alone(state / f"{path.name}.lock"):
                if _is_done(done, output):
                    continue
                _remove_partials(state, path)
                parts = []
                try:
                    entries = read_entries(path, "--input", columns=columns, id_column=id_column)
                    for index, chunk in enumerate(in_chunks(entries, rows_per_file, CHARACTERS_PER_FILE)):
                        part = output / f"{path.name}.{index:06d}.parquet"
                        parts.append(part.name)
                        if not part.is_file():
                            vectors = encode_chunk(chunk, encoder, batch_size, progress, normalize=normalize)
                            _write(part, vector_table(table_of(chunk), vectors.astype(dtype), settings))
                            embedded += len(chunk)
                    skipped = entries.corpus.skipped_summary()
                    note = skipped and f"{path}: {skipped}"
                except NoSentencesError as error:  # nothing to embed is nothing wrong
                    note = str(error)
                if note:
                    progress.note(note)
                done.write_text(json.dumps(parts), encoding="utf-8")
    return embedded


def _is_done(done: Path, output: Path) -> bool:
    """True if an input file is embedded and its parts are still there; the record of an earlier version names none."""
    try:
        parts = json.loads(done.read_bytes() or "[]")
        return all((output / str(part)).is_file() for part in parts)
    except (FileNotFoundError, ValueError, TypeError):  # damaged, too: what is there is found again by name
        return False


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keeps other processes from the same input file; the lock dies with its process.

    The file of the lock stays: whoever has opened it before it is removed would hold one that nobody sees.

    Raises:
        InUseError: another one works on it.
    """
    try:
        held = lock(path)
    except InUseError as error:
        raise InUseError(
            f"{error}; wait for its end, or share the work: give each process JAX_PROCESS_ID and JAX_NUM_PROCESSES"
        ) from error
    with held:
        yield


def start_output(output: Path, settings: Mapping[str, Any]) -> None:
    """Makes the folder and that of its state, or checks that it was made with the same settings.

    Args:
        output: the folder.
        settings: what all of its vectors have in common.

    Raises:
        ConfigError: other settings, whose vectors would not go together; or a folder that cannot be written.
        InUseError: an earlier version of this command is at work in the folder.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        _state_of_inputs(output).mkdir(parents=True, exist_ok=True)
        upgrade(output)
        earlier = _record_once(state_of(output) / SETTINGS_FILE, settings)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--output {output}: {error}") from error
    changed = [
        f"{key}: {earlier.get(key)!r} then, {settings.get(key)!r} now"
        for key in (*settings, *(key for key in earlier if key not in settings))
        if earlier.get(key) != settings.get(key)
    ]
    if changed:
        raise ConfigError(
            f"{output} was begun with other settings; give another --output (or remove it and {state_of(output)}), or "
            f"these: {'; '.join(changed)}"
        )


def rows_per_file_of(output: Path) -> int | None:
    """The sentences of an output file that the folder was begun with; None where it is new."""
    for path in (state_of(output) / SETTINGS_FILE, output / OLD_SETTINGS_FILE):
        if path.is_file():
            return read_json_object(path).get("rows_per_file")
    return None


def upgrade(output: Path) -> None:
    """Moves the state that an earlier version kept in the folder of vectors to where it is now.

    Raises:
        InUseError: that version is at work there.
    """
    with lock(state_of(output) / "upgrade.lock", wait=True):
        old_settings = output / OLD_SETTINGS_FILE
        if not old_settings.is_file():
            return
        for held in output.glob("_*.lock"):
            try:
                lock(held).close()
            except InUseError as error:
                raise InUseError(f"{error}, with an earlier version; wait for its end") from error
            held.unlink()
        for leftover in output.glob(".*"):
            if re.fullmatch(r"\..+\.[0-9a-f]{32}", leftover.name):
                leftover.unlink()
        for path in (*output.glob("_*.json"), *output.glob("_*.done")):
            if path != old_settings:
                path.replace(_state_of_inputs(output) / path.name.removeprefix("_"))
        old_settings.replace(state_of(output) / SETTINGS_FILE)  # last: a process that is killed before begins again


def _state_of_inputs(output: Path) -> Path:
    return state_of(output) / "inputs"


def _require_same_file(output: Path, source: Path) -> None:
    """Output files are named after their input, so another file of that name, or a changed one, must not follow it."""
    files = _files_of(source)
    now = {"bytes": sum(file.stat().st_size for file in files), "sha256": sha256(files)}
    record = _state_of_inputs(output) / f"{source.name}.json"
    earlier = _record_once(record, now)
    if unknown := sorted(earlier.keys() - now.keys()):
        raise DataError(f"{record} is damaged ({unknown[0]!r} is no key of it); {_REMEDY}")
    # A record of an earlier version holds the size alone. It still counts, so that an upgrade costs no finished work.
    changed = next((key for key in now if earlier.get(key, now[key]) != now[key]), None)
    if changed:
        raise DataError(
            f"{source} has {_told(changed, now)}; the vectors that {output} holds of a file of that name were made "
            f"from {_told(changed, earlier)}. Give another --output, or remove the files of that name from there and "
            f"from {_state_of_inputs(output)}"
        )


def _files_of(source: Path) -> list[Path]:
    """The input itself, or the files of a data-set folder."""
    return sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]


def _told(key: str, record: dict[str, Any]) -> str:
    return f"{record['bytes']:,} bytes" if key == "bytes" else f"content of SHA-256 {record['sha256'][:12]}"


def _record_once(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the JSON file; where there is none, it is written with `content`, by one process alone.

    Raises:
        DataError: the file is damaged.
    """
    if not path.is_file():
        partial = _partial(path)
        try:
            partial.write_text(json.dumps(dict(content), indent=2) + "\n", encoding="utf-8")
            _give_name_once(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*"):  # of killed processes: nobody needs it now
        leftover.unlink(missing_ok=True)
    try:
        return read_json_object(path)
    except CheckpointError as error:
        raise DataError(f"{error}; {_REMEDY}") from error


def _give_name_once(partial: Path, path: Path) -> None:
    try:
        os.link(partial, path)
    except FileExistsError:  # another process was first
        pass
    except OSError:  # a file system without links, such as a mounted bucket
        if not path.is_file():
            partial.replace(path)


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """The files that the patterns match, in order of their names; a pattern that is a file's name is that file.

    Raises:
        DataError: a pattern without a match, a file that cannot be read, or two files of one name, which output files
            could not tell apart.
    """
    paths = set()
    for pattern in patterns:
        expanded = os.path.expanduser(pattern)
        found = [expanded] if os.path.exists(expanded) else glob.glob(expanded)
        if not found:
            raise DataError(f"--input: nothing matches {pattern}")
        paths |= set(map(Path, found))
    ordered = sorted(paths, key=lambda path: (path.name, path))
    for path in ordered:
        if not os.path.isdir(path) and (problem := why_unreadable(path)):
            raise DataError(f"--input: {problem}")
    for first, second in itertools.pairwise(ordered):
        if first.name == second.name:
            raise DataError(f"--input: {first} and {second} have the same name; output files are named after it")
    return ordered


def process_of(distributed: bool) -> tuple[int, int]:
    """The index of this process, and how many there are.

    Raises:
        ConfigError: JAX_PROCESS_ID and JAX_NUM_PROCESSES that are no such pair, or no processes that JAX finds.
    """
    if distributed:
        hosts.join()
        return jax.process_index(), jax.process_count()
    return hosts.process_from_environment() or (0, 1)


def _write(path: Path, table: pa.Table) -> None:
    """Writes a file elsewhere first, so that a reader, or a restart, never takes half of it for the whole."""
    partial = _partial(_state_of_inputs(path.parent) / path.name)
    pq.write_table(table, partial, compression="zstd", use_dictionary=False, write_page_checksum=True)
    partial.replace(path)


def _remove_partials(state: Path, source: Path) -> None:
    """Removes the partial files that a killed process left of this input; no other process writes them."""
    partial = re.compile(rf"\.{re.escape(source.name)}\.(json|\d{{6}}\.parquet)\.[0-9a-f]{{32}}")
    for leftover in filter(lambda path: partial.fullmatch(path.name), state.glob(".*")):
        leftover.unlink()


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_encoder_options(parser)
    add("--input", required=True, nargs="+", action="extend", metavar="FILE", help="files, or patterns in quotes")
    add_text_options(parser)
    add("--output", required=True, type=Path, metavar="DIR", help="folder of Parquet files")
    add("--normalize", action="store_true", help="scale vectors to length 1")
    add("--dtype", choices=("float32", "float16"), default="float32", help="of the stored vectors (default: float32)")
    rows = f"sentences per output file (default: {ROWS_PER_FILE:,}, or as the folder was begun)"
    add("--rows_per_file", type=int, help=rows)
    add("--distributed", action="store_true", help="let JAX find the processes (TPU pods, GKE, Slurm)")
    options = parser.parse_args(argv)
    with reported_to_user():
        check_positive(options, "batch_size", "rows_per_file")
        inputs = find_inputs(options.input)
        index, count = process_of(options.distributed)
        encoder = load_encoder(options)
        rows_per_file = options.rows_per_file or rows_per_file_of(options.output) or ROWS_PER_FILE
        # Without what is off: earlier versions had no such options.
        settings = {"model": options.model, "precision": options.precision, "dtype": options.dtype}
        settings |= {"rows_per_file": rows_per_file, "pooler": encoder.pooler, "dimension": encoder.dimension}
        further = {name: getattr(options, name) for name in ("normalize", "columns", "id_column")}
        settings |= {"weights": encoder.fingerprint()} | {name: value for name, value in further.items() if value}
        start_output(options.output, settings)
        mine = inputs[index::count]
        try:
            written = embed(
                mine,
                options.output,
                encoder,
                rows_per_file=rows_per_file,
                batch_size=options.batch_size,
                dtype=options.dtype,
                **further,
            )
        except OSError as error:  # a full disk, say
            raise DataError(f"{error}; started again, the same command goes on with what is missing") from error
        print(f"process {index} of {count}: {written:,} sentences of {len(mine)} files embedded", file=sys.stderr)
        hosts.wait_for_all()


if __name__ == "__main__":
    main()
