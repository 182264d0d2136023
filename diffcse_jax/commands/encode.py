r"""Encodes sentences, one a line, from files or standard input into one file.

  echo 'A man plays the guitar.' | diffcse encode --model minilm
  diffcse encode --model runs/mine --input text.txt.gz --output vectors.npy
  diffcse encode --model minilm --input papers.csv --columns title \
      --id_column doi --output vectors.parquet

--input takes what training reads: files, patterns such as 'texts/*.txt', and
folders; `-` is standard input. The suffix of --output chooses the format: .jsonl
and .parquet hold each sentence with its line and its embedding; .npy holds
embeddings alone, one row for each line, so a line without a sentence is an error.
`diffcse search --input` reads the Parquet file. For a corpus that takes hours use
`diffcse embed`, which can resume.
"""

import argparse
from collections.abc import Sequence

from diffcse_jax.commands.encoder_options import (
    add_encoder_options,
    add_text_options,
    check_positive,
    closed_pipe_is_no_error,
    load_encoder,
)
from diffcse_jax.errors import reported_to_user


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_encoder_options(parser)
    add("--input", nargs="+", default=["-"], metavar="FILE", help="text; `-` is standard input (default)")
    add_text_options(parser)
    add("--normalize", action="store_true", help="scale embeddings to length 1")
    add("--output", default="-", metavar="FILE", help=".npy, .parquet or .jsonl; `-`: JSONL to stdout (default)")
    options = parser.parse_args(argv)
    with reported_to_user(), closed_pipe_is_no_error():
        check_positive(options, "batch_size")
        from diffcse_jax.apps.embed import check_format, encode

        check_format(options.output)
        encode(
            options.input,
            options.output,
            lambda: load_encoder(options),
            batch_size=options.batch_size,
            normalize=options.normalize,
            columns=options.columns,
            id_column=options.id_column,
        )


if __name__ == "__main__":
    main()
