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
from diffcse_jax.search.index import Hit, SentenceIndex, find_index, recommended
from diffcse_jax.search.records import FILE, ID, LINE, STDIN, TEXT, as_passages, in_chunks, read_all, table_of, title_of
from diffcse_jax.search.vector_store import EncoderRecord, VectorStore

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
    found = None if source == STDIN else find_index(expand_path(source))
    built = found if isinstance(found, SentenceIndex) else None
    if not mode:
        mode, recommended_weight = _default_mode(found, model, threshold)
        weight = recommended_weight if weight is None else weight
    if built and storage:
        raise ConfigError(f"--storage {storage} is for building an index from text or from embeddings of diffcse embed")
    if (built or mode == "dense") and (language or weight is not None):
        raise ConfigError("--language and --weight are for building an index with --mode lexical or hybrid from text")
    if built:
        built.checked_mode(mode)
    if not found and not model and mode != "lexical":
        raise ConfigError(f"{source} is text. Name the encoder with --model, for example --model minilm")
    texts = [] if found else [*read_all([source], columns=columns, id_column=id_column, titled=passages)]
    encoder = None if mode == "lexical" else _load_for(found, load, source, model)

    options: dict[str, Any] = {"mode": mode, "language": language, "weight": weight, "storage": storage}
    if isinstance(found, SentenceIndex):
        index = found
    elif found:
        index = SentenceIndex.of_store(found, **options)
    elif encoder:
        encoder.build_index(texts, batch_size, show_progress=True, passages=passages, **options)
        index = encoder.index
    else:
        index = SentenceIndex.of(table_of(as_passages(texts) if passages else texts), **options)
    if output and not (built and expand_path(source) == output):
        index.save(output)
    prompt = index.query_prompt(encoder.prompts, prompt_name) if encoder else ""
    for chunk in [[text.strip() for text in queries]] if queries else _read_queries(queries_file):
        vectors = encoder.encode(chunk, batch_size, normalize=True, prompt=prompt) if encoder else None
        for text, hits in zip(chunk, index.search(vectors, top_k, threshold, texts=chunk, mode=mode), strict=True):
            print(_as_json(text, hits) if as_json else _as_text(text, hits, threshold), flush=True)


def _default_mode(
    found: SentenceIndex | VectorStore | None, model: str | None, threshold: float | None
) -> tuple[str, float | None]:
    """Return the mode of an index, or what the model's run recommends for a text, and the weight of BM25."""
    if found or threshold is not None:  # a hybrid search has no threshold
        return found.mode if isinstance(found, SentenceIndex) else "dense", None
    mode, weight = recommended(model)
    if mode != "dense":
        print(f"notice: {model} recommends --mode {mode}. --mode dense compares embeddings only", file=sys.stderr)
    return mode, weight


def _load_for(found: SentenceIndex | VectorStore | None, load: Load, source: str, model: str | None) -> SentenceEncoder:
    """Load the encoder. If the source holds embeddings, it must be the encoder that made them."""
    there = found.encoder if found else None
    if there is None:
        return load(None)
    try:
        encoder = load(there)
    except UserError as error:
        raise type(error)(
            f"{source} holds embeddings of {there}, and {model or 'this model'} cannot be loaded: {error}"
        ) from error
    there.require(encoder.record(there.prompt), source)
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
