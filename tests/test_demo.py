"""The search page of `diffcse demo`: served, searched, refused."""

import dataclasses
import http.client
import socket
import threading
import time
from contextlib import closing, contextmanager

import pytest
from html_pages import checked

from diffcse_jax.apps.demo import Page, SearchServer, _Handler, examples_of, serve, settings_of
from diffcse_jax.commands import DemoOptions
from diffcse_jax.documents.document import Document, Section
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.io import write_json
from diffcse_jax.search.hits import Hit, Hits
from diffcse_jax.search.index import Index

SENTENCES = [
    "A <b>bold</b> sentence & more.",
    "Rain falls.",
    "Bread is baked.",
    "The train leaves.",
]


class Searcher:
    """Finds the sentences in their order, or backwards."""

    def __init__(self, step: int = 1):
        self.step, self.queries = step, []

    def search(self, queries, top_k=5):
        self.queries += queries
        if queries == ["broken"]:
            raise CheckpointError("the vectors are <not> finite")
        numbered = [(str(number), text) for number, text in enumerate(SENTENCES)][:: self.step]
        hits = [
            Hit(
                1 / rank,
                rank,
                key,
                "Fonts" if rank == 1 else "",
                text,
                file="<a>.csv",
                line=rank,
                snippet=text,
            )
            for rank, (key, text) in enumerate(numbered[:top_k], 1)
        ]
        hits[0] = hits[0]._replace(ranks={"dense": 1, "lexical": 7}, columns={"year": 1999})
        hits[1] = hits[1]._replace(snippet="... a part ...")
        return [Hits(hits, "Nothing is <close>.", 0.1)]


@contextmanager
def served(**models):
    page = Page("text.txt", len(SENTENCES), SENTENCES[:3], models, 3)
    with SearchServer(page, ("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def ask(port: int, path: str, method: str = "GET", **headers: str):
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read().decode()


def test_two_models_answer_side_by_side():
    models = {"one": Searcher(), "<i>other": Searcher(step=-1)}
    with served(**models) as port:
        status, headers, text = ask(port, "/?q=+what+is+%22baked%22%3F+%3Cb%3E")
    page = checked(text)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert [each.queries for each in models.values()] == [['what is "baked"? <b>']] * 2
    (box,) = (attributes for tag, attributes in page.tags if tag == "input")
    assert box["value"] == 'what is "baked"? <b>'
    assert box["dir"] == "auto"  # text may run from right to left
    assert text.count('<p dir="auto">') == 6  # three hits of each model
    assert text.count("<summary") == 2  # the passages of which only a part is shown
    texts = ("A <b>bold</b> sentence & more.", "1.000", "place 2 with one", "not found by <i>other")
    for shown in (
        *texts,
        "by meaning: 1",
        "by words: 7",
        "Fonts",
        "0 (<a>.csv:1)",
        "year: 1999",
        "a part",
    ):
        assert shown in page.text
    assert page.text.count("Nothing is <close>.") == 2
    assert len([tag for tag, _ in page.tags if tag == "ol"]) == 2


def test_without_a_query_there_are_examples_that_can_be_followed():
    with served(one=Searcher()) as port:
        page = checked(ask(port, "/")[2])
        links = [link for link in page.values("href") if link.startswith("/?")]
        assert len(links) == 3
        assert [attributes["dir"] for tag, attributes in page.tags if tag == "li"] == ["auto"] * 3
        followed = checked(ask(port, links[0])[2])
        assert SENTENCES[0] in [attributes.get("value") for _, attributes in followed.tags]
        # no file is read
        assert checked(ask(port, "/%2e%2e/%2e%2e/etc/passwd")[2]).text == page.text
        assert ask(port, "/", method="POST")[0] == 501
        assert ask(port, "/?q=" + "x" * 70_000)[0] == 414


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/?q=rain", {"Host": "evil.example"}, 421),
        ("/?q=rain", {"Host": "["}, 421),
        ("/?q=broken", {}, 500),
    ],
)
def test_what_is_refused(path, headers, status):
    searcher = Searcher()
    with served(one=searcher) as port:
        answered, _, text = ask(port, path, **headers)
    assert answered == status
    assert "alert" in checked(text).values("role")
    assert searcher.queries == (["broken"] if status == 500 else [])


