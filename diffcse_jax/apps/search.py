"""Search a text, an index or stored embeddings: hits on the terminal, or a page in the browser.

The server of the page is the standard library's, for one person on one machine. It answers `GET` only, reads no file,
and sends pages that load nothing. If only this machine may open the page, a request must name it in its Host header, so
that pages of other sites cannot read answers through a name of their own (DNS rebinding).
"""

import json
import shutil
import socket
import sys
import textwrap
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from diffcse_jax.apps import render
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import ConfigError, DataError, UserError
from diffcse_jax.hosts import log_line
from diffcse_jax.io import expand_path
from diffcse_jax.search.index import Hit, SentenceIndex, find_index, recommended
from diffcse_jax.search.records import STDIN, TEXT, as_passages, in_chunks, place_of, read_all, table_of, title_of
from diffcse_jax.search.vector_store import EncoderRecord, VectorStore

QUERIES_AT_ONCE = 1024
LINES_PER_HIT = 3
WIDEST = 120  # characters of a line
# On the page:
LONGEST_QUERY = 1000  # characters
EXAMPLES = 3  # texts before the first query

Load = Callable[[EncoderRecord | None], SentenceEncoder]  # loads the encoder, by default the recorded one

_LOCAL = ("127.0.0.1", "::1", "localhost")
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


# On the terminal


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
    index = found if isinstance(found, SentenceIndex) else None
    if index:
        mode = index.checked_mode(mode)
    elif not mode:
        # Runs recommend how to search text. A hybrid search has no threshold.
        mode, recommended_weight = recommended(None if found or threshold is not None else model)
        weight = recommended_weight if weight is None else weight
        if mode != "dense":
            log_line(f"notice: {model} recommends --mode {mode}. --mode dense compares embeddings only")

    for_words = {"--language": language, "--weight": weight is not None}
    fixed: dict[str, Any] = {}  # options that come too late
    if found:
        fixed = {"--columns": columns, "--id_column": id_column, "--no-passages": not passages}
    if index:
        fixed |= for_words | {"--storage": storage}
    if given := [name for name, value in fixed.items() if value]:
        raise ConfigError(f"{' and '.join(given)}: {source} is already built. Leave this out, or start from the text")
    if mode == "dense" and any(for_words.values()):
        raise ConfigError("--language and --weight need --mode lexical or hybrid")
    if not found and not model and mode != "lexical":
        raise ConfigError(f"{source} is text. Name the encoder with --model, for example --model minilm")

    # The text first: it may have mistakes, and an encoder takes seconds to load.
    texts = [] if found else [*read_all([source], columns=columns, id_column=id_column, titled=passages)]
    encoder = None if mode == "lexical" else _load_for(found, load, source, model)
    options: dict[str, Any] = {"mode": mode, "language": language, "weight": weight, "storage": storage}
    if isinstance(found, VectorStore):
        index = SentenceIndex.of_store(found, **options)
    elif not index and encoder:
        encoder.build_index(texts, batch_size, show_progress=True, passages=passages, **options)
        index = encoder.index
    elif not index:
        index = SentenceIndex.of(table_of(as_passages(texts) if passages else texts), **options)
    if output and not (index is found and expand_path(source) == output):
        index.save(output)

    prompt = index.query_prompt(encoder.prompts, prompt_name) if encoder else ""
    for chunk in [[text.strip() for text in queries]] if queries else _read_queries(queries_file):
        vectors = encoder.encode(chunk, batch_size, normalize=True, prompt=prompt) if encoder else None
        for text, hits in zip(chunk, index.search(vectors, top_k, threshold, texts=chunk, mode=mode), strict=True):
            print(_as_json(text, hits) if as_json else _as_text(text, hits, threshold), flush=True)


def _load_for(found: SentenceIndex | VectorStore | None, load: Load, source: str, model: str | None) -> SentenceEncoder:
    """Load the encoder. If the source holds embeddings, it must be the encoder that made them."""
    there = found.encoder if found else None
    if there is None:
        return load(None)
    try:
        encoder = load(there)
    except UserError as error:
        problem = f"{source} holds embeddings of {there}, and {model or 'this model'} cannot be loaded: {error}"
        raise type(error)(problem) from error
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
        text = title_of(hit.row) + hit.row[TEXT]
        lines += _wrapped(f"  {hit.score:6.3f}  {place_of(hit.row)}  {text}", indent=" " * 10)
    return "\n".join([*lines, ""])


