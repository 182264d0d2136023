"""The search page of `diffcse demo`: served, searched, refused."""

import http.client
import threading
from contextlib import closing, contextmanager

import pytest
from html_pages import checked

from diffcse_jax.apps.search import SearchServer, read_texts, serve
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.search.index import Hit, SentenceIndex
from diffcse_jax.search.records import table_of

SENTENCES = ["A <b>bold</b> sentence & more.", "Rain falls.", "Bread is baked.", "The train leaves."]


class Searcher:
    """Finds the sentences in their order, or backwards."""

    def __init__(self, step: int = 1):
        self.step, self.queries = step, []

    def search_hits(self, queries, top_k=5):
        self.queries.append(queries)
        if queries == "broken":
            raise CheckpointError("the vectors are <not> finite")
        first, second, *others = SENTENCES[:: self.step]
        hits = [Hit(1.0, {"title": "Fonts", "sentence": first}, {"dense": 1, "lexical": 7})]
        hits += [Hit(0.75, {"sentence": second}, {"lexical": 5}), *(Hit(0.5, {"sentence": text}) for text in others)]
        return [hits[:top_k]]


@contextmanager
def served(**models):
    with SearchServer("text.txt", SENTENCES, models, 3, "127.0.0.1", 0) as server:
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
    texts = ("A <b>bold</b> sentence & more.", "1.000", "place 2 with one", "not found by <i>other")
    for shown in (*texts, "by meaning: 1", "by words: 7", "by words: 5", "Fonts"):
        assert shown in page.text
    assert len([tag for tag, _ in page.tags if tag == "ol"]) == 2


def test_without_a_query_there_are_examples_that_can_be_followed():
    with served(one=Searcher()) as port:
        page = checked(ask(port, "/")[2])
        links = [link for link in page.values("href") if link.startswith("/?")]
        assert len(links) == 3
        assert [attributes["dir"] for tag, attributes in page.tags if tag == "li"] == ["auto"] * 3
        followed = checked(ask(port, links[0])[2])
        assert SENTENCES[0] in [attributes.get("value") for _, attributes in followed.tags]
        assert checked(ask(port, "/%2e%2e/%2e%2e/etc/passwd")[2]).text == page.text  # no file is read
        assert ask(port, "/", method="POST")[0] == 501
        assert ask(port, "/?q=" + "x" * 70_000)[0] == 414


@pytest.mark.parametrize(
    ("path", "headers", "status"), [("/?q=rain", {"Host": "evil.example"}, 421), ("/?q=broken", {}, 500)]
)
def test_what_is_refused(path, headers, status):
    searcher = Searcher()
    with served(one=searcher) as port:
        answered, _, text = ask(port, path, **headers)
    assert answered == status
    assert "alert" in checked(text).values("role")
    assert searcher.queries == (["broken"] if status == 500 else [])


def test_a_port_in_use_and_invalid_options(tmp_path):
    with served(one=Searcher()) as port, pytest.raises(ConfigError, match=f"--port {port}: .*Choose another --port"):
        SearchServer("t", SENTENCES, {}, 3, "127.0.0.1", port)
    with pytest.raises(ConfigError, match="--host no such host --port 0"):
        SearchServer("t", SENTENCES, {}, 3, "no such host", 0)
    with pytest.raises(ConfigError, match="--against a is the same as --model"):
        serve("a", "text.txt", against="a", top_k=1, host="127.0.0.1", port=0)
    SentenceIndex.of(table_of([{"sentence": "Rain falls."}]), mode="lexical").save(tmp_path / "index")
    with pytest.raises(ConfigError, match="index is an index or embeddings"):
        serve("a", f"{tmp_path}/index", top_k=1, host="127.0.0.1", port=0)


def test_the_command_reads_the_distinct_texts_of_its_input(tmp_path, capsys):
    (tmp_path / "text.txt").write_bytes(b"One.\nTwo.\nOne.\n\xff\n")
    texts = read_texts(f"{tmp_path}/text.txt")
    assert texts == [{"line": 1, "sentence": "One."}, {"line": 2, "sentence": "Two."}]
    assert "1 not UTF-8" in capsys.readouterr().err
    (tmp_path / "a.md").write_text("# Title\n\nThe first paragraph.\n")
    assert [each["sentence"] for each in read_texts(f"{tmp_path}/a.md")] == ["The first paragraph."]
