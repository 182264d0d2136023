"""Embeds files of sentences, as many as there are, into Parquet.

    python -m diffcse_jax.embed --model runs/diffcse_base --input 'shards/*.txt.gz' --output DIR

Each output file holds a run of lines of one input file: `line` (its number there, from 1), `sentence` and `embedding`.
It appears under its name when it is complete, so that the same command, started again after a crash, goes on with what
is missing: nothing is embedded twice, nothing is left out.

Several processes share the input files: process i of n (JAX_PROCESS_ID and JAX_NUM_PROCESSES) takes every n-th one.
They do not wait for one another, so that one that dies stops no other, and a restart may use another number of them.
Each uses all devices of its host. With `--distributed` JAX finds out i and n, as on a TPU pod; it then holds the
processes together, and one that dies ends the others.
"""

import argparse
import contextlib
import glob
import itertools
import json
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tqdm
from jaxtyping import Float

from diffcse_jax.data.corpus import Corpus
from diffcse_jax.data.lines import unreadable
from diffcse_jax.data.sources import open_corpus, sha256
from diffcse_jax.data.stored_vectors import SETTINGS_FILE, TEXT, VECTOR
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import CheckpointError, ConfigError, DataError, InUseError, NoSentencesError, reported_to_user
from diffcse_jax.groups import POOLERS, DataConfig
from diffcse_jax.runtime import hosts
from diffcse_jax.runtime.compilation import keep_compiled
from diffcse_jax.storage.files import read_json_object
from diffcse_jax.storage.workdir import lock

CHARACTERS_PER_FILE = 1 << 28  # of an output file, which is held in memory until it is written
_REMEDY = "if neither the input nor the settings have changed since, remove that file, and the same command goes on"
Lines = list[tuple[int, str]]  # number and sentence


def embed(
    inputs: Sequence[Path], output: Path, encoder: SentenceEncoder, *, rows_per_file: int, batch_size: int, dtype: str
) -> int:
    """Embeds those sentences of the input files that are not embedded yet.

    Args:
        inputs: files that training reads; of several columns the first is embedded. Lines that hold no sentence are
            left out, and told of; a file may hold none at all.
        output: the folder of Parquet files.
        encoder: turns sentences into vectors.
        rows_per_file: sentences in an output file; the last one of an input file may have fewer.
        batch_size: sentences per call of the compiled function.
        dtype: `float32` or `float16`, of the stored vectors.

    Returns:
        How many sentences this call has embedded.

    Raises:
        DataError: an input that cannot be read, or is not the file of this name that was embedded before.
    """
    embedded = 0
    with tqdm.tqdm(desc="embedding", unit=" sentences", disable=None) as progress:
        for path in inputs:
            _require_same_file(output, path)
            done = output / f"_{path.name}.done"
            with _alone(output / f"_{path.name}.lock"):
                if done.is_file():
                    continue
                _remove_partials(output, path)
                try:
                    corpus = open_corpus(DataConfig(train_file=str(path)), "--input")
                    for index, lines in enumerate(_blocks(corpus, rows_per_file)):
                        part = output / f"{path.name}.{index:06d}.parquet"
                        if not part.is_file():
                            numbers, sentences = zip(*lines, strict=True)
                            vectors = encoder.encode(sentences, batch_size=batch_size).astype(dtype)
                            _write(part, numbers, sentences, vectors)
                            embedded += len(lines)
                            progress.update(len(lines))
                    note = corpus.skipped and f"{path}: {corpus.skipped_summary()}"
                except NoSentencesError as error:  # nothing to embed is nothing wrong
                    note = str(error)
                if note:
                    progress.write(note, file=sys.stderr)
                done.touch()
    return embedded


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keeps other processes from the same input file; the lock dies with its process.

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
        path.unlink()


