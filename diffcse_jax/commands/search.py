r"""Finds the sentences of a corpus that are most similar to queries.

  diffcse search --model runs/mine --corpus text.txt 'how do I stop a thread?'
  diffcse search --corpus vectors --queries questions.txt --top_k 10 \
      --threshold 0.6 --json > hits.jsonl
  diffcse search --model runs/mine --corpus text.txt --save_index index 'first'
  diffcse search --corpus index 'next'

A corpus is a file of sentences, which is encoded now; vectors that `diffcse
embed` or `diffcse encode` has written as Parquet, which are read block by block;
or an index, which is mapped into memory. The last two tell their encoder:
--model may be left out, and another one is refused. Similarities are cosines;
those of all sentences are compared, unless --faiss says otherwise.
"""

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffcse_jax.commands.encode import closed_pipe_is_no_error
from diffcse_jax.commands.encoder_options import add_encoder_options, add_text_options, check_positive, load_encoder
from diffcse_jax.errors import ConfigError, DataError, UserError, reported_to_user

if TYPE_CHECKING:
    from diffcse_jax.encoder import SentenceEncoder
    from diffcse_jax.search.index import Hit, SentenceIndex

QUERIES_AT_ONCE = 1024
LINES_PER_HIT = 3
WIDEST = 120  # characters of a line


