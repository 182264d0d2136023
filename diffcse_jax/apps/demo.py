"""A search page in the browser, for one model or two.

The server is the standard library's, for one person on one machine. It answers `GET` only, reads no
file, and sends pages that load nothing. If only this machine may open the page, a request must name
it in its Host header, so that pages of other sites cannot read answers through a name of their own
(DNS rebinding).
"""

import dataclasses
import io
import os
import socket
import sys
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from diffcse_jax.apps import check_options_of_mode, open_text, render, require_model
from diffcse_jax.commands import DemoOptions
from diffcse_jax.documents.document import Document
from diffcse_jax.documents.find import STDIN
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import ConfigError, UserError
from diffcse_jax.hosts import log_line
from diffcse_jax.io import expand_path
from diffcse_jax.search.folder import is_index
from diffcse_jax.search.hits import Hits
from diffcse_jax.search.index import Index
from diffcse_jax.search.passages import passages_of
from diffcse_jax.search.reading import read_documents
from diffcse_jax.search.recommended import recommended
from diffcse_jax.search.settings import IndexSettings, input_of
from diffcse_jax.search.vector_store import find_store

LONGEST_QUERY = 1000  # characters
EXAMPLES = 3  # texts before the first query

_LOCAL = ("127.0.0.1", "::1", "localhost")
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


def settings_of(options: DemoOptions) -> IndexSettings:
    """Return how the text is indexed for each model: both are compared in the same mode."""
    mode, weight = recommended(options.model, options.mode)
    if options.against and mode == "lexical" and options.mode is None:
        log_line("notice: --against compares models, so this searches with --mode dense")
        mode = "dense"
    check_options_of_mode(options, mode)
    recommendation: dict[str, Any] = {} if weight is None else {"weight": weight}
    chosen = recommendation | options.given("language", "weight", "passages")
    return IndexSettings(mode, **chosen)


def serve(options: DemoOptions) -> None:
    """Index a text with each model and serve its search page until Ctrl-C."""
    if options.against == options.model and options.backend == "jax":
        raise ConfigError(
            f"--against {options.against} is the same as --model. Name another model, or leave "
            "--against out"
        )
    folder = expand_path(options.input)
    if options.input != STDIN and (is_index(folder) or find_store(folder)):
        raise ConfigError(
            f"--input {options.input} is an index or embeddings. Name the text that it was made of"
        )
    settings = settings_of(options)
    settings.check()
    names = [*filter(None, (options.model, options.against))]
    for name in names:
        require_model(name)
    documents = read_documents(open_text(options.input, options), strict=options.strict)
    encoders = [SentenceEncoder.from_pretrained(options.model, backend=options.backend)]
    if options.against:
        encoders.append(SentenceEncoder.from_pretrained(options.against))
    models = {
        encoder.name if encoder.backend == "jax" else f"{encoder.name} ({encoder.backend})": (
            Index.of_settings(settings, encoder)
        )
        for encoder in encoders
    }
    address = (options.host, options.port)
    name = Path(os.path.realpath(folder)).name
    page = Page(name, len(documents), examples_of(documents), models, options.top_k)
    with SearchServer(page, address) as server:  # first: the port may be in use
        for index in models.values():
            index.put_input(input_of(options.input), documents, show_progress=True)
        for words in (1, 20):
            page.search("word " * words)  # compiles what queries of up to 32 tokens need
        _serve(server, options.host)


def _serve(server: "SearchServer", host: str) -> None:
    shown_host = f"[{host}]" if ":" in host else host
    print(f"search at http://{shown_host}:{server.server_port}/ (stop with Ctrl-C)", flush=True)
    if host not in _LOCAL:
        log_line(f"warning: with --host {host}, everyone who can reach this machine can search")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)


def examples_of(documents: Sequence[Document]) -> list[str]:
    """Return some texts, evenly spaced, that a first query may repeat."""
    chosen = documents[:: max(1, len(documents) // EXAMPLES)][:EXAMPLES]
    firsts = [passages_of(document, 0)[0] for document in chosen]
    return [" ".join(passage.text.split())[:LONGEST_QUERY] for passage in firsts]


@dataclasses.dataclass(frozen=True)
class Page:
    """What the search page shows."""

    name: str  # of the text
    size: int  # documents
    examples: Sequence[str]
    models: Mapping[str, Any]  # indexes, by the name of the model
    top_k: int

    def search(self, query: str) -> dict[str, Hits]:
        """Return hits, best first, by the name of the model."""
        return {name: index.search([query], self.top_k)[0] for name, index in self.models.items()}


class SearchServer(ThreadingHTTPServer):
    """Listens at an address; `serve_forever` answers requests with a page."""

    daemon_threads = True

    def __init__(self, page: Page, address: tuple[str, int]):
        self.page = page
        self.host = address[0]
        self.address_family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            super().__init__(address, _Handler)
        except (OSError, OverflowError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"--host {address[0]} --port {address[1]}: cannot listen there: {reason}. Choose "
                "another --port, or 0"
            ) from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that close the connection before their answer."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Request(io.RawIOBase):
    """What a browser sends on a connection, for a limited time in all."""

    def __init__(self, connection: socket.socket, seconds: float):
        self._connection, self._seconds = connection, seconds
        self._end = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(self._seconds)  # for the answer


class _Handler(BaseHTTPRequestHandler):
    server: SearchServer
    timeout = 20  # seconds that a browser may take to send its request, and to receive the answer
    server_version, sys_version = "diffcse", ""

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Request(self.connection, self.timeout))

    def do_GET(self) -> None:
        status, values = self._answer()
        page = {"query": "", "hits": None, "problem": "", "milliseconds": 0.0} | values
        page |= {"corpus": self.server.page, "longest_query": LONGEST_QUERY}
        body = render("demo.html.j2", **page).encode()
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Log nothing: queries are private."""

    def _answer(self) -> tuple[HTTPStatus, dict[str, Any]]:
        """Return the status and what the page shows."""
        if self.server.host in _LOCAL and _hostname(self.headers.get("Host", "")) not in _LOCAL:
            return HTTPStatus.MISDIRECTED_REQUEST, {"problem": "Open this page by its own address."}
        try:
            address = urllib.parse.urlsplit(self.path)
        except ValueError as error:
            return HTTPStatus.BAD_REQUEST, {"problem": f"This is not a valid address: {error}."}
        fields = urllib.parse.parse_qs(address.query, errors="replace")
        query = fields.get("q", [""])[0].strip()[:LONGEST_QUERY]
        if not query:
            return HTTPStatus.OK, {}
        start = time.perf_counter()
        try:
            hits = self.server.page.search(query)
        except UserError as error:
            return HTTPStatus.INTERNAL_SERVER_ERROR, {"problem": str(error)}
        milliseconds = 1000 * (time.perf_counter() - start)
        return HTTPStatus.OK, {"query": query, "hits": hits, "milliseconds": milliseconds}


def _hostname(address: str) -> str:
    """Return the name in a Host header; empty if it is invalid."""
    try:
        return urllib.parse.urlsplit(f"//{address}").hostname or ""
    except ValueError:
        return ""
