"""Search a text, an index or stored embeddings, print the hits, and keep an index up to date.

`_open` has the ways to an index: it exists, it is made of a text, or it is brought up to date. An
index records its inputs. The same input replaces its own documents; another one needs `--add` or
`--replace`.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import regex

from diffcse_jax.apps import (
    check_options_of_mode,
    load_encoder,
    open_text,
    print_in_utf8,
    require_model,
    require_outside,
)
from diffcse_jax.commands import SearchOptions
from diffcse_jax.documents.document import Document, Documents
from diffcse_jax.documents.find import STDIN, find_source
from diffcse_jax.documents.ledger import Ledger
from diffcse_jax.documents.open import (
    documents_to_search,
    open_source,
)
from diffcse_jax.documents.tables.names import ID_COLUMNS, TEXT_COLUMNS, TITLE_COLUMN
from diffcse_jax.documents.tables.table import Table
from diffcse_jax.documents.tables.values import listed
from diffcse_jax.errors import (
    ConfigError,
    DataError,
    Interrupted,
    InUseError,
    UserError,
    printable,
)
from diffcse_jax.hosts import log_line, report
from diffcse_jax.io import expand_path
from diffcse_jax.search.changes import plan
from diffcse_jax.search.folder import Writer, is_index, require_ended, writing
from diffcse_jax.search.hits import Hit, Hits
from diffcse_jax.search.index import Index
from diffcse_jax.search.reading import read_documents, read_source
from diffcse_jax.search.recommended import recommended
from diffcse_jax.search.settings import IndexSettings, Input, input_of
from diffcse_jax.search.texts import checked_sentences
from diffcse_jax.search.vector_store import VectorStore, find_store

QUERIES_AT_ONCE = 1024
QUERY_COLUMNS = ("query", "question")  # the known names of a query, before those of a document
LINES_PER_HIT = 3
WIDEST = 120  # characters of a line
READS = ("columns", "id_column", "passages", "follow_links")  # say how text is read
OF_EMBEDDINGS = ("storage", "prompt_name", "pooler", "truncate_dim", "precision")
BUILDS = ("mode", "language", "weight", "storage", "passages")  # fix how an index is built
_INVISIBLE = regex.compile(r"\p{Default_Ignorable_Code_Point}+")


def search(options: SearchOptions) -> None:
    """Print the best texts for each query, or bring an index up to date."""
    _check(options)
    queries = _queries(options)  # before texts are encoded, which may take hours
    _print_hits(options, _open(options), queries)


def _check(options: SearchOptions) -> None:
    """Raise `UserError` for options that do not fit together, before anything is read."""
    if not all(map(str.strip, options.queries)):
        raise DataError("QUERY: the text is empty. Give a query")
    if options.input == options.queries_file == STDIN and not options.queries:
        raise ConfigError(
            "--input -: standard input cannot hold the queries, too. Give QUERY or --queries"
        )
    if options.add and options.replace:
        raise ConfigError("--add and --replace exclude each other. Give one of them")
    if (options.add or options.replace) and not options.output:
        raise ConfigError("--add and --replace need --output, the index to change")
    if options.queries and options.queries_file != STDIN:
        raise ConfigError("give QUERY or --queries, not both")
    if options.threshold is not None and not math.isfinite(options.threshold):
        raise ConfigError(f"--threshold {options.threshold}: expected a number")


# The index


def _open(options: SearchOptions) -> Index:
    """Return the index to search, with its encoder, and save it if `--output` names a folder."""
    folder = expand_path(options.input)
    if options.input != STDIN and is_index(folder):
        return _open_index(folder, options)
    require_ended(folder)
    store = None if options.input == STDIN else find_store(folder)
    if store:
        _refuse(options, READS, store.folder)
    if not options.output:
        settings = _settings(options, has_store=store is not None)
        return _build(settings, store or _read(options), options)
    require_outside(options.output, folder)
    with _writing(options.output, options.command) as writer:
        return _keep(writer, store, options)


def _open_index(folder: Path, options: SearchOptions) -> Index:
    """Open an index, and perhaps save a copy."""
    _refuse(options, [*READS, "language", "weight", "storage"], folder)
    if options.add:
        raise ConfigError(f"--add: --input {folder} is an index already. Name the text to add")
    index = Index.load(folder)
    _check_search(options, index.checked_mode(options.mode or ""))
    _give_encoder(index, options)
    if options.output and options.output.resolve() != folder.resolve():
        with _writing(options.output, options.command) as writer:
            if is_index(writer.folder) and not options.replace:
                raise ConfigError(
                    f"{options.output} is an index already. To replace it, give --replace"
                )
            index.write(writer)
    return index


@contextlib.contextmanager
def _writing(output: Path, command: str) -> Iterator[Writer]:
    """Lock the folder of an index; say what it holds if the block is interrupted.

    Raises:
        InUseError: Another command writes there.
        Interrupted: Ctrl-C ended the block.
    """
    try:
        with writing(output, wait=False) as writer:
            yield writer
    except InUseError as error:
        raise InUseError(f"{error}. Wait until it ends") from error
    except KeyboardInterrupt as error:
        left = "is the index as it was before" if is_index(output) else "is not an index yet"
        raise Interrupted(f"interrupted: {output} {left}. To start again, run {command}") from error


def _refuse(options: SearchOptions, names: Sequence[str], folder: Path) -> None:
    """Raise `ConfigError` for options that come too late: embeddings or an index exist already."""
    if flags := _flags(options, names):
        raise ConfigError(
            f"{' and '.join(flags)}: {folder} is already built. Leave this out, or start from the "
            "text"
        )


def _flags(options: SearchOptions, names: Sequence[str]) -> list[str]:
    """Return those of the named options that were given, as they are written."""
    return [
        "--no-passages" if name == "passages" and not value else f"--{name}"
        for name, value in options.given(*names).items()
        if value is not False or name == "passages"
    ]


def _settings(options: SearchOptions, *, has_store: bool = False) -> IndexSettings:
    """Return the settings of a new index: those given, or else those that a run recommends."""
    # Runs recommend how to search text. A hybrid search has no threshold.
    is_free = options.mode is not None or (not has_store and options.threshold is None)
    mode, weight = recommended(options.model if is_free else None, options.mode)
    recommendation: dict[str, Any] = {"mode": mode} | ({} if weight is None else {"weight": weight})
    settings = IndexSettings(**recommendation | options.given(*BUILDS, "id_column"))
    check_options_of_mode(options, settings.mode)
    _check_search(options, settings.mode)
    settings.check()
    if not has_store and settings.mode != "lexical" and not options.model:
        find_source(options.input, "--input")  # raises if nothing is there
        raise ConfigError(
            f"{options.input} is text. Name the encoder with --model, for example --model minilm"
        )
    if options.model and settings.mode != "lexical":
        require_model(options.model)
    return settings


def _check_search(options: SearchOptions, mode: str) -> None:
    """Raise `ConfigError` for options that a search in this mode would not read."""
    if flags := _flags(options, OF_EMBEDDINGS) if mode == "lexical" else []:
        raise ConfigError(
            f"{' and '.join(flags)}: --mode lexical reads no embeddings. Leave this out"
        )
    if options.threshold is not None and mode == "hybrid":
        raise ConfigError(
            f"--threshold {options.threshold:g}: hybrid scores have no fixed scale. Give --mode "
            "dense or lexical"
        )


def _read(options: SearchOptions) -> list[Document]:
    """Read the text. This comes before the encoder, which takes seconds to load."""
    return read_documents(open_text(options.input, options), strict=options.strict)


def _build(
    settings: IndexSettings,
    source: VectorStore | Sequence[Document],
    options: SearchOptions,
) -> Index:
    """Build an index of texts or of embeddings."""
    if isinstance(source, VectorStore):
        index = Index.of_store(source, settings)
        _give_encoder(index, options)
    else:
        encoder = None if settings.mode == "lexical" else load_encoder(options)
        index = Index.of_settings(settings, encoder)
        if encoder:
            index.query_prompt(encoder.prompts, options.prompt_name)
        index.put_input(_input(options), source, batch_size=options.batch_size, show_progress=True)
    return index


def _give_encoder(index: Index, options: SearchOptions) -> None:
    """Load the encoder of an index, unless only words are searched."""
    there = index.record
    if there is None or options.mode == "lexical":
        return
    try:
        encoder = load_encoder(options, there)
    except UserError as error:
        what = options.model or "this model"
        advice = "" if options.model else ". Name the model with --model"
        problem = (
            f"{index.name} holds embeddings of {there}, and {what} cannot be loaded: "
            f"{error}{advice}"
        )
        raise type(error)(problem) from error
    index.use(encoder)
    index.query_prompt(encoder.prompts, options.prompt_name)


# An index that is kept up to date


def _keep(writer: Writer, store: VectorStore | None, options: SearchOptions) -> Index:
    """Build the index in a folder or bring it up to date, and save it if it has changed."""
    old = Index.load(writer.folder) if is_index(writer.folder) and not options.replace else None
    if old is None:
        settings = _settings(options, has_store=store is not None)
        new = _build(settings, store or _read(options), options)
        new.write(writer)
        return new
    _check_search(options, old.checked_mode(options.mode or ""))
    options = _as_recorded(old, options)
    _require_same_settings(old, options)
    if store:
        return _keep_store(writer, old, store, options)
    documents = _read(options)
    before = old.documents
    _give_encoder(old, options)
    changes = old.put_input(
        _input(options), documents, batch_size=options.batch_size, show_progress=True
    )
    log_line(f"index: {changes}")
    if old.documents is not before:
        old.write(writer)
    return old


def _as_recorded(index: Index, options: SearchOptions) -> SearchOptions:
    """Return the options with what an index has recorded of the input; refuse another input."""
    source = _input(options)
    recorded = next((each for each in index.inputs if each.name == source.name), None)
    if recorded is None and not options.add:
        names = ", ".join(each.name or "texts given in Python" for each in index.inputs)
        raise ConfigError(
            f"--output {options.output} is an index of {names}, not of --input {options.input}. "
            "To search both, give --add. To replace the index, give --replace"
        )
    if recorded is None:
        return options
    for name in ("columns", "id_column"):
        value, there = getattr(source, name), getattr(recorded, name)
        if value and value != there:
            before, now = (
                each if isinstance(each, str) else " ".join(each) for each in (there, value)
            )
            raise ConfigError(
                f"--{name}: {options.output} was built with {before or 'none'}, not {now}. Leave "
                "this out, or give --replace to build the index again"
            )
    if source.follow_links and not recorded.follow_links:
        raise ConfigError(
            f"--follow_links: {options.output} was built without it. Leave this out, or give "
            "--replace to build the index again"
        )
    return dataclasses.replace(
        options,
        columns=recorded.columns,
        id_column=recorded.id_column or None,
        follow_links=recorded.follow_links,
    )


def _require_same_settings(index: Index, options: SearchOptions) -> None:
    """Raise `ConfigError` if an index was built with other settings than those given."""
    for name, given in options.given(*BUILDS).items():
        there = getattr(index.settings, name)
        is_detected = name == "language" and index.lexical and index.lexical.language == given
        if given != there and not is_detected:
            if name == "passages":
                flag = "--passages" if given else "--no-passages"
                before = "the other one"
            else:
                flag = f"--{name} {given}"
                before = there or "a detected one"
            raise ConfigError(
                f"{flag}: {options.output} was built with {before}. Leave this out, or give "
                "--replace to build the index again"
            )


def _keep_store(writer: Writer, old: Index, store: VectorStore, options: SearchOptions) -> Index:
    """Bring an index of embeddings up to date."""
    if old.inputs != (_input(options),):
        raise ConfigError(
            f"--add {options.input}: only texts can be added to an index, not embeddings"
        )
    if old.record:  # before the embeddings are copied
        old.record.require(store.encoder, old.name)
    new = Index.of_store(store, old.settings)
    _give_encoder(new, options)
    log_line(f"index: {plan(old.documents, new.documents, 'replace').changes}")
    if not new.documents.equals(old.documents):
        new.write(writer)
    return new


def _input(options: SearchOptions) -> Input:
    """Return how an index records the input."""
    return input_of(
        options.input,
        options.id_column or "",
        options.columns,
        follow_links=options.follow_links,
    )


# Hits


def _print_hits(options: SearchOptions, index: Index, queries: Iterable[Sequence[str]]) -> None:
    if options.as_json:
        print_in_utf8()
    for chunk in queries:
        hits_by_query = index.search(
            chunk,
            options.top_k,
            options.threshold,
            prompt_name=options.prompt_name,
            mode=options.mode or "",
        )
        for text, hits in zip(chunk, hits_by_query, strict=True):
            shown = _as_json(text, hits) if options.as_json else _as_text(text, hits)
            print(shown, flush=True)


def _queries(options: SearchOptions) -> Iterable[Sequence[str]]:
    """Return some queries at a time. A file is read at once, and standard input as it comes."""
    if options.queries:
        return [checked_sentences([text.strip() for text in options.queries])]
    ledger = Ledger(options.queries_file, strict=options.strict, noun="quer{y}")
    if options.queries_file == STDIN:
        return _typed_queries(ledger)
    texts = [*_read_queries(ledger)]
    report(ledger)
    return _in_chunks(texts, QUERIES_AT_ONCE)


def _typed_queries(ledger: Ledger) -> Iterator[list[str]]:
    """Yield queries of standard input, each by itself as it is typed on a terminal."""
    yield from _in_chunks(_read_queries(ledger), 1 if sys.stdin.isatty() else QUERIES_AT_ONCE)
    if ledger.oddities() or ledger.notes:
        report(ledger)


def _read_queries(ledger: Ledger) -> Iterator[str]:
    """Yield the queries of the ledger's file."""
    for document in read_source(_open_queries(ledger.name, ledger), ledger):
        yield " ".join(document.text().split())


