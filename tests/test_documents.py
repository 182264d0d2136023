"""Documents of files and folders, those that are held out, and the rows that are made of the others."""

import collections
import errno
import gzip
import itertools
import json
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tokens import word_tokenizer

from diffcse_jax.config import Config
from diffcse_jax.data import docstrings, documents, file_sets, held_out, pairs, tokens
from diffcse_jax.data.corpus import Corpus
from diffcse_jax.data.examples import examples_of
from diffcse_jax.data.sources import open_corpus, open_documents
from diffcse_jax.errors import DataError
from diffcse_jax.evaluation.dev import build_dev_evaluation
from diffcse_jax.groups import DataConfig

DOCUMENTS = (
    ("A clock", ["This is a clock that tells the time.", "It has two hands of brass.", "It is rather old by now."]),
    ("A boat", ["This is a boat on the river.", "It has two sails and one mast."]),
    ("A word", ["Word."]),
)


def write(folder: Path, form: str) -> str:
    """`DOCUMENTS` in one of the forms that documents may have."""
    texts = [" ".join([f"{title} is what this is about.", *sentences]) for title, sentences in DOCUMENTS]
    match form:
        case "blank lines":
            content = "\n\n".join("\n".join([f"{title} is what this is about.", *text]) for title, text in DOCUMENTS)
            (folder / "a.txt").write_text(content)
        case "paragraphs":
            (folder / "a.txt").write_text("\n\n".join(texts))
        case "lines":
            (folder / "a.txt").write_text("\n".join(texts) + "\n\n")
        case "json":
            rows = [{"title": title, "text": " ".join(text), "n": 1} for title, text in DOCUMENTS]
            (folder / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
            return str(folder / "a.jsonl.gz")
        case "json list" | "parquet":
            rows = [{"title": title, "text": " ".join(text), "n": 1} for title, text in DOCUMENTS]
            if form == "parquet":
                pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
                return str(folder / "a.parquet")
            (folder / "a.json").write_text(json.dumps(rows, indent=2))
            return str(folder / "a.json")
        case "json shards" | "json pattern":
            (folder / "shards").mkdir()
            for number, (title, text) in enumerate(DOCUMENTS):
                row = json.dumps({"title": title, "text": " ".join(text)})
                (folder / f"shards/{number}.jsonl").write_text(row)
            (folder / "shards/_state.json").write_text("{}")
            return str(folder / "shards") + "/[0-9].jsonl" * (form == "json pattern")
        case "pattern":
            return f"{Path(write(folder, 'files'))}/**/*.md"
        case "files":
            (folder / "docs/more").mkdir(parents=True)
            (folder / "docs/.git").mkdir()
            (folder / "docs/.git/a.txt").write_text("Not this.")
            for number, (title, text) in enumerate(DOCUMENTS):
                path = folder / "docs" / ("more" if number else "") / f"{number}.md"
                path.write_text(f"# {title}\n\n{' '.join(text)}\n")
            return str(folder / "docs")
    return str(folder / "a.txt")


def opened(train_file: str | Path, pairs: str, **options) -> Corpus:
    return open_corpus(DataConfig(train_file=str(train_file), pairs=pairs, **options))


TITLED = ["json", "json list", "json shards", "json pattern", "parquet", "files", "pattern"]


@pytest.mark.parametrize("form", ["blank lines", "paragraphs", "lines", *TITLED])
def test_every_form_gives_the_same_rows(tmp_path, form):
    name = write(tmp_path, form)
    titled = form in TITLED
    expected = [
        [*([] if titled else [f"{title} is what this is about."]), *sentences] for title, sentences in DOCUMENTS
    ]
    if form in ("paragraphs", "lines"):
        expected[2] = [" ".join(expected[2])]  # a word is no sentence
    rows = list(opened(name, "dropout").in_documents())
    for document, sentences in zip(expected, itertools.groupby(rows, lambda row: row[0]), strict=True):
        assert [sentence for _, (sentence,) in sentences[1]] == document
    leads = [(title if titled else f"{title} is what this is about.", " ".join(text)) for title, text in DOCUMENTS]
    corpus = opened(name, "lead")
    assert list(corpus) == leads[:2]
    assert corpus.columns == ("lead", "rest")
    assert corpus.summary() == "3 documents, 1 sections without a lead and a rest left out"


def test_objects_without_title_or_text(tmp_path):
    objects = [
        {"text": "Here is one. Here is another text."},
        {"title": None, "text": "This is a text of one sentence."},
        {"title": "T", "text": "This is the third text."},
        {"title": "T"},
        {"title": 1, "text": "a"},
        "no object",
    ]
    rows = map(json.dumps, objects)
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    corpus = opened(tmp_path / "a.jsonl", "lead")
    assert list(corpus) == [("Here is one.", "Here is another text."), ("T", "This is the third text.")]
    assert corpus.summary() == (
        "3 documents, 1 sections without a lead and a rest left out; "
        "skipped 3 lines: 1 missing key, 1 value not a string, 1 not a JSON object"
    )
    with pytest.raises(DataError, match=r"a\.jsonl, line 4: missing key"):
        list(opened(tmp_path / "a.jsonl", "lead", on_bad_line="error"))


def test_lines_that_are_sentences_stay_as_they_are(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"One. Two. And three of them.\nfour\n\n \nfi\xffve\nsix\n")
    corpus = opened(path, "columns", documents="blank_lines")
    assert list(corpus.numbered()) == [(1, ("One. Two. And three of them.",)), (2, ("four",)), (6, ("six",))]
    assert corpus.summary() == "2 documents; skipped 1 line: 1 not UTF-8"
    with pytest.raises(DataError, match=r"a\.txt, line 5: not UTF-8"):
        list(opened(path, "columns", documents="blank_lines", on_bad_line="error"))


def test_text_beside_objects_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("This is about the data.\n")
    (tmp_path / "data.jsonl").write_text('{"text": "This is text. This is more."}\n')
    (tmp_path / "_metadata.json").write_text("{}")  # of another program
    with pytest.raises(DataError, match=r"files of several kinds \(1 \.md, 1 \.jsonl\); name those of one"):
        opened(tmp_path, "lead")


def test_settings_beside_markdown_are_no_documents(tmp_path):
    (tmp_path / "a.md").write_text("This is a page. It has two sentences.\n")
    (tmp_path / "_category_.json").write_text('{"label": "Pages"}')
    assert list(opened(tmp_path, "lead")) == [("This is a page.", "It has two sentences.")]


@pytest.mark.parametrize("limit", [128, 1000])
def test_a_long_sentence_changes_the_passages_around_it_alone(limit):
    short = [f"This is sentence {i} of {'several ' * (i % 5)}in it." for i in range(400)]
    for long in ([], [30], [0, 7, 399]):
        sentences = [text * 40 if i in long else text for i, text in enumerate(short)]
        passages = pairs.passages_of(sentences, limit)
        assert " ".join(passages) == " ".join(sentences)
        assert all(len(passage) <= limit or passage in sentences for passage in passages)
        assert len(passages) < 1.6 * sum(map(len, sentences)) / limit + 4 * len(long)


def test_linked_folders_are_read_once(tmp_path):
    for name in ("data", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"This is in {name}. It has two sentences.")
    (tmp_path / "data/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/again").symlink_to(tmp_path / "data")
    assert [lead for lead, _ in opened(tmp_path / "data", "lead")] == ["This is in data.", "This is in elsewhere."]


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def walk(path, onerror, **_):
        onerror(PermissionError(errno.EACCES, "Permission denied", f"{path}/closed"))
        yield from ()

    monkeypatch.setattr(file_sets.os, "walk", walk)  # who runs tests as root may read all
    with pytest.raises(DataError, match=r"cannot read the folder .*/closed: Permission denied"):
        opened(tmp_path, "lead")


def test_held_out_text_that_is_none_is_left_out(tmp_path):
    texts = [f"Document {i} is here. Its sentence {i} is {'a' if i % 3 else chr(255)} second one." for i in range(60)]
    (tmp_path / "a.txt").write_bytes("\n\n".join(texts).encode("latin-1"))
    config = Config.from_dict(
        {"data": {"train_file": str(tmp_path / "a.txt"), "pairs": "lead", "held_out": 0.5},
         "eval": {"metric": "lead_retrieval"}, "difference": {"weight": 0.0}}
    )  # fmt: skip
    evaluation = build_dev_evaluation(config, lambda: ())
    assert len(evaluation.chosen.targets) > 5
    assert not any("\udcff" in text for text in evaluation.chosen.targets)


def test_a_bad_file_of_a_folder_is_named(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"This is text.\nThis \xff is none.\n")
    assert list(opened(tmp_path, "neighbours")) == [("This is text.",)]
    with pytest.raises(DataError, match=r"b\.txt: not UTF-8"):
        list(opened(tmp_path, "neighbours", on_bad_line="error"))


def test_passages_hold_all_sentences_of_a_document(tmp_path):
    texts = [[f"This is sentence {i} of document {count}." for i in range(count)] for count in (1, 20, 150)]
    (tmp_path / "a.txt").write_text("\n\n".join(map(" ".join, texts)))
    corpus = opened(tmp_path / "a.txt", "crops")
    passages = [passage for (passage,) in corpus]
    assert " ".join(passages) == " ".join(itertools.chain(*texts[1:]))
    assert corpus.summary() == "3 documents, 1 documents too short for a passage left out"
    sizes = [len(passage) for passage in passages[1:]]
    assert len(sizes) == -(-sum(map(len, texts[2])) // pairs.PASSAGE_CHARACTERS)
    assert max(sizes) - min(sizes) < 100


def test_neighbouring_passages_are_of_a_section_and_of_a_length(tmp_path, monkeypatch):
    texts = [[f"This is sentence {i} of document {count}." for i in range(count)] for count in (1, 7, 12)]
    monkeypatch.setattr(held_out, "is_held_out", lambda document, share: document[0].sentences() == texts[0])
    texts[2][4] = texts[0][0]  # which a held-out document has
    (tmp_path / "a.txt").write_text("\n\n".join(map(" ".join, texts)))
    corpus = opened(tmp_path / "a.txt", "passages", held_out=0.1, max_length=30)
    documents = collections.defaultdict(list)
    for document, (passage,) in corpus.in_documents():
        documents[document].append(passage)
    expected = [texts[1], texts[2][:4], texts[2][5:]]
    assert [" ".join(passages) for passages in documents.values()] == [" ".join(sentences) for sentences in expected]
    assert [len(passages) for passages in documents.values()] == [3, 2, 3]  # 33 to 35 characters a sentence
    assert max(len(passage) for passages in documents.values() for passage in passages) <= 120
    assert corpus.counted["texts left out that held-out documents have, too"] == 1
    store = tokens.build_or_open(corpus, word_tokenizer(), 30, str(tmp_path / "cache"))
    examples = examples_of(store, DataConfig(pairs="passages"), next_sentence=False)
    assert (len(examples), examples.columns) == (5, ("passage", "next passage"))


words = st.sampled_from(["Alpha", "beta", "gamma", "delta"])
texts = st.lists(st.lists(words, min_size=3, max_size=6).map(lambda w: " ".join(w).capitalize() + "."), max_size=4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(texts.filter(bool), min_size=1, max_size=30), st.randoms())
def test_no_text_is_on_both_sides(tmp_path, contents, random):
    def sides(contents: list[list[str]]) -> tuple[set[str], list[tuple[str, ...]]]:
        (tmp_path / "a.txt").write_text("\n\n".join("\n".join(text) for text in contents))
        options = {"documents": "blank_lines", "held_out": 0.4, "pairs": "dropout"}
        data = DataConfig(train_file=str(tmp_path / "a.txt"), **options)
        kept_out = held_out.held_out(open_documents(data), data.held_out)
        records = [row for _, row in open_corpus(data).records() if isinstance(row, tuple)]
        return {" ".join(section.sentences()) for (section,) in kept_out}, records

    out, trained = sides(contents)
    everything = {" ".join(text) for text in contents}
    assert out <= everything
    of_those = {sentence for text in contents if " ".join(text) in out for sentence in text}
    assert sorted(sentence for (sentence,) in trained) == sorted(
        sentence for text in contents for sentence in text if sentence not in of_those
    )
    random.shuffle(contents)  # neither order, nor duplicates, nor further documents, nor white space matter
    again, _ = sides([*contents, *contents[:3], ["Something else entirely."]])
    assert again - {"Something else entirely."} == out


def test_the_share_is_about_what_is_asked():
    count = sum(held_out.is_held_out([documents.Section(1, "", [f"Document {i}."])], 0.1) for i in range(5000))
    assert abs(count - 500) < 5 * (5000 * 0.1 * 0.9) ** 0.5
    assert not held_out.is_held_out([documents.Section(1, "", ["Any."])], 0.0)


def test_leads_leave_out_what_held_out_documents_have(tmp_path):
    shared, common = "This sentence is in every document.", "Common titles"
    rows = [{"title": f"Title {i}", "text": f"{shared} This text is that of document {i}."} for i in range(40)]
    rows += [{"title": common, "text": f"Here is another text, which has number {i}."} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = opened(tmp_path / "a.jsonl", "lead", held_out=0.2)
    found = list(corpus)
    assert 0 < len(found) < 40
    assert all(rest == f"This text is that of document {lead.split()[1]}." for lead, rest in found)
    counted = corpus.counted
    assert counted["of them held out"] > 0
    assert counted["texts left out that held-out documents have, too"] + counted["of them held out"] == 80


def test_whatever_changes_the_rows_makes_another_store(tmp_path):
    name = write(tmp_path, "paragraphs")
    ways = [
        {"pairs": "dropout"}, {"pairs": "lead"}, {"pairs": "crops"}, {"pairs": "passages"},
        {"documents": "blank_lines"},
        {"pairs": "dropout", "held_out": 0.01}, {"pairs": "lead", "documents": "blank_lines"}, {},
    ]  # fmt: skip
    names = set()
    for options in [*ways, {"pairs": "neighbours"}]:  # of the sentences that `dropout` takes
        corpus = open_corpus(DataConfig(train_file=name, **options))
        names.add(tokens._store_name(corpus.fingerprint(), corpus, word_tokenizer().backend_tokenizer))
    assert len(names) == len(ways)


def test_docstrings_are_documents(monkeypatch):
    items = [("f", "Return the first of them all."), ("g", "Return the second of them. It is not the first one.")]
    monkeypatch.setattr(docstrings, "_documented", lambda: [docstrings.Documented(n, False, d) for n, d in items])
    docstrings.docstring_documents.cache_clear()
    try:
        assert list(opened("docstrings", "lead")) == [("Return the second of them.", "It is not the first one.")]
        assert [row for row, in opened("docstrings", "dropout")] == [
            "Return the first of them all.", "Return the second of them.", "It is not the first one."
        ]  # fmt: skip
    finally:
        docstrings.docstring_documents.cache_clear()


@pytest.mark.parametrize(
    ("name", "content", "options", "reason"),
    [
        ("a.csv", "sentence\none\n", {"pairs": "lead"}, r"a \.csv file has no documents.*data\.pairs='lead'"),
        ("a.csv", "x\none\n", {"documents": "blank_lines"}, r"a \.csv file has no blank lines between documents"),
        ("a.jsonl", '{"text": "a"}', {"documents": "blank_lines"}, r"a \.jsonl file has no blank lines between"),
        ("a.jsonl", '{"body": "a"}', {"pairs": "lead"}, r"no key 'text'; it has: body; .* in data\.columns"),
        ("a.jsonl", '{"text": "a"}', {"pairs": "lead", "columns": ("a", "b", "c")}, r"data\.columns names 3 keys"),
        ("a.txt", "one\n", {"pairs": "lead", "columns": ("a",)}, r"have no columns; leave data\.columns empty"),
        ("a.txt", "one\ntwo\n", {"pairs": "lead"}, r"no usable line \(2 documents, 2 sections without"),
        ("a.txt", "one two\nthree\n", {"documents": "blank_lines"}, r"a\.txt, line 2: a document of more than 10"),
        ("folder/a.csv", "one\n", {"pairs": "crops"}, r"or no files of txt, markdown, jsonl"),
        ("folder/a.md", "# One\n", {}, r"folder: markdown files are read as documents; set data\.pairs"),
        ("folder/a.md", "# One\n", {"documents": "blank_lines"}, r"or a folder, have no blank lines"),
    ],
)
def test_what_has_no_documents_is_refused(tmp_path, monkeypatch, name, content, options, reason):
    if options == {"documents": "blank_lines"}:
        monkeypatch.setattr(documents, "MOST_CHARACTERS", 10)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    with pytest.raises(DataError, match=reason):
        list(open_corpus(DataConfig(train_file=str(tmp_path / Path(name).parts[0]), **options)))


@pytest.mark.parametrize(("name", "reason"), [("wiki1m", "in no order"), ("docstrings", "no lines of sentences")])
def test_named_corpora_without_blank_lines(name, reason):
    with pytest.raises(DataError, match=rf"{name}: .*{reason}"):
        open_corpus(DataConfig(train_file=name, documents="blank_lines"))


def test_sentences_without_documents_are_their_own_positives(tmp_path):
    (tmp_path / "a.csv").write_text("sentence\none\ntwo\n")
    assert list(opened(tmp_path / "a.csv", "dropout")) == [("one",), ("two",)]


def test_a_markdown_file_is_a_document_and_places_of_several_files_are_told(tmp_path):
    (tmp_path / "a.md").write_text("# A title\n\nThis is the text of it all.\n")
    assert list(opened(tmp_path / "a.md", "lead")) == [("A title", "This is the text of it all.")]
    for name, key in (("a", "text"), ("b", "body")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({key: "This is one text. This is another text."}))
    with pytest.raises(DataError, match=r"b\.jsonl, line 1: missing key"):
        list(opened(tmp_path / "*.jsonl", "lead", on_bad_line="error"))


def test_every_second_title_is_no_lead(tmp_path):
    rows = [{"title": f"Title {i}", "text": f"Subject {i} is told here. More of it is told there."} for i in range(200)]
    rows += [{"title": f"Title {i}", "text": f"Of subject {i} one sentence is told."} for i in range(200, 300)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = list(opened(tmp_path / "a.jsonl", "lead"))
    assert len(found) == 300
    titled = [lead.startswith("Title") for lead, _ in found]
    assert 70 < sum(titled[:200]) < 130  # of 200, with a standard deviation of 7
    assert all(titled[200:])  # one sentence has no rest
    for row, (lead, rest), has_title in zip(rows, found, titled, strict=True):
        assert f"{lead} {rest}" == (f"{row['title']} {row['text']}" if has_title else row["text"])


def test_memory_does_not_grow_with_the_file(tmp_path):
    path, filler = tmp_path / "a.txt", "very " * 500
    path.write_text("".join(f"Document {i} is told of here. Number {i} is {filler} long.\n\n" for i in range(150)))
    corpus = opened(path, "lead", held_out=0.1)
    tracemalloc.start()
    assert 110 < sum(1 for _ in corpus) < 150
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e5  # the file has 4e5 bytes


def test_real_documents(data_dir):
    found = list(open_documents(DataConfig(train_file=str(data_dir / "domains/man/documents.txt"), pairs="lead")))
    assert len(found) == 3365
    leads = [pairs.lead_and_rest(pairs.texts_of(section)) for (section,) in found[:300]]
    assert sum(pair is not None for pair in leads) > 270
    assert 100 < sum(held_out.is_held_out(document, 0.05) for document in found) < 240