def main(argv: Sequence[str] | None = None) -> None:
    """Searches, and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("query", nargs="*", metavar="QUERY", help="text; without any, --queries or the lines of standard input")
    add("--corpus", required=True, metavar="FILE|VECTORS|INDEX", help="sentences, vectors or an index")
    add("--queries", default="-", metavar="FILE", help="of queries; `-`: standard input (default)")
    add("--top_k", type=int, default=5, help="at most so many hits for a query (default: 5)")
    add("--threshold", type=float, help="least cosine similarity of a hit (default: any)")
    add("--json", action="store_true", help="print an object for each query, one a line")
    add_encoder_options(parser, recorded="that of the vectors")
    add_text_options(parser)
    add("--save_index", type=Path, metavar="DIR", help="keep the corpus there as an index, to search it again")
    faiss = "search by faiss: `Flat` is exact, `IVF1024,Flat` and `HNSW32` are not (extra `faiss`)"
    add("--faiss", default="", metavar="FACTORY", help=faiss)
    options = parser.parse_args(argv)
    with reported_to_user(), closed_pipe_is_no_error():
        check_positive(options, "batch_size", "top_k")
        encoder, index = open_index(options)
        for texts in queries_of(options):
            vectors = encoder.encode(texts, batch_size=options.batch_size, normalize=True)
            for text, hits in zip(texts, index.search(vectors, options.top_k, options.threshold), strict=True):
                print(as_json(text, hits) if options.json else as_text(text, hits, options.threshold), flush=True)


def open_index(options: argparse.Namespace) -> "tuple[SentenceEncoder, SentenceIndex]":
    """The encoder and the index of `--corpus`, which is encoded if it is a file of sentences.

    Raises:
        UserError: either cannot be read, or the vectors are of another encoder.
    """
    from diffcse_jax.io import expand_path
    from diffcse_jax.search.index import find_index

    path = expand_path(options.corpus)
    index = find_index(path)
    if index is None:
        if not options.model:
            raise ConfigError(f"--model: {options.corpus} is text and names no encoder; give one, such as minilm")
        encoder = load_encoder(options)
        index = encode_corpus(options, encoder)
    else:
        encoder = load_like(options, index)
    if options.faiss:
        index = index.with_faiss(options.faiss)
    if options.save_index and (options.faiss or index.name != str(options.save_index)):
        index.save(options.save_index)
    return encoder, index


def load_like(options: argparse.Namespace, index: "SentenceIndex") -> "SentenceEncoder":
    """The encoder that the index is of, or the one that the options name, if it is the same.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: it is another one.
    """
    there = index.encoder
    try:
        encoder = load_encoder(
            options, model=there.model, pooler=there.pooler, precision=there.precision, truncate_dim=there.dimension
        )
    except UserError as error:
        raise type(error)(
            f"{index.name} holds vectors of {there.model} ({there.pooler}, {there.dimension} numbers), and "
            f"{options.model or 'this model'} cannot take its place: {error}"
        ) from error
    there.require(encoder.record(), index.name)
    return encoder


def encode_corpus(options: argparse.Namespace, encoder: "SentenceEncoder") -> "SentenceIndex":
    """The index of a file of sentences: in memory, or in the folder `--save_index`."""
    from diffcse_jax.commands.encoding import encoded, entries_of
    from diffcse_jax.data.entries import table_of
    from diffcse_jax.search.index import index_of, write_index

    if options.corpus == "-" and options.queries == "-" and not options.query:
        raise ConfigError("--corpus -: standard input cannot be the queries, too; give QUERY or --queries")
    entries = entries_of([options.corpus], "--corpus", options.columns, options.id_column)
    chunks = encoded(entries, encoder, options.batch_size, normalize=True)
    tables = ((table_of(chunk), vectors) for chunk, vectors in chunks)
    if options.save_index:
        return write_index(options.save_index, tables, encoder.record())
    return index_of(tables, encoder.record())


def queries_of(options: argparse.Namespace) -> Iterator[list[str]]:
    """The queries, some of them at a time; each by itself as it is typed on a terminal.

    Raises:
        DataError: their file cannot be read, or holds none.
    """
    if options.query:
        texts = [text.strip() for text in options.query]
        if not all(texts):
            raise DataError("QUERY: empty text")
        yield texts
        return
    from diffcse_jax.commands.encoding import entries_of
    from diffcse_jax.data.entries import STDIN, in_chunks
    from diffcse_jax.data.vector_folder import TEXT

    typed = options.queries == STDIN and sys.stdin.isatty()
    entries = entries_of([options.queries], "--queries", (), "")
    for chunk in in_chunks(entries, 1 if typed else QUERIES_AT_ONCE):
        yield [entry[TEXT] for entry in chunk]


def as_json(query: str, hits: "Sequence[Hit]") -> str:
    """A query and its hits as an object on one line."""
    found = [{"score": round(hit.score, 6), **hit.row} for hit in hits]
    return json.dumps({"query": query, "hits": found}, ensure_ascii=False)


def as_text(query: str, hits: "Sequence[Hit]", threshold: float | None) -> str:
    """A query and its hits as a table for people, as wide as their terminal: score, place and sentence."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    lines = [*_wrapped(_printable(query), width), ""]
    if not hits:
        least = "" if threshold is None else f" with a similarity of {threshold:g} or more"
        return "\n".join([*lines, f"  nothing{least}", ""])
    places = [_place(hit.row) for hit in hits]
    column = min(max(map(len, places)), width // 4)
    indent = 2 + 6 + 2 + column + 2
    for hit, place in zip(hits, places, strict=True):
        text = _wrapped(_printable(hit.row["sentence"]), width - indent)
        place = place if len(place) <= column else f"...{place[3 - column :]}"
        lines.append(f"  {hit.score:6.3f}  {place:>{column}}  {text[0]}")
        lines += [" " * indent + line for line in text[1:]]
    return "\n".join([*lines, ""])


def _place(row: Mapping[str, Any]) -> str:
    """Where a sentence is from: its id, or its line, after its file where there may be several."""
    places = [row["id"]] if "id" in row else [row[name] for name in ("file", "line") if name in row]
    return _printable(":".join(map(str, places)))


def _printable(text: str) -> str:
    """The text without what would move a terminal's cursor or change its colours."""
    return "".join(character if character.isprintable() else " " for character in text)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20), max_lines=LINES_PER_HIT, placeholder=" ...") or [""]


if __name__ == "__main__":
    main()
