"""The search page's server: the standard library's, for one person on one machine.

It answers GET / and nothing else, reads no body and no file, and sends pages that load nothing. A request must name
this machine in its Host header, so that no other site's page can read answers by a name of its own (DNS rebinding).
"""

import http
import ipaddress
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol, runtime_checkable

from diffcse_jax.demo.page import EXAMPLES, LONGEST_QUERY, Answer, search_page
from diffcse_jax.errors import ConfigError, UserError

HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # beside the page's own policy
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
PATIENCE = 20  # seconds that a browser may take to send its request


@runtime_checkable
class Searcher(Protocol):
    """An encoder with an index."""

    def search(self, queries: str, top_k: int = 5) -> Any:
        """The most similar sentences with their similarities, best first: `Hits`, where `queries` is one string."""


class Corpus:
    """The text with the models that search it, one at a time: encoders are not asked by two threads at once.

    Args:
        name: of the text.
        sentences: the text.
        models: their names, and encoders that have an index of the sentences when the first search comes.
        top_k: how many sentences a search finds.

    Raises:
        ConfigError: `top_k` is below 1.
    """

    def __init__(self, name: str, sentences: Sequence[str], models: Mapping[str, Searcher], top_k: int = 10):
        if top_k < 1:
            raise ConfigError(f"--top_k {top_k}: a search finds at least one sentence")
        self.name, self.size = name, len(sentences)
        shown = min(EXAMPLES, self.size)
        self.examples = [sentences[index * self.size // shown][:LONGEST_QUERY] for index in range(shown)]
        self._models, self._top_k, self._lock = models, top_k, threading.Lock()

    def search(self, query: str) -> Answer:
        """The hits of each model."""
        with self._lock:
            start = time.perf_counter()
            hits = {name: list(model.search(query, top_k=self._top_k)) for name, model in self._models.items()}
            return Answer(query, hits, 1000 * (time.perf_counter() - start))


def open_server(corpus: Corpus, host: str, port: int) -> ThreadingHTTPServer:
    """A server that listens; `serve_forever` answers.

    Args:
        corpus: what is searched.
        host: the address or name to listen at.
        port: of it; 0: any free one.

    Raises:
        ConfigError: it cannot listen there.
    """
    handler = type("Handler", (_Handler,), {"corpus": corpus, "host": host})
    server = type("Server", (_Server,), {"address_family": _family(host, port)})
    try:
        return server((host, port), handler)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {reason}; give another --port, or 0 for any"
        ) from error


def names_this_machine(header: str, host: str) -> bool:
    """True if a Host header is an IP address or a name of this machine, whatever its port.

    No other site's name is either of them, so a page of that site cannot make a browser send them.
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


def _family(host: str, port: int) -> socket.AddressFamily:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from error


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a browser that went away before its answer."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    corpus: Corpus
    host: str
    timeout = PATIENCE
    server_version, sys_version = "diffcse", ""

    def do_GET(self) -> None:
        status, content = self._answer()
        body = content.encode()
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *arguments: Any) -> None:
        """Nothing: what people search for is not written down."""

    def _answer(self) -> tuple[http.HTTPStatus, str]:
        """The status and the page."""
        if not names_this_machine(self.headers.get("Host", ""), self.host):
            return http.HTTPStatus.MISDIRECTED_REQUEST, self._page(
                problem="This server answers to its own address only."
            )
        address = urllib.parse.urlsplit(self.path)
        if address.path != "/":
            return http.HTTPStatus.NOT_FOUND, self._page(problem="There is no such page; the search is here.")
        try:
            fields = urllib.parse.parse_qs(address.query, max_num_fields=10, errors="replace")
        except ValueError:
            return http.HTTPStatus.BAD_REQUEST, self._page(problem="That address has too many parts.")
        query = fields.get("q", [""])[0].strip()
        if len(query) > LONGEST_QUERY:
            problem = f"A query may have {LONGEST_QUERY:,} characters, and this one has {len(query):,}."
            return http.HTTPStatus.BAD_REQUEST, self._page(problem=problem)
        try:
            return http.HTTPStatus.OK, self._page(self.corpus.search(query) if query else None)
        except UserError as error:
            return http.HTTPStatus.INTERNAL_SERVER_ERROR, self._page(problem=str(error))

    def _page(self, answer: Answer | None = None, problem: str = "") -> str:
        corpus = self.corpus
        return search_page(corpus.name, corpus.size, corpus.examples, answer, problem)
