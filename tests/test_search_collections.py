import json

import pytest

from diffcse_jax.errors import DataError
from diffcse_jax.evaluation.search_collections import read_collection

CORPUS = [
    {"_id": "d1", "title": "a", "text": "wing"},
    {"_id": "d2", "text": "c"},
    {"_id": 3, "title": "", "text": "f"},
]
QUERIES = [
    {"_id": "q1", "text": "b"},
    {"_id": "q2", "text": "f"},
    {"_id": "of another split", "text": "k"},
]
JUDGEMENTS = "query-id\tcorpus-id\tscore\nq1\td2\t2\nq1\td1\t1\nq2\t3\t1\nq2\td1\t0\n"
READ = {"q1": {"d2": 2, "d1": 1}, "q2": {"3": 1, "d1": 0}}


def write_beir(folder, corpus=CORPUS, queries=QUERIES, judgements=JUDGEMENTS):
    """Write a collection of rows; strings are lines as they are."""
    (folder / "qrels").mkdir(parents=True)
    for name, rows in (("corpus", corpus), ("queries", queries)):
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "qrels/test.tsv").write_text(judgements, encoding="utf-8")
    return folder


@pytest.fixture
def beir(tmp_path):
    return write_beir(tmp_path / "tiny")


@pytest.mark.parametrize("headers", [("", ""), ("ID\ttext\n", "\nquery-id\tquery\n")])
def test_both_forms_are_read_alike(beir, tmp_path, capsys, headers):
    trec = tmp_path / "trec"
    trec.mkdir()
    (trec / "collection.tsv").write_text(f"{headers[0]}d1\ta wing\nd2\tc\n3\tf\n")
    (trec / "topics.tsv").write_text(f"{headers[1]}q1\tb\nq2\tf\nq9\tk\n")
    (trec / "qrels.txt").write_text("q1 0 d2 2\nq1 0 d1 1\nq2 0 3 1\nq2 0 d1 0\n")
    collection = read_collection(beir)
    assert collection == read_collection(trec)
    assert collection.documents == {"d1": "a wing", "d2": "c", "3": "f"}
    assert collection.judgements == READ
    notes = capsys.readouterr().err.count("the first line names the columns: ")
    assert notes == sum(map(bool, headers))


@pytest.mark.parametrize(
    "judgements",
    [
        JUDGEMENTS.replace("\t", "  "),
        "\ufeff" + JUDGEMENTS.replace("\n", "\r\n\r\n"),
        JUDGEMENTS.partition("\n")[2].replace("\t1\n", "\t+1.0\t\n"),
        "query-id Q0 corpus-id score\nq1 Q0 d2 2\nq1 Q0 d1 1\nq2 0 3 1\nq2 0 d1 -1\n",
        "# by hand\n\nquery-id\t0\tcorpus-id\tscore\nq1\t0\td2\t2e0\nq1\t\td1\t01\n#\nq2\t0\t3\t1\nq2\t0\td1\t-3",
    ],
)
def test_judgements_in_any_form_are_read_without_a_warning(judgements, tmp_path, capsys):
    assert read_collection(write_beir(tmp_path / "c", judgements=judgements)).judgements == READ
    assert "warning" not in capsys.readouterr().err


