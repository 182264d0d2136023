"""Documents, those that are held out, and the rows that are made of the others."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diffcse_jax.config import DataConfig
from diffcse_jax.data import docstrings
from diffcse_jax.data.pairs import REPEATED, SHARED, Holdout
from diffcse_jax.data.readers import Corpus
from diffcse_jax.data.sources import open_corpus, open_documents, open_text
from diffcse_jax.errors import DataError


def opened(train_file: str | Path, pairs: str, **options) -> Corpus:
    return open_corpus(DataConfig(train_file=str(train_file), pairs=pairs, **options))


PAIRS = [
    ("A clock hangs in the hall.", "It tells the time. It has two hands of brass."),
    ("A boat is on the river.", "It has two sails and one mast."),
    ("A word is here.", "Word."),
]
FORMS: dict[str, dict[str, str]] = {
    "blank lines": {"a.txt": "\n\n".join(map("\n".join, PAIRS))},
    "lines": {"a.txt": "\n".join(map(" ".join, PAIRS)) + "\n\n"},
    "mixed": {
        "0.html": "<h1>{}</h1><p>{}</p>".format(*PAIRS[0]), ".git/a.txt": "Never read.", "a.png": "",
        "_1.rst": "{}\n=======================\n\n{}\n".format(*PAIRS[1]),
        "more/2.jsonl": json.dumps({"title": PAIRS[2][0], "text": PAIRS[2][1], "n": 1}),
        "_category_.json": '{"label": "Pages"}', "settings.json": '{"label": "Pages"}',
        "numbers.csv": "id;name\n1;Pages\n",
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_each_form_gives_the_same_rows_and_can_be_searched(tmp_path, form):
    for name, content in FORMS[form].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    path = tmp_path / ("" if form == "mixed" else "a.txt")
    corpus = opened(path, "lead")
    assert list(corpus) == PAIRS[:2]
    assert corpus.columns == ("lead", "rest")
    skipped = "; skipped files: 1 named _*, 1 .png; skipped 2 tables without texts" if form == "mixed" else ""
    assert corpus.summary() == f"3 documents, 1 section too short for a pair left out{skipped}"
    _, numbers, _ = zip(*opened(path, "dropout").in_documents(), strict=True)
    sentences = [numbers.count(number) for number in sorted({*numbers})]
    assert sentences[:2] == ([2, 1] if form == "mixed" else [3, 2])
    if form == "mixed":
        places, _, searched = zip(*open_text(path).in_documents(), strict=True)
        assert [text for (text,) in searched] == [rest for _, rest in PAIRS]
        assert places == ("0.html", "_1.rst", "more/2.jsonl, line 1")


def test_of_a_search_collection_only_documents_are_read(tmp_path):
    (tmp_path / "set/qrels").mkdir(parents=True)
    row = {"_id": "a", "title": "A clock", "text": "This is a clock that tells the time."}
    (tmp_path / "set/corpus.jsonl").write_text(json.dumps(row))
    (tmp_path / "set/queries.jsonl").write_text(json.dumps({"_id": "q", "text": "What is a clock? It tells what."}))
    (tmp_path / "set/qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq\ta\t1\n")
    for folder in (tmp_path / "set", tmp_path):
        corpus = opened(folder, "lead")
        assert list(corpus) == [("A clock", row["text"])]
        assert "skipped files: 2 with queries and judgements" in corpus.summary()
        assert [text for (text,) in open_text(folder)] == [row["text"]]
    (tmp_path / "set/corpus.jsonl").unlink()
    assert "judgements" not in opened(tmp_path, "lead").summary()  # queries beside no corpus are text


def test_every_document_of_ten_words_gives_a_pair(tmp_path):
    ten, nine = ("one two three four five six seven eight nine ten", "one two three four five six seven eight nine")
    long = " ".join(f"{number} is a word" for number in range(200))
    (tmp_path / "a.txt").write_text(f"{ten}\n{nine}\n{long}\nThis is a first sentence. That is its second sentence.")
    corpus = opened(tmp_path / "a.txt", "lead", cloze=1.0, max_length=64)
    first, *passages, last = list(corpus)
    assert first == (ten, ten)
    assert last == ("This is a first sentence.", "That is its second sentence.")
    assert all(lead == rest and len(rest) <= 4 * 64 for lead, rest in passages)
    assert " ".join(rest for _, rest in passages) == long
    assert corpus.counted["section{s} too short for a pair left out"] == 1
    assert list(opened(tmp_path / "a.txt", "lead")) == [last]


def test_tables_without_title_or_text(tmp_path):
    objects = [{"text": "Here is one. Here is another text."}, {"title": None, "text": "This is one sentence."},
               {"title": "T", "text": "This is a third one."}, {"title": "T"}, {"title": "T", "text": []}]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, objects)))
    corpus = opened(tmp_path / "a.jsonl", "lead")
    assert list(corpus) == [("Here is one.", "Here is another text."), ("T", "This is a third one.")]
    found = "3 documents, 1 section too short for a pair left out"
    assert corpus.summary() == f"{found}; skipped 2 lines: 1 missing key, 1 value not a string"
    with pytest.raises(DataError, match=r"a\.jsonl, line 4: missing key"):
        list(opened(tmp_path / "a.jsonl", "lead", on_bad_line="error"))
    (tmp_path / "b.md").write_text("Never read.")
    assert opened(tmp_path, "lead", columns=("title", "text")).summary() == "skipped 1 file without columns"


@pytest.mark.parametrize(
    ("name", "content", "options", "reason"),
    [
        ("a.jsonl", '{"body": "a"}', {"pairs": "lead"}, r"no column 'text'\. It has: body\. .* \(data\.columns or"),
        ("a.csv", "a,b,c\n", {"pairs": "lead", "columns": ("a", "b", "c")}, "name a title and a text"),
        ("a.md", "# One\n", {"pairs": "lead", "columns": ("text",)}, r"a\.md has no columns\. Leave data\.columns"),
        ("folder/a.md", "# One\n", {}, r"folder: these files contain documents\. Set data\.pairs"),
        ("a.md", "# One\n", {"columns": ("text",)}, r"a\.md: these files contain documents\. Do not name columns$"),
        ("a.md", "# A\n\nOne.", {"pairs": "lead", "held_out": 0.1}, r"a single document, and data\.held_out=0\.1"),
    ],
)
def test_sources_without_documents_are_refused(tmp_path, name, content, options, reason):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    with pytest.raises(DataError, match=reason):
        list(open_corpus(DataConfig(train_file=str(tmp_path / Path(name).parts[0]), **options)))


# Pairs and passages


def test_every_second_title_is_not_a_lead(tmp_path):
    rows = [{"title": f"Title {i}", "text": f"Subject {i} is told here. More of it is told there."} for i in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = list(opened(tmp_path / "a.jsonl", "lead"))
    titled = [lead.startswith("Title") for lead, _ in found]
    assert 70 < sum(titled) < 130  # of 200, with a standard deviation of 7
    for row, (lead, rest), has_title in zip(rows, found, titled, strict=True):
        assert f"{lead} {rest}" == (f"{row['title']} {row['text']}" if has_title else row["text"])


# Documents that are held out

words = st.sampled_from(["Alpha", "beta", "gamma", "delta"])
texts = st.lists(st.lists(words, min_size=3, max_size=6).map(lambda w: " ".join(w).capitalize() + "."), max_size=4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(texts.filter(bool), min_size=2, max_size=9, unique_by=tuple), st.randoms())
def test_no_text_is_on_both_sides_whatever_the_order(tmp_path, contents, random):
    data = DataConfig(str(tmp_path / "a.txt"), pairs="dropout", held_out=0.4)

    def held_out() -> set[str]:
        (tmp_path / "a.txt").write_text("\n\n".join("\n".join(text) for text in contents))
        found = {" ".join(section.sentences()) for (section,) in Holdout(open_documents(data), data.held_out)}
        texts = [sentence for text in contents if " ".join(text) not in found for sentence in text]
        kept_out = {sentence for text in contents if " ".join(text) in found for sentence in text}
        trained = [row[0] for _, row in open_corpus(data).records() if isinstance(row, tuple)]
        assert trained == [sentence for sentence in texts if sentence not in kept_out]
        return found

    before = held_out()
    random.shuffle(contents)
    contents += [*contents[:3], ["Something else entirely."]]
    assert held_out() - {"Something else entirely."} == before


def test_boilerplate_is_left_out_of_both_sides(tmp_path):
    licence = " ".join(f"Licence sentence {i} is the same everywhere." for i in range(10))
    rows = [{"title": f"Title {i}", "text": f"This is subject {i}. It has number {i}. {licence}"} for i in range(580)]
    twins = [{"title": f"Twin {i % 20}", "text": f"These are twins, {i % 20}. Only {i} has this."} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows + twins)))
    corpus = opened(tmp_path / "a.jsonl", "lead", held_out=0.1)
    trained = list(corpus)
    holdout = list(Holdout(open_documents(DataConfig(str(tmp_path / "a.jsonl"), pairs="lead")), 0.1))
    assert 30 < len(holdout) < 95
    assert "Licence" not in str(trained) + str(holdout)
    assert corpus.counted[REPEATED] == 10 * sum("subject" in " ".join(row) for row in trained)
    assert corpus.counted[SHARED] < 20  # texts of twins


# Docstrings

NUMPY_STYLE = """
    Compute the ``median`` along the specified *axis*.  The result of `numpy.median` is exact.

    Returns the median of the array elements, see :func:`mean <numpy.mean>`. It is robust, e.g. against outliers.

    Parameters
    ----------
    a : array_like
        Input array or object that can be converted to an array.

    Notes
    -----
    Given a vector of values, the median is its middle value [1]_. The method is described in [2]_.
    It is the value :math:`m` for which half of the values are larger.

    .. versionadded:: 1.0
       This paragraph is part of a directive and does not count.

    - This is an item of a list.