def _in_chunks(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    left = iter(texts)
    while chunk := list(itertools.islice(left, size)):
        yield chunk


def _open_queries(name: str, ledger: Ledger) -> Documents:
    """Open queries. If not all columns of text are read, or several, a note says so."""
    opened = open_source(name, "--queries")
    if not opened.is_of_tables:
        return documents_to_search(opened, "--queries")
    columns = _query_columns(opened.tables)
    for table in opened.tables if columns else ():
        others = [each for each in table.text_columns if each not in columns]
        if len(columns) > 1:
            joined = listed(columns)
            ledger.note(
                f"{table.name}: read the columns {joined} as one query. To read one of them alone, "
                f"call it {QUERY_COLUMNS[0]}"
            )
        elif others:
            ledger.note(f"{table.name}: read the column {columns[0]}, not {listed(others)}")
    return documents_to_search(opened, "--queries", columns=columns)


def _query_columns(tables: Sequence[Table]) -> list[str]:
    """Return the columns that make a query; none if they need no note.

    It is a column with the known name of a query, or else what is read of documents.
    """
    for known in QUERY_COLUMNS:
        if all(known in table.columns for table in tables):
            return [known]
    columns = tables[0].columns
    if len(tables) > 1:
        return []
    for known in TEXT_COLUMNS:
        if known in columns:
            return [TITLE_COLUMN, known] if TITLE_COLUMN in columns else []
    return [each for each in tables[0].text_columns if each not in ID_COLUMNS]


def _as_json(query: str, hits: Hits) -> str:
    fields = {"query": query, "hits": [_fields(hit) for hit in hits]}
    closeness = None if hits.closeness is None else round(hits.closeness, 4)
    return json.dumps(fields | {"closeness": closeness, "note": hits.note}, ensure_ascii=False)


def _fields(hit: Hit) -> dict[str, Any]:
    return hit._asdict() | {"score": round(hit.score, 6)}


def _as_text(query: str, hits: Hits) -> str:
    """Return a query and its hits, as wide as the terminal."""
    lines = [*_wrapped(query), ""]
    labels = {"dense": "by meaning", "lexical": "by words"}
    for hit in hits:
        by_mode = [f"{labels[mode]}: {hit.ranks[mode]}" for mode in labels if mode in hit.ranks]
        ranks = f"[{', '.join(by_mode)}]" if by_mode else ""
        parts = (f"  {hit.score:6.3f}", printable(hit.place()), ranks, hit.title)
        head = "  ".join(filter(None, parts))
        lines += _wrapped(head, indent=" " * 10, break_long_words=False)  # paths can be copied
        lines += _wrapped(" " * 10 + hit.snippet, indent=" " * 10)
    if hits.note:
        lines += _wrapped(f"  {hits.note}", indent="  ")
    return "\n".join([*lines, ""])


def _wrapped(text: str, indent: str = "", *, break_long_words: bool = True) -> list[str]:
    """Return some lines of a text, without what would move a terminal's cursor or colour it."""
    text = _INVISIBLE.sub("", text)  # such as soft hyphens, which do not divide words
    visible = "".join(character if character.isprintable() else " " for character in text)
    return textwrap.wrap(
        visible,
        min(max(shutil.get_terminal_size().columns, 40), WIDEST),
        subsequent_indent=indent,
        max_lines=LINES_PER_HIT,
        placeholder=" ...",
        break_long_words=break_long_words,
        break_on_hyphens=False,
    )
