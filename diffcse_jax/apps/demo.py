"""The search page: searches a text in the browser, with one model or two side by side.

The server is the standard library's, for one person on one machine. It answers `GET /` only, reads no file, and sends
pages that load nothing. A request must name this machine in its Host header, so that pages of other sites cannot read
answers through a name of their own (DNS rebinding).
"""

import ipaddress
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from diffcse_jax.apps import render
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import ConfigError, UserError
from diffcse_jax.hosts import keep_compiled
from diffcse_jax.search.index import Hit
from diffcse_jax.search.passages import title_of
from diffcse_jax.search.records import TEXT, Record, read_all
from diffcse_jax.search.searcher import recommended

LONGEST_QUERY = 1000  # characters

_EXAMPLES = 3
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # in addition to the page's own policy
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Corpus:
    """A text with the models that search it. One thread searches at a time.

    Args:
        name: Name of the text.
        sentences: The texts to search.
        models: Encoders by name; each has an index of `sentences` before the first search.
        top_k: Number of hits of a search.

    Raises:
        ConfigError: `top_k` is below 1.
    """

    def __init__(self, name: str, sentences: Sequence[str], models: Mapping[str, Any], top_k: int = 10):
        if top_k < 1:
            raise ConfigError(f"--top_k {top_k}: a search returns at least one text. Use 1 or more")
        self.name, self.size = name, len(sentences)
        shown = min(_EXAMPLES, self.size)
        self.examples = [sentences[index * self.size // shown][:LONGEST_QUERY] for index in range(shown)]
        self._models, self._top_k, self._lock = models, top_k, threading.Lock()

    def search(self, query: str) -> dict[str, list[Hit]]:
        """Return hits, best first, by the name of the model."""
        with self._lock:
            return {name: model.search_hits(query, top_k=self._top_k)[0] for name, model in self._models.items()}


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
    """Encode a text and serve its search page until Ctrl-C.

    Args:
        model: The model to search with.
        text: What `--input` names.
        against: A second model, or an empty string.
        columns: The columns of a table to read.
        top_k: Number of hits of a search.
        host: Address or name to listen on.
        port: Port to listen on; 0 takes any free one.
        mode, language, weight, passages: As for `SentenceEncoder.build_index`.

    Raises:
        UserError: The text, a model or the address cannot be used.
    """
    if against == model:
        raise ConfigError(f"--against {against} is the same as --model. Name another model, or leave --against out")
    keep_compiled()
    records = read_texts(text, columns, passages)
    models = {name: SentenceEncoder.from_pretrained(name) for name in filter(None, (model, against))}
    corpus = Corpus(Path(text).name, [title_of(each) + each[TEXT] for each in records], models, top_k)
    with open_server(corpus, host, port) as server:  # before the slow part: the port may be in use
        for name, encoder in models.items():
            print(f"encoding {len(records):,} texts with {name}", file=sys.stderr)
            own_mode, own_weight = (mode, None) if mode else recommended(name)
            options: dict[str, Any] = {"language": language, "weight": own_weight if weight is None else weight}
            encoder.build_index(records, show_progress=True, mode=own_mode, passages=passages, **options)
        for words in (1, 20):
            corpus.search("word " * words)  # compiles what queries of up to 32 tokens need
        shown_host = f"[{host}]" if ":" in host else host
        print(f"search at http://{shown_host}:{server.server_address[1]}/ (stop with Ctrl-C)", flush=True)
        if not ipaddress.ip_address(str(server.server_address[0])).is_loopback:
            print(f"warning: with --host {host} everyone who reaches this machine can search", file=sys.stderr)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nstopped", file=sys.stderr)


def read_texts(text: str, columns: Sequence[str] = (), titled: bool = True) -> list[Record]:
    """Read the distinct texts of what `--input` names, in their order, with their places.

    Raises:
        DataError: The text cannot be read or is empty.
    """
    distinct: dict[str, Record] = {}
    for record in read_all([text], columns=columns, titled=titled):
        distinct.setdefault(title_of(record) + record[TEXT], record)
    return [*distinct.values()]


def open_server(corpus: Corpus, host: str, port: int) -> ThreadingHTTPServer:
    """Open a listening server; `serve_forever` answers requests.

    Raises:
        ConfigError: The server cannot listen there.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: a port is a number from 0 (any free port) to 65535")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host}: {getattr(error, 'strerror', None) or error}") from error
    handler = type("Handler", (_Handler,), {"corpus": corpus, "host": host})
    try:
        return type("Server", (_Server,), {"address_family": family})((host, port), handler)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {reason}. Choose another --port, or 0 for any"
        ) from error


def names_this_machine(header: str, host: str) -> bool:
    """Return whether a Host header is an IP address or a name of this machine, with any port.

    The name of another site is neither, so a page of that site cannot make a browser send such a header.
    """
    try:
        named = urllib.parse.urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return False
    try:
        ipaddress.ip_address(named)
    except ValueError:
        return named in {"localhost", host.lower(), socket.gethostname().lower()}
    return True


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that close the connection before their answer."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    corpus: Corpus
    host: str
    timeout = 20  # seconds that a browser may take to send its request
    server_version, sys_version = "diffcse", ""

    def do_GET(self) -> None:
        status, values = self._answer()
        page = {"query": "", "hits": None, "problem": "", "milliseconds": 0.0} | values
        body = render("demo.html.j2", corpus=self.corpus, longest_query=LONGEST_QUERY, **page).encode()
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *arguments: Any) -> None:
        """Log nothing: queries are private."""

    def _answer(self) -> tuple[HTTPStatus, dict[str, Any]]:
        """Return the status and what the page shows."""
        if not names_this_machine(self.headers.get("Host", ""), self.host):
            return HTTPStatus.MISDIRECTED_REQUEST, {"problem": "Open this page by its own address."}
        address = urllib.parse.urlsplit(self.path)
        if address.path != "/":
            return HTTPStatus.NOT_FOUND, {"problem": "There is no such page. Search here instead."}
        try:
            fields = urllib.parse.parse_qs(address.query, max_num_fields=10, errors="replace")
        except ValueError:
            return HTTPStatus.BAD_REQUEST, {"problem": "The address has too many parts."}
        query = fields.get("q", [""])[0].strip()
        if len(query) > LONGEST_QUERY:
            problem = f"A query may have {LONGEST_QUERY:,} characters; this one has {len(query):,}."
            return HTTPStatus.BAD_REQUEST, {"problem": problem}
        if not query:
            return HTTPStatus.OK, {}
        start = time.perf_counter()
        try:
            hits = self.corpus.search(query)
        except UserError as error:
            return HTTPStatus.INTERNAL_SERVER_ERROR, {"problem": str(error)}
        return HTTPStatus.OK, {"query": query, "hits": hits, "milliseconds": 1000 * (time.perf_counter() - start)}
