r"""Finds the sentences of a text that are most similar to queries.

  diffcse search --model runs/mine --input text.txt 'how do I stop a thread?'
  diffcse search --input vectors --queries questions.txt --top_k 10 \
      --threshold 0.6 --json > hits.jsonl
  diffcse search --model runs/mine --input text.txt --output index 'first'
  diffcse search --input index 'next'

--input is text, as training reads it, which is encoded now; embeddings of
`diffcse embed` or `diffcse encode` (Parquet), which are read block by block; or
an index. The last two name their encoder: --model may be left out, and another
model is refused. Similarities are cosines. All sentences are compared, unless
--faiss is given.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diffcse_jax.commands.encoder_options import (
    add_encoder_options,
    add_text_options,
    check_positive,
    closed_pipe_is_no_error,
    load_encoder,
)
from diffcse_jax.errors import reported_to_user

if TYPE_CHECKING:
    from diffcse_jax.encoder import SentenceEncoder
    from diffcse_jax.search.vector_store import EncoderRecord


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("query", nargs="*", metavar="QUERY", help="text; without any, --queries or the lines of standard input")
    add("--input", required=True, metavar="FILE|VECTORS|INDEX", help="text, embeddings or an index")
    add("--queries", default="-", metavar="FILE", help="a text of queries; `-` is standard input (default)")
    add("--top_k", type=int, default=5, help="the largest number of hits for a query (default: 5)")
    add("--threshold", type=float, help="the least cosine similarity of a hit (default: any)")
    add("--json", action="store_true", help="print an object for each query, one a line")
    add_encoder_options(parser, recorded="that of the embeddings")
    add_text_options(parser)
    add("--output", type=Path, metavar="DIR", help="keep the index in this folder, to search it again")
    faiss = "search with faiss: `Flat` is exact, `IVF1024,Flat` and `HNSW32` are not (extra `search`)"
    add("--faiss", default="", metavar="FACTORY", help=faiss)
    options = parser.parse_args(argv)

    def load(record: "EncoderRecord | None") -> "SentenceEncoder":
        there = dataclasses.asdict(record) if record else {}
        return load_encoder(options, **there, truncate_dim=there.get("dimension"))

    with reported_to_user(), closed_pipe_is_no_error():
        check_positive(options, "batch_size", "top_k")
        from diffcse_jax.apps.search import search

        search(
            options.input,
            options.query,
            load,
            model=options.model or "",
            queries_file=options.queries,
            top_k=options.top_k,
            threshold=options.threshold,
            as_json=options.json,
            batch_size=options.batch_size,
            columns=options.columns,
            id_column=options.id_column,
            output=options.output,
            faiss=options.faiss,
        )


if __name__ == "__main__":
    main()
