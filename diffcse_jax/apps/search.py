"""Search a text, an index or stored embeddings, and print the hits."""

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import ConfigError, DataError, UserError
from diffcse_jax.io import expand_path
from diffcse_jax.search.index import INDEX_FILE, Hit, SentenceIndex, find_index
from diffcse_jax.search.records import FILE, ID, LINE, STDIN, TEXT, in_chunks, read_all, title_of
from diffcse_jax.search.searcher import build_index, recommended
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
    mode: str = "",
    language: str = "",
    weight: float | None = None,
    storage: str = "",
    passages: bool = True,
) -> None:
    """Print the best texts for each query. Arguments are the options of `diffcse search`."""
    if not all(map(str.strip, queries)):
        raise DataError("QUERY: the text is empty. Give a query")
    if source == queries_file == STDIN and not queries:
        raise ConfigError("--input -: standard input cannot hold the queries, too. Give QUERY or --queries")
    opened = None if source == STDIN else find_index(expand_path(source))
    if opened:
        mode = mode or opened.mode
    elif not mode and threshold is not None:  # a recommended hybrid mode would refuse it
        mode = "dense"
    elif not mode:
        mode, recommended_weight = recommended(model)
        weight = recommended_weight if weight is None else weight
        if mode != "dense":
            print(f"notice: {model} recommends --mode {mode}. --mode dense compares embeddings only", file=sys.stderr)
    is_built = opened is not None and (expand_path(source) / INDEX_FILE).is_file()
    if is_built and storage:
        raise ConfigError(f"--storage {storage} is for building an index from text or from embeddings of diffcse embed")
    if (is_built or mode == "dense") and (language or weight is not None):
        raise ConfigError("--language and --weight are for building an index with --mode lexical or hybrid from text")
    options: dict[str, Any] = {"language": language, "weight": weight, "storage": storage}
    encoder = None
    if opened is None:
        if not model and mode != "lexical":
            raise ConfigError(f"{source} is text. Name the encoder with --model, for example --model minilm")
        records = [*read_all([source], columns=columns, id_column=id_column, titled=passages)]
        encoder = None if mode == "lexical" else load(None)
        prompt = encoder.prompts.document if encoder else ""
        index = build_index(encoder, records, mode, prompt, passages, batch_size=batch_size, **options)
    else:
        if opened.warning:
            print(f"warning: {opened.warning}", file=sys.stderr)
        if is_built:
            opened.checked_mode(mode)
        if mode != "lexical" and opened.encoder:
            encoder = _encoder_of(opened, opened.encoder, load, model)
            opened = opened.with_embeddings()
        index = opened.extended("dense" if is_built else mode, **options)
    if output and index.name != str(output):
        index.save(output)
    prompt = index.query_prompt(encoder.prompts, prompt_name) if encoder else ""
    for chunk in [[text.strip() for text in queries]] if queries else _read_queries(queries_file):
        vectors = encoder.encode(chunk, batch_size, normalize=True, prompt=prompt) if encoder else None
        found = index.search(vectors, top_k, threshold, texts=chunk, mode=mode)
        for text, hits in zip(chunk, found, strict=True):
            print(_as_json(text, hits) if as_json else _as_text(text, hits, threshold), flush=True)


def _encoder_of(index: SentenceIndex, there: EncoderRecord, load: Load, model: str | None) -> SentenceEncoder:
    """Load the encoder of an index, or refuse another one."""
    try:
        encoder = load(there)
    except UserError as error:
        raise type(error)(
            f"{index.name} holds embeddings of {there.model} ({there.pooler}, {there.dimension} dimensions), and "
            f"{model or 'this model'} cannot be loaded to search them: {error}"
        ) from error
    there.require(encoder.record(there.prompt), index.name)
    return encoder


def _read_queries(name: str) -> Iterator[list[str]]:
    """Yield some queries at a time; each by itself as it is typed on a terminal."""
    is_typed = name == STDIN and sys.stdin.isatty()
    for chunk in in_chunks(read_all([name], "--queries"), 1 if is_typed else QUERIES_AT_ONCE):
        yield [record[TEXT] for record in chunk]


def _as_json(query: str, hits: Sequence[Hit]) -> str:
    found = [{"score": round(hit.score, 6), **({"ranks": hit.ranks} if hit.ranks else {}), **hit.row} for hit in hits]
    return json.dumps({"query": query, "hits": found}, ensure_ascii=False)


def _as_text(query: str, hits: Sequence[Hit], threshold: float | None) -> str:
    """Return a query and its hits as wide as the terminal: score, place (the id, or file and line) and text."""
    lines = [*_wrapped(query), ""]
    if not hits:
        lines.append("  nothing" if threshold is None else f"  nothing with a score of {threshold:g} or more")
    for hit in hits:
        places = [hit.row[ID]] if ID in hit.row else [hit.row[name] for name in (FILE, LINE) if name in hit.row]
        place = ":".join(map(str, places))
        lines += _wrapped(f"  {hit.score:6.3f}  {place}  {title_of(hit.row)}{hit.row[TEXT]}", indent=" " * 10)
    return "\n".join([*lines, ""])


def _wrapped(text: str, indent: str = "") -> list[str]:
    """Return some lines of a text, without what would move a terminal's cursor or change its colours."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    width = min(max(shutil.get_terminal_size().columns, 40), WIDEST)
    return textwrap.wrap(printable, width, subsequent_indent=indent, max_lines=LINES_PER_HIT, placeholder=" ...")
