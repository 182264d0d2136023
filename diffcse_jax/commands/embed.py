r"""Embeds any number of text files into a folder of Parquet files. It can resume.

  diffcse embed --model runs/diffcse_base --input 'shards/*.txt.gz' \
      --output vectors
  diffcse embed --model minilm --input papers.csv --columns title abstract \
      --id_column doi --normalize --output vectors

Each Parquet file holds a run of lines of one input: `line` (its number, from 1),
`id` (with --id_column), `column` (with several --columns: one row for each of
them), `sentence` and `embedding`. polars, pyarrow, datasets and
`diffcse search --input vectors` read the folder as it is.

A Parquet file gets its name when it is complete. The same command, started again
after a crash, embeds what is missing. Its state is in `vectors.state`.

Several processes share the inputs: process i of n (JAX_PROCESS_ID and
JAX_NUM_PROCESSES) takes every n-th one. They do not wait for one another, and a
restart may use another number of processes. Each uses all devices of its host.
With --distributed JAX finds i and n, as on a TPU pod; the processes then end
together.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from diffcse_jax.commands.encoder_options import add_encoder_options, add_text_options, check_positive, load_encoder
from diffcse_jax.errors import reported_to_user


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_encoder_options(parser)
    add("--input", required=True, nargs="+", action="extend", metavar="FILE", help="text, or patterns in quotes")
    add_text_options(parser)
    add("--output", required=True, type=Path, metavar="DIR", help="folder of Parquet files")
    add("--normalize", action="store_true", help="scale embeddings to length 1")
    add("--dtype", choices=("float32", "float16"), default="float32", help="of stored embeddings (default: float32)")
    rows = "sentences in a Parquet file (default: as in the existing files, or 5,000)"
    add("--rows_per_file", type=int, help=rows)
    add("--distributed", action="store_true", help="let JAX find the processes (TPU pods, GKE, Slurm)")
    options = parser.parse_args(argv)
    arguments = sys.argv[1:] if argv is None else argv
    with reported_to_user():
        check_positive(options, "batch_size", "rows_per_file")
        from diffcse_jax.apps.embed import embed, process_of

        embed(
            options.input,
            options.output,
            lambda: load_encoder(options),
            rows_per_file=options.rows_per_file or 0,
            batch_size=options.batch_size,
            dtype=options.dtype,
            normalize=options.normalize,
            columns=options.columns,
            id_column=options.id_column,
            process=process_of(options.distributed),
            command=shlex.join(["diffcse", "embed", *arguments]),
        )


if __name__ == "__main__":
    main()
