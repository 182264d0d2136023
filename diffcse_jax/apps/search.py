"""Search a text, an index or stored embeddings, and print the hits."""

import json
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import ConfigError, DataError, UserError
from diffcse_jax.io import expand_path
from diffcse_jax.search.index import Hit, SentenceIndex, check_count, find_index
from diffcse_jax.search.records import FILE, ID, LINE, STDIN, TEXT, in_chunks, read_all, table_of
from diffcse_jax.search.vector_store import EncoderRecord

QUERIES_AT_ONCE = 1024
LINES_PER_HIT = 3
WIDEST = 120  # characters of a line

Load = Callable[[EncoderRecord | None], SentenceEncoder]  # loads the encoder, by default the recorded one


def search(
    source: str,
    queries: Sequence[str],
    load: Load,
    *,
    model: str | None = None,
    queries_file: str = STDIN,
    top_k: int = 5,
    threshold: float | None = None,
    as_json: bool = False,
    batch_size: int = 64,
    columns: Sequence[str] = (),
    id_column: str = "",
    output: Path | None = None,
    prompt_name: str | None = None,
    faiss: str = "",
) -> None:
    """Print the texts that are most similar to each query. Arguments are the options of `diffcse search`.

    Raises:
        UserError: Something cannot be read, or the embeddings have another encoder.
    """
    check_count("--top_k", top_k)  # before the text is encoded
    if threshold is not None and math.isnan(threshold):
        raise ConfigError("--threshold nan: expected a number")
    for text in queries:
        if not text.strip():
            raise DataError("QUERY: the text is empty. Give a query")
        if text.encode(errors="ignore").decode() != text:
            raise DataError(f"QUERY {text!r:.60} is not valid UTF-8. Check the terminal's encoding")
    if source == queries_file == STDIN and not queries:
        raise ConfigError("--input -: standard input cannot hold the queries, too. Give QUERY or --queries")
    index = None if source == STDIN else find_index(expand_path(source))
    if index is None:
        if not model:
            raise ConfigError(f"{source} is text. Name the encoder with --model, for example --model minilm")
        records = read_all([source], columns=columns, id_column=id_column)
        encoder = load(None)
        table = table_of([*records])
        texts, prompt = table[TEXT].to_pylist(), encoder.prompts.document
        vectors = encoder.encode(texts, batch_size, normalize=True, show_progress=True, prompt=prompt)
        index = SentenceIndex.of(table, vectors, encoder.record(prompt))
    else:
        there = index.encoder
        try:
            encoder = load(there)
        except UserError as error:
            raise type(error)(
                f"{index.name} holds embeddings of {there.model} ({there.pooler}, {there.dimension} dimensions), and "
                f"{model or 'this model'} cannot be loaded to search them: {error}"
            ) from error
        there.require(encoder.record(there.prompt), index.name)
        if warning := index.warning():
            print(f"warning: {warning}", file=sys.stderr)
    if faiss:
        index = index.with_faiss(faiss)
    if output and (faiss or index.name != str(output)):
        index.save(output)
    prompt = index.query_prompt(encoder.prompts, prompt_name)
    for chunk in [[text.strip() for text in queries]] if queries else _read_queries(queries_file):
        vectors = encoder.encode(chunk, batch_size, normalize=True, prompt=prompt)
        for text, hits in zip(chunk, index.search(vectors, top_k, threshold), strict=True):
            print(_as_json(text, hits) if as_json else _as_text(text, hits, threshold), flush=True)


def _read_queries(name: str) -> Iterator[list[str]]:
    """Yield some queries at a time; each by itself as it is typed on a terminal."""
    is_typed = name == STDIN and sys.stdin.isatty()
    for chunk in in_chunks(read_all([name], "--queries"), 1 if is_typed else QUERIES_AT_ONCE):
        yield [record[TEXT] for record in chunk]


def _as_json(query: str, hits: Sequence[Hit]) -> str:
    found = [{"score": round(hit.score, 6), **hit.row} for hit in hits]
    return json.dumps({"query": query, "hits": found}, ensure_ascii=False)


def _as_text(query: str, hits: Sequence[Hit], threshold: float | None) -> str:
    """Return a query and its hits as a table as wide as the terminal: score, place and text."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    lines = [*_wrapped(query, width), ""]
    if not hits:
        lines.append("  nothing" if threshold is None else f"  nothing with a similarity of {threshold:g} or more")
    places = [_place(hit.row) for hit in hits]
    column = min(max(map(len, places), default=0), width // 4)
    indent = 2 + 6 + 2 + column + 2
    for hit, place in zip(hits, places, strict=True):
        first, *others = _wrapped(hit.row[TEXT], width - indent)
        place = place if len(place) <= column else f"...{place[3 - column :]}"
        lines.append(f"  {hit.score:6.3f}  {place:>{column}}  {first}")
        lines += [" " * indent + line for line in others]
    return "\n".join([*lines, ""])


def _place(row: Mapping[str, Any]) -> str:
    """Return where a text comes from: its id, or its file and line."""
    places = [row[ID]] if ID in row else [row[name] for name in (FILE, LINE) if name in row]
    return _printable(":".join(map(str, places)))


def _printable(text: str) -> str:
    """Replace what would move a terminal's cursor or change its colours."""
    return "".join(character if character.isprintable() else " " for character in text)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(_printable(text), max(width, 20), max_lines=LINES_PER_HIT, placeholder=" ...") or [""]
