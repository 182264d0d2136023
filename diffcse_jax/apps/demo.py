"""The search page: searches a text in the browser, with one model or two side by side.

The server is the standard library's, for one person on one machine. It answers `GET` only, reads no file, and sends
pages that load nothing. If only this machine may open the page, a request must name it in its Host header, so that
pages of other sites cannot read answers through a name of their own (DNS rebinding).
"""

import socket
import sys
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
from diffcse_jax.search.index import Hit, recommended
from diffcse_jax.search.records import TEXT, Record, read_all, title_of

LONGEST_QUERY = 1000  # characters
EXAMPLES = 3  # texts on the page before the first query

_LOCAL = ("127.0.0.1", "::1", "localhost")
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


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
    """Encode a text and serve its search page until Ctrl-C. Arguments are the options of `diffcse demo`."""
    if against == model:
        raise ConfigError(f"--against {against} is the same as --model. Name another model, or leave --against out")
    keep_compiled()
    records = read_texts(text, columns, passages)
    texts = [title_of(each) + each[TEXT] for each in records]
    models = {name: SentenceEncoder.from_pretrained(name) for name in filter(None, (model, against))}
    with SearchServer(Path(text).name, texts, models, top_k, host, port) as server:  # first: the port may be in use
        for name, encoder in models.items():
            print(f"encoding {len(records):,} texts with {name}", file=sys.stderr)
            own_mode, own_weight = (mode, None) if mode else recommended(name)
            options: dict[str, Any] = {"language": language, "weight": own_weight if weight is None else weight}
            encoder.build_index(records, show_progress=True, mode=own_mode, passages=passages, **options)
        for words in (1, 20):
            server.search("word " * words)  # compiles what queries of up to 32 tokens need
        shown_host = f"[{host}]" if ":" in host else host
        print(f"search at http://{shown_host}:{server.server_port}/ (stop with Ctrl-C)", flush=True)
        if host not in _LOCAL:
            print(f"warning: with --host {host} everyone who reaches this machine can search", file=sys.stderr)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nstopped", file=sys.stderr)


def read_texts(text: str, columns: Sequence[str] = (), titled: bool = True) -> list[Record]:
    """Read the distinct texts of what `--input` names, in their order, with their places."""
    distinct: dict[str, Record] = {}
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
                f"--host {host} --port {port}: cannot listen there: {reason}. Choose another --port, or 0 for any "
                "free one"
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