def start_output(output: Path, settings: dict[str, Any]) -> None:
    """Makes the folder, or checks that it was made with the same settings.

    Raises:
        ConfigError: other settings, whose vectors would not go together; or a folder that cannot be written.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        earlier = _record_once(output / SETTINGS_FILE, settings)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--output {output}: {error}") from error
    changed = [
        f"{key}: {earlier.get(key)!r} then, {value!r} now"
        for key, value in settings.items()
        if earlier.get(key) != value
    ]
    if changed:
        raise ConfigError(f"{output} was begun with other settings; give another --output, or: {'; '.join(changed)}")


def _require_same_file(output: Path, source: Path) -> None:
    """Output files are named after their input, so another file of that name, or a changed one, must not follow it."""
    files = _files_of(source)
    now = {"bytes": sum(file.stat().st_size for file in files), "sha256": sha256(files)}
    record = output / f"_{source.name}.json"
    earlier = _record_once(record, now)
    if unknown := sorted(earlier.keys() - now.keys()):
        raise DataError(f"{record} is damaged ({unknown[0]!r} is no key of it); {_REMEDY}")
    # A record of an earlier version holds the size alone. It still counts, so that an upgrade costs no finished work.
    changed = next((key for key in now if earlier.get(key, now[key]) != now[key]), None)
    if changed:
        raise DataError(
            f"{source} has {_told(changed, now)}; the vectors that {output} holds of a file of that name were made "
            f"from {_told(changed, earlier)}. Give another --output, or remove the files of that name from there"
        )


def _files_of(source: Path) -> list[Path]:
    """The input itself, or the files of a data-set folder."""
    return sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]


def _told(key: str, record: dict[str, Any]) -> str:
    return f"{record['bytes']:,} bytes" if key == "bytes" else f"content of SHA-256 {record['sha256'][:12]}"


def _record_once(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The content of the JSON file; where there is none, it is written with `content`, by one process alone.

    Raises:
        DataError: the file is damaged.
    """
    if not path.is_file():
        partial = _partial(path)
        try:
            partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
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
    """The files that the patterns match, in order of their names.

    Raises:
        DataError: a pattern without a match, a file that cannot be read, or two files of one name, which output files
            could not tell apart.
    """
    paths = set()
    for pattern in patterns:
        found = glob.glob(os.path.expanduser(pattern))
        if not found:
            raise DataError(f"--input: nothing matches {pattern}")
        paths |= set(map(Path, found))
    ordered = sorted(paths, key=lambda path: (path.name, path))
    for path in ordered:
        if not os.path.isdir(path) and (problem := unreadable(path)):
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


def _blocks(corpus: Corpus, rows: int) -> Iterator[Lines]:
    block: Lines = []
    characters = 0
    for number, row in corpus.numbered():
        block.append((int(number), row[0]))
        characters += len(row[0])
        if len(block) == rows or characters >= CHARACTERS_PER_FILE:
            yield block
            block, characters = [], 0
    if block:
        yield block


def _write(
    path: Path, numbers: Sequence[int], sentences: Sequence[str], vectors: Float[np.ndarray, "rows dimension"]
) -> None:
    """Writes a file under another name first, so that a reader, or a restart, never takes half of it for the whole."""
    embedding = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    table = pa.table({"line": pa.array(numbers, pa.int64()), TEXT: pa.array(sentences), VECTOR: embedding})
    partial = _partial(path)
    pq.write_table(table, partial, compression="zstd", use_dictionary=False, write_page_checksum=True)
    partial.replace(path)


def _remove_partials(output: Path, source: Path) -> None:
    """Removes the partial files that a killed process left of this input; no other process writes them."""
    name = glob.escape(source.name)
    for leftover in itertools.chain(output.glob(f".{name}.*"), output.glob(f"._{name}.*")):
        leftover.unlink()


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="what `SentenceEncoder.from_pretrained` takes")
    parser.add_argument("--input", required=True, nargs="+", action="extend", help="files, or patterns in quotes")
    parser.add_argument("--output", required=True, type=Path, help="folder of Parquet files")
    parser.add_argument("--pooler", choices=POOLERS, help="in place of the recorded pooler")
    parser.add_argument("--truncate_dim", type=int, help="store the first so many numbers (default: as recorded)")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32", help="of the stored vectors")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="of the computation")
    parser.add_argument("--batch_size", type=int, default=64, help="sentences per step on this host (default: 64)")
    parser.add_argument("--rows_per_file", type=int, default=50_000, help="sentences per output file (default: 50,000)")
    parser.add_argument("--distributed", action="store_true", help="let JAX find the processes (TPU pods, GKE, Slurm)")
    options = parser.parse_args(argv)
    with reported_to_user():
        for name in ("batch_size", "rows_per_file"):
            if getattr(options, name) < 1:
                raise ConfigError(f"--{name}: expected at least 1, got {getattr(options, name)}")
        inputs = find_inputs(options.input)
        index, count = process_of(options.distributed)
        keep_compiled()
        encoder = SentenceEncoder.from_pretrained(
            options.model, pooler=options.pooler, dtype=options.precision, truncate_dim=options.truncate_dim
        )
        settings = {name: getattr(options, name) for name in ("model", "precision", "dtype", "rows_per_file")}
        settings |= {"pooler": encoder.pooler, "dimension": encoder.dimension, "weights": encoder.fingerprint()}
        start_output(options.output, settings)
        mine = inputs[index::count]
        try:
            written = embed(
                mine,
                options.output,
                encoder,
                rows_per_file=options.rows_per_file,
                batch_size=options.batch_size,
                dtype=options.dtype,
            )
        except OSError as error:  # a full disk, say
            raise DataError(f"{error}; started again, the same command goes on with what is missing") from error
        print(f"process {index} of {count}: {written:,} sentences of {len(mine)} files embedded", file=sys.stderr)


if __name__ == "__main__":
    main()