def test_what_cannot_be_used_is_counted_with_its_place(tmp_path, capsys):
    corpus = [
        *CORPUS,
        "[1]",
        "{",
        {"text": "no id"},
        {"_id": "d4"},
        {"_id": "d5", "text": ["a"]},
        {"_id": "d1", "text": "x"},
    ]
    corpus += [
        {"id": 6.5, "text": None},
        {"_id": "d6", "title": "Only this", "abstract": "Not read"},
        {"_id": None, "id": "d7", "title": "t\ud800", "text": 2016},
    ]
    judgements = JUDGEMENTS + "q1\td9\t1\nq1\td8\t2\nq7\td1\t1\nq2\t3\t1.9\nq1 d1\nq2\td2\tmuch\n"
    judgements += "of another split\td1\t0.5\nof another split\td2\t-1\nq2\td2\t1e9\n"
    folder = write_beir(
        tmp_path / "c", corpus, [*QUERIES, {"_id": "q1", "text": "twice"}], judgements
    )
    with (folder / "corpus.jsonl").open("ab") as file:
        file.write(b'\n{"_id": "d\xe9", "text": "caf\xe9"}\r\n')
    collection = read_collection(folder)
    ours = {"d1": "a wing", "d2": "c", "3": "f"}
    others = {"6.5": "", "d6": "Only this", "d7": "t\ufffd 2016", "dé": "café"}
    assert collection.documents == ours | others
    assert collection.queries == {"q1": "b", "q2": "f"}
    assert collection.judgements == {
        "q1": {"d2": 2, "d1": 1, "d9": 1, "d8": 2},
        "q2": {"3": 1, "d1": 0},
    }
    read, judged = f"{folder}/corpus.jsonl", f"{folder}/qrels/test.tsv"
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert warnings == [
        f"warning: left out 11 lines: 3 without a query, a document and a grade ({judged}, lines 10, 11, 14), 2 without a "
        f"JSON object ({read}, lines 4, 5), 2 with an id that came before ({read}, line 9; {folder}/queries.jsonl, line 4), "
        f"1 without an id ({read}, line 6), 1 without `text` ({read}, line 7), 1 whose `text` is not a string ({read}, "
        f"line 8), 1 whose query is not among the queries ({judged}, line 8)",
        f"warning: 1 document without text ({read}, line 10): kept",
        f"warning: 1 document without `text` ({read}, line 11): kept with the title alone",
        f"warning: 2 judgements whose document is not in the corpus ({judged}, lines 6, 7): a relevant document counts as "
        "missed",
        f"warning: 1 repeated judgement ({judged}, line 9): the last one counts, as in BEIR",
        f"warning: 2 grades with decimals ({judged}, lines 9, 12): cut to a whole number, as in trec_eval",
        f"warning: 2 judgements of queries without a relevant document ({judged}, lines 12, 13): left out, though "
        "trec_eval scores such queries 0",
    ]


def test_numbers_are_ids_unless_they_lost_digits(tmp_path):
    large = 10**400
    corpus = [{"_id": large, "text": "a"}, {"_id": 7.0, "text": "b"}]
    collection = read_collection(write_beir(tmp_path / "a", [*CORPUS, *corpus]))
    assert {str(large), "7"} <= collection.documents.keys()
    with pytest.raises(DataError, match=r"corpus.jsonl, line 1: the id 1e\+17 is a float"):
        read_collection(write_beir(tmp_path / "b", [{"_id": 1e17, "text": "a"}, *CORPUS]))


def test_a_lost_line_is_an_error_if_asked_for(beir):
    read_collection(beir, strict=True)
    (beir / "qrels/test.tsv").write_text(JUDGEMENTS + "q7\td1\t1\n")
    with pytest.raises(
        DataError, match=r"qrels/test\.tsv, line 6: whose query is not among the queries\. Correct"
    ):
        read_collection(beir, strict=True)


def test_another_split_is_read_if_there_are_no_test_judgements(beir, capsys):
    qrels = beir / "qrels"
    (qrels / "train.tsv").write_text("q1\td1\t1")
    assert read_collection(beir).judgements == READ
    notice, _ = capsys.readouterr().err.splitlines()
    assert notice == f"notice: {qrels}/test.tsv: other splits are not read: train.tsv"
    (qrels / "test.tsv").unlink()
    assert read_collection(beir).judgements == {"q1": {"d1": 1}}
    (qrels / "other.tsv").write_text("q1\td1\t1")
    with pytest.raises(DataError, match=r"several splits: other\.tsv, train\.tsv\. Name one"):
        read_collection(beir)


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        (
            "corpus.jsonl",
            '{"text": "a"}',
            "no line has text. Expected an object .* left out 1 line: 1 without an id \\(.*corpus.jsonl, line 1\\)",
        ),
        ("corpus.jsonl", '{"_id": "d1", "text": ""}', "no line has text.* 1 document without text"),
        (
            "corpus.jsonl",
            "",
            "corpus.jsonl: no line has text. Expected an object with `_id` and `text` in each line",
        ),
        ("queries.jsonl", "[", "queries.jsonl: no line has text.* 1 without a JSON object"),
        (
            "qrels/test.tsv",
            "q7\td1\t1",
            "test.tsv: no query has a relevant document.* 1 whose query is not",
        ),
        (
            "qrels/test.tsv",
            "q1\td1\t0",
            "1 judgement of queries without a relevant document .*line 1",
        ),
        (
            "qrels/test.tsv",
            "query-id\tcorpus-id\tscore\n",
            "no query has a relevant document. The file is empty",
        ),
    ],
)
def test_a_collection_of_which_nothing_is_left_is_refused(beir, file, content, problem):
    (beir / file).write_text(content)
    with pytest.raises(DataError, match=problem):
        read_collection(beir)


def test_a_folder_without_a_collection_is_refused(tmp_path):
    for name in ("x", "x" * 300):
        with pytest.raises(DataError, match=r"it has no corpus\.jsonl or collection\.tsv"):
            read_collection(tmp_path / name)