def _wrapped(text: str, indent: str = "") -> list[str]:
    """Return some lines of a text, without what would move a terminal's cursor or change its colours."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    width = min(max(shutil.get_terminal_size().columns, 40), WIDEST)
    return textwrap.wrap(printable, width, subsequent_indent=indent, max_lines=LINES_PER_HIT, placeholder=" ...")


# In the browser


def serve(
    model: str,
    text: str,
    *,
    against: str = "",
    columns: Sequence[str] = (),
    top_k: int,
    host: str,
    port: int,
    mode: str = "",
    language: str = "",
    weight: float | None = None,
    passages: bool = True,
) -> None:
    """Index a text with each model and serve its search page until Ctrl-C. Arguments are those of `diffcse demo`."""
    if against == model:
        raise ConfigError(f"--against {against} is the same as --model. Name another model, or leave --against out")
    if find_index(expand_path(text)):
        raise ConfigError(f"--input {text} is an index or embeddings. Name the text that it was made of")
    records = read_texts(text, columns, passages)
    texts = [title_of(each) + each[TEXT] for each in records]
    models = {name: SentenceEncoder.from_pretrained(name) for name in filter(None, (model, against))}
    with SearchServer(Path(text).name, texts, models, top_k, host, port) as server:  # first: the port may be in use
        for name, encoder in models.items():
            log_line(f"encoding {len(records):,} texts with {name}")
            own_mode, own_weight = (mode, None) if mode else recommended(name)
            options: dict[str, Any] = {"language": language, "weight": own_weight if weight is None else weight}
            encoder.build_index(records, show_progress=True, mode=own_mode, passages=passages, **options)
        for words in (1, 20):
            server.search("word " * words)  # compiles what queries of up to 32 tokens need
        shown_host = f"[{host}]" if ":" in host else host
        print(f"search at http://{shown_host}:{server.server_port}/ (stop with Ctrl-C)", flush=True)
        if host not in _LOCAL:
            log_line(f"warning: with --host {host}, everyone who can reach this machine can search")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nstopped", file=sys.stderr)


def read_texts(text: str, columns: Sequence[str] = (), titled: bool = True) -> list[dict[str, Any]]:
    """Read what `--input` names, and return its distinct texts in their order, with their places."""
    distinct: dict[str, dict[str, Any]] = {}
    for record in read_all([text], columns=columns, titled=titled):
        distinct.setdefault(title_of(record) + record[TEXT], record)
    return [*distinct.values()]


class SearchServer(ThreadingHTTPServer):
    """Listens at an address; `serve_forever` answers requests with searches of the models, which have an index."""

    daemon_threads = True

    def __init__(self, name: str, texts: Sequence[str], models: Mapping[str, Any], top_k: int, host: str, port: int):
        self.name, self.size, self.models, self.top_k, self.host = name, len(texts), models, top_k, host
        self.examples = [text[:LONGEST_QUERY] for text in texts[:: max(1, len(texts) // EXAMPLES)]][:EXAMPLES]
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"--host {host} --port {port}: cannot listen there: {reason}. Choose another --port, or 0"
            ) from error

    def search(self, query: str) -> dict[str, list[Hit]]:
        """Return hits, best first, by the name of the model."""
        return {name: model.search_hits(query, top_k=self.top_k)[0] for name, model in self.models.items()}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that close the connection before their answer."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: SearchServer
    timeout = 20  # seconds that a browser may take to send its request
    server_version, sys_version = "diffcse", ""

    def do_GET(self) -> None:
        status, values = self._answer()
        page = {"query": "", "hits": None, "problem": "", "milliseconds": 0.0} | values
        body = render("demo.html.j2", corpus=self.server, longest_query=LONGEST_QUERY, **page).encode()
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Log nothing: queries are private."""

    def _answer(self) -> tuple[HTTPStatus, dict[str, Any]]:
        """Return the status and what the page shows."""
        address = urllib.parse.urlsplit(f"//{self.headers.get('Host', '')}")
        if self.server.host in _LOCAL and address.hostname not in _LOCAL:
            return HTTPStatus.MISDIRECTED_REQUEST, {"problem": "Open this page by its own address."}
        fields = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query, errors="replace")
        query = fields.get("q", [""])[0].strip()[:LONGEST_QUERY]
        if not query:
            return HTTPStatus.OK, {}
        start = time.perf_counter()
        try:
            hits = self.server.search(query)
        except UserError as error:
            return HTTPStatus.INTERNAL_SERVER_ERROR, {"problem": str(error)}
        return HTTPStatus.OK, {"query": query, "hits": hits, "milliseconds": 1000 * (time.perf_counter() - start)}