"""

GOOGLE_STYLE = """Opens the file at the path.

    Files are opened for reading in binary mode
    unless told otherwise by the caller.

    Args:
      path: The path of the file to open.

    set_mode(path) is called when x_y = 3 for now.
    """


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        (NUMPY_STYLE, ["Compute the median along the specified axis.",
                       "Returns the median of the array elements, see mean.", "It is robust, e.g. against outliers.",
                       "Given a vector of values, the median is its middle value."]),
        (GOOGLE_STYLE, ["Opens the file at the path.",
                        "Files are opened for reading in binary mode unless told otherwise by the caller."]),
        ("Too short a one.", []),
        ("This has no end of a sentence", []),
        (" ".join(["Word"] * 60) + ".", [" ".join(["Word"] * 60) + "."]),
        (" ".join(["Word"] * 61) + ".", []),
        ("Is this a short question? Yes, it is one, indeed!", ["Is this a short question?", "Yes, it is one, indeed!"]),
    ],
)  # fmt: skip
def test_sentences_are_prose_without_markup(docstring, expected):
    assert [*filter(docstrings.is_english, docstrings.spans_of(docstring))] == expected


FUNCTION = '''
def function_{0}():
    """Compute the value of function {0}.

    The value of number {0} is large for most of the arguments. This sentence occurs in all docstrings here.
    """
    raise RuntimeError("this must not run")
'''


def test_functions_are_either_in_the_corpus_or_held_out(tmp_path, monkeypatch):
    """200 functions stand for the installed packages."""
    (tmp_path / "module.py").write_text("".join(map(FUNCTION.format, range(200))) + "\n1 / 0\n")
    (tmp_path / "broken.py").write_text("def (")
    files = [("package.broken", tmp_path / "broken.py"), ("package.module", tmp_path / "module.py")]
    monkeypatch.setattr(docstrings, "_source_files", lambda: iter(files))
    docstrings._docstrings.cache_clear()
    pairs = docstrings.docstring_pairs()
    corpus = [sentence for (sentence,) in open_corpus(DataConfig(train_file="docstrings"))]
    leads = list(open_corpus(DataConfig(train_file="docstrings", pairs="lead")))
    assert docstrings.docstring_pairs(3) == pairs[:3]
    docstrings._docstrings.cache_clear()
    assert 5 <= len(pairs) <= 40  # 20 expected, standard deviation 4
    summaries = [f"Compute the value of function {number}." for number in range(200)]
    values = [f"The value of number {number} is large for most of the arguments." for number in range(200)]
    repeated = "This sentence occurs in all docstrings here."
    held_out = {summaries.index(summary) for summary, _ in pairs}
    assert dict(pairs) == {summaries[number]: f"{values[number]} {repeated}" for number in held_out}
    trained = [number for number in range(200) if number not in held_out]
    assert {*corpus} == {text for number in trained for text in (summaries[number], values[number])}
    assert sorted(leads) == sorted((summaries[number], values[number]) for number in trained)