MALFORMED = [
    (b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    (b"GET http://[::1/?q=a HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    (b"GET http://a]/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    (b"GET http://[x]/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    ("GET http://\u2100/ HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), 200),
    (b"GET /?q=%ff%00%ed%a0%80&q=%&=&&q HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
    (b"GET / HTTP/1.1\r\nHost: localhost:x\r\nContent-Length: x\r\n\r\n", 200),
    (b"GET / HTTP/1.1\r\nHost: \xff\r\n: x\r\nbad\r\n\r\n", 421),
    (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200, 431),
    (b"G\xb2T / HTTP/1.1\r\n\r\n", 501),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n", 0),
    (b"GET / HTTP/1.\xb2\r\n\r\n", 0),
    (b"\r\n", 0),
]


@pytest.mark.parametrize(("request_bytes", "status"), MALFORMED)
def test_malformed_requests_are_answered_without_a_traceback(request_bytes, status, capsys):
    """A request without a valid version gets a bare page, as HTTP/0.9 has no status."""
    with (
        served(one=Searcher()) as port,
        socket.create_connection(("127.0.0.1", port), 20) as client,
    ):
        client.sendall(request_bytes)
        client.shutdown(socket.SHUT_WR)
        with client.makefile("rb") as answer:
            first = answer.readline()
    assert first.startswith(f"HTTP/1.0 {status} ".encode() if status else (b"", b"<!DOCTYPE"))
    assert capsys.readouterr().err == ""


def send_slowly(client: socket.socket) -> None:
    client.sendall(b"GET / HTTP/1.1\r\n")
    for _ in range(100):
        client.sendall(b"A: b\r\n")
        time.sleep(0.05)


def test_a_slow_client_does_not_stay(monkeypatch, capsys):
    """Each of its lines comes in time, but not the whole request."""
    monkeypatch.setattr(_Handler, "timeout", 0.3)
    with (
        served(one=Searcher()) as port,
        socket.create_connection(("127.0.0.1", port), 20) as client,
    ):
        with pytest.raises(ConnectionError):
            send_slowly(client)
        assert ask(port, "/")[0] == 200
    assert capsys.readouterr().err == ""


def test_a_port_in_use_and_invalid_options(tmp_path):
    page = Page("t", 1, [], {}, 3)
    with (
        served(one=Searcher()) as port,
        pytest.raises(ConfigError, match=f"--port {port}: .*Choose another --port"),
    ):
        SearchServer(page, ("127.0.0.1", port))
    with pytest.raises(ConfigError, match="--host no such host --port 0"):
        SearchServer(page, ("no such host", 0))
    with pytest.raises(ConfigError, match="--against a is the same as --model"):
        serve(DemoOptions(model="a", input="text.txt", against="a"))
    Index(texts=["Rain falls."], mode="lexical").save(tmp_path / "index")
    with pytest.raises(ConfigError, match="index is an index or embeddings"):
        serve(DemoOptions(model="a", input=f"{tmp_path}/index"))


def test_both_models_are_compared_in_the_mode_of_the_first(tmp_path):
    write_json(tmp_path / "search.json", {"mode": "hybrid", "weight": 0.2})
    for options in (
        {"model": str(tmp_path), "against": "minilm"},
        {"model": str(tmp_path), "weight": 0.2},
    ):
        settings = settings_of(DemoOptions(input="t", **options))
        assert (settings.mode, settings.weight) == ("hybrid", 0.2)
    options = DemoOptions(model="minilm", input="t", against=str(tmp_path))
    assert settings_of(options).mode == "dense"
    write_json(tmp_path / "search.json", {"mode": "lexical", "weight": 1.0})
    options = DemoOptions(model=str(tmp_path), input="t")
    assert settings_of(options).mode == "lexical"
    assert settings_of(dataclasses.replace(options, against="minilm")).mode == "dense"


def test_examples_are_texts_of_documents():
    documents = [
        Document(str(number), (Section("", (f"Text number {number}.",)),)) for number in range(10)
    ]
    assert examples_of(documents) == ["Text number 0.", "Text number 3.", "Text number 6."]
