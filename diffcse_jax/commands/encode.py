r"""Encodes sentences, one a line, from files or standard input.

  echo 'A man plays the guitar.' | diffcse encode --model minilm
  diffcse encode text.txt.gz --model runs/mine --output vectors.npy --normalize
  diffcse encode papers.csv --columns title --id_column doi --model minilm \
      --output vectors.parquet

FILE is what training reads: txt, csv, tsv, jsonl, json (each also .gz or .xz),
Parquet; a pattern such as 'texts/*.txt', or a folder, whose files are of one
kind; `-` is standard input. The suffix of --output says what is written: .jsonl
and .parquet hold each sentence with its line and its vector; .npy holds vectors
alone, a row for each line, so that a line without a sentence is an error there.
`diffcse search --corpus` reads the Parquet file. For a corpus that takes hours
there is `diffcse embed`, which goes on after a crash.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffcse_jax.commands.encoder_options import add_encoder_options, add_text_options, check_positive, load_encoder
from diffcse_jax.errors import ConfigError, reported_to_user

if TYPE_CHECKING:
    from diffcse_jax.encoder import SentenceEncoder

FORMATS = (".jsonl", ".npy", ".parquet")

Write = Callable[[Sequence[Any], Any], None]  # of entries and their vectors


def main(argv: Sequence[str] | None = None) -> None:
    """Encodes, and writes what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("inputs", nargs="*", default=["-"], metavar="FILE", help="of sentences; `-`: standard input (default)")
    add_encoder_options(parser)
    add_text_options(parser)
    add("--normalize", action="store_true", help="scale vectors to length 1")
    add("--output", default="-", metavar="FILE", help=".npy, .parquet or .jsonl; `-`: JSONL to stdout (default)")
    options = parser.parse_args(argv)
    with reported_to_user(), closed_pipe_is_no_error():
        check_positive(options, "batch_size")
        suffix = Path(options.output).suffix
        if options.output != "-" and suffix not in FORMATS:
            raise ConfigError(f"--output {options.output}: its suffix says what is written: {', '.join(FORMATS)}")

        from diffcse_jax.commands.encoding import encoded, entries_of

        every_line = suffix == ".npy"
        entries = entries_of(options.inputs, "FILE", options.columns, options.id_column, every_line=every_line)
        encoder = load_encoder(options)
        with writer(options.output, encoder, normalized=options.normalize) as write:
            for chunk, vectors in encoded(entries, encoder, options.batch_size, normalize=options.normalize):
                write(chunk, vectors)


@contextlib.contextmanager
def writer(output: str, encoder: "SentenceEncoder", *, normalized: bool) -> Iterator[Write]:
    """A writer of entries with their vectors to a file, which has its name when it is whole, or to standard output."""
    if output == "-":
        yield _lines_to(sys.stdout)
        return
    from diffcse_jax.io import disk_errors, expand_path

    path = expand_path(output)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path, safe="Nothing else was changed."), contextlib.ExitStack() as cleaning:
        cleaning.callback(partial.unlink, missing_ok=True)
        with contextlib.ExitStack() as opened:
            match path.suffix:
                case ".jsonl":
                    yield _lines_to(opened.enter_context(partial.open("w", encoding="utf-8")))
                case ".npy":
                    yield _rows_to(partial, encoder, opened)
                case _:
                    yield _parquet_to(partial, encoder, normalized, opened)
        partial.replace(path)


def _lines_to(file: Any) -> Write:
    """An object a line; numbers have as many digits as tell them from other float32 numbers."""

    def write(entries: Sequence[Any], vectors: Any) -> None:
        for entry, vector in zip(entries, vectors, strict=True):
            text = json.dumps(dict(entry), ensure_ascii=False)
            file.write(f'{text[:-1]}, "embedding": [{", ".join(map(str, vector))}]}}\n')
        file.flush()

    return write


def _rows_to(path: Path, encoder: "SentenceEncoder", opened: contextlib.ExitStack) -> Write:
    from diffcse_jax.storage.vector_files import NpyWriter

    rows = opened.enter_context(NpyWriter(path, encoder.dimension))
    return lambda entries, vectors: rows.append(vectors)


def _parquet_to(path: Path, encoder: "SentenceEncoder", normalized: bool, opened: contextlib.ExitStack) -> Write:
    import pyarrow.parquet as pq

    from diffcse_jax.data.entries import table_of
    from diffcse_jax.data.vector_folder import vector_table

    settings = dataclasses.asdict(encoder.record()) | {"normalize": normalized}
    file: pq.ParquetWriter | None = None

    def write(entries: Sequence[Any], vectors: Any) -> None:
        nonlocal file
        table = vector_table(table_of(entries), vectors, settings)
        if file is None:  # its columns are those of the first entries
            file = opened.enter_context(pq.ParquetWriter(path, table.schema, compression="zstd", use_dictionary=False))
        file.write_table(table)

    return write


@contextlib.contextmanager
def closed_pipe_is_no_error() -> Iterator[None]:
    """Ends the command quietly where the reader of its output, such as `head`, has gone."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python flushes at its end goes there
        sys.exit(141)


if __name__ == "__main__":
    main()
