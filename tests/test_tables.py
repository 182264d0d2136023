"""Rows of tables in every format: what is in a file is read, or stands in the ledger."""

import contextlib
import csv
import datetime
import gzip
import io
import json
import math
import re
import time
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow_datasets as tfds
from growth import assert_linear, assert_linear_calls, assert_small
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from test_fuzz import json_values, spoiled
from test_golden import PAIRS, Prepared

from diffcse_jax.documents.find import find_source
from diffcse_jax.documents.ledger import LONGEST_TEXT, Ledger
from diffcse_jax.documents.open import open_documents_to_search
from diffcse_jax.documents.tables import arrow as columnar
from diffcse_jax.documents.tables import arrow_values, parquet
from diffcse_jax.documents.tables import json as json_rows
from diffcse_jax.documents.tables.arrow import data_set_folders
from diffcse_jax.documents.tables.formats import KINDS, open_table
from diffcse_jax.documents.tables.records import Dialect, records
from diffcse_jax.documents.tables.table import Table
from diffcse_jax.documents.tables.values import (
    by_column,
    is_words,
    sample_of,
    text_columns,
    text_of,
    without_missing,
)
from diffcse_jax.documents.text.lines import read_lines
from diffcse_jax.errors import DataError

in_a_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def table_of(path: Path, content: bytes | str, **options) -> Table:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return open_table(path, path.name, **options)


def read(table: Table) -> tuple[list[tuple[int, dict[str, Any]]], list[str]]:
    """Return the rows and the account of a pass."""
    ledger = Ledger(table.name)
    return list(table.rows(table.columns, ledger)), ledger.lines()


def values(table: Table) -> list[tuple]:
    rows, _ = read(table)
    return [tuple(row.values()) for _, row in rows]


def present(row: Iterable[Any]) -> tuple:
    """Return a row with None in place of empty texts."""
    return tuple(None if value == "" else value for value in row)


def left_out(ledger: Ledger) -> int:
    return sum(entry.count for entry in ledger.left_out.values())


# Separators, quotes and heads

HELPDESK = """id,subject,body,customer
1,Printer,"The printer on the second floor prints empty pages.",blue
2,Login,"I cannot log in since the update on Monday.",red
"""
EXPORT = """Titel;Beschreibung
Öffnungszeiten;Das Büro ist von neun bis zwölf geöffnet.
Schlüssel;Der Schlüssel liegt bei der Pförtnerin.
"""
OPEN_QUOTE = """sentence\tpositive
The museum opens.\tDoors open at 9 a.m.
He asked.\t"Where are tickets sold
She read the sign.\tIt said "closed" in red
"Follow me," said the guide.\tWe followed.
"""


def test_columns_of_a_table_without_known_names_are_found(tmp_path):
    table = table_of(tmp_path / "helpdesk.csv", HELPDESK)
    assert table.columns == ("id", "subject", "body", "customer")
    assert table.text_columns == ("subject", "body", "customer")
    assert not table.notes
    table = table_of(tmp_path / "export.csv", EXPORT.encode("cp1252"))
    assert table.text_columns == ("Titel", "Beschreibung")
    notes = [
        "export.csv: not UTF-8; read as windows-1252",
        "export.csv: separated by semicolons",
    ]
    assert table.notes == tuple(notes)
    rows, lines = read(table)
    assert rows[1][1]["Beschreibung"] == "Der Schlüssel liegt bei der Pförtnerin."
    assert lines == notes


def test_a_field_of_a_tsv_never_spans_lines_and_keeps_its_quotes(tmp_path):
    rows, lines = read(table_of(tmp_path / "a.tsv", OPEN_QUOTE))
    written = [tuple(line.split("\t")) for line in OPEN_QUOTE.splitlines()[1:]]
    assert [tuple(row.values()) for _, row in rows] == written
    assert [number for number, _ in rows] == [2, 3, 4, 5]
    assert not lines


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
def test_quotes_of_a_tsv_that_pandas_wrote_are_its_own(tmp_path, quoting):
    texts = ['He said "hi"', "a\ttab", "plain", "two\nlines", "two\nlines\ttabs"] * 60
    frame = pd.DataFrame({"text": texts, "other": range(len(texts))})
    content = frame.to_csv(sep="\t", index=False, quoting=quoting)
    table = table_of(tmp_path / "a.tsv", content)
    assert table.notes == ("a.tsv: quotes around fields are removed",)
    assert values(table) == [*zip(texts, map(str, frame["other"]), strict=True)]


def test_quotations_that_go_on_in_the_next_row_of_a_tsv_are_text(tmp_path):
    content = 'id\ttext\n1\t"Hello there,\n2\tmy friend."\n'
    assert values(table_of(tmp_path / "a.tsv", content)) == [
        ("1", '"Hello there,'),
        ("2", 'my friend."'),
    ]


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        # Spark and MySQL
        ("a.csv", 'id,text\n1,"He said \\"hi\\", then"\n2,"x, y"\n', ['He said "hi", then', "x, y"]),
        # R's write.table
        ("a.tsv", '"id"\t"text"\n1\t"He said \\"hi\\""\n2\t"x"\n', ['He said "hi"', "x"]),
        # A backslash at the end of a field escapes nothing.
        ("a.csv", 'id,text\n1,"C:\\dir\\"\n2,"x, y"\n', ["C:\\dir\\", "x, y"]),
    ],
)  # fmt: skip
def test_quotes_escaped_by_backslashes_are_quotes(tmp_path, name, content, texts):
    table = table_of(tmp_path / name, content)
    assert [text for _, text in values(table)] == texts
    has_escapes = f'{name}: \\" is read as a quote' in table.notes
    assert has_escapes == ("C:" not in content)


READ_AS_ROW = "the first line holds no names of columns, so that it is read as a row"


@pytest.mark.parametrize(
    ("content", "columns", "number", "note"),
    [
        ("# exported 2024-01-01\nquery,positive\nhow,so\nwho,me\n", ("query", "positive"), 2,
         "not read, because the names of the columns stand below: '# exported 2024-01-01'"),
        ("Feedback;\n\nid;text\n1;Hi\n2;a, b\n", ("id", "text"), 2,
         "not read, because the names of the columns stand below: 'Feedback'"),
        ("location\nParis,France\nRome,Italy\n", ("location",), 2,
         "the first line, 'location', is read as the name of the column"),
        ("sentence\nA dog, a cat\nOne, two\n", ("sentence",), 2, ""),
        (",review\nanna,Good film\nbert,Bad film\ncarl,Nice\n", ("column 1", "review"), 3, ""),
        ("comment,\nGood,x\nBad,y\nNice,z\n", ("comment", "column 2"), 3, ""),
        ("search terms\nshoes,red\nboots,blue\nhat,green\n", ("search terms",), 3,
         "the first line, 'search terms', is read as the name of the column"),
        ("product name,10,20,50\nred shoe,1,2,3\n", ("product name", "10", "20", "50"), 1, ""),
        ("comment_text,404\nfoo bar,1\nnut bar,0\n", ("comment_text", "404"), 2, ""),
        ("i feel sad,0\nim happy,1\n", ("column 1", "column 2"), 2, READ_AS_ROW),
        # MS MARCO, Sentiment140
        ("121352\tdefine extreme\n634306\twhat is it\n", ("column 1", "column 2"), 2, READ_AS_ROW),
        ('"0","1467810369","a b"\n"4","1467810672","c d"\n',
         ("column 1", "column 2", "column 3"), 2, READ_AS_ROW),
        ("country,2019,2020\nFrance,1,2\n", ("country", "2019", "2020"), 1, ""),
        ("who,1,2,3\nAnna,5,5,4\n", ("who", "1", "2", "3"), 1, ""),
        ("0,1\n1,a b\n2,c d\n", ("0", "1"), 2, ""),
    ],
)  # fmt: skip
def test_what_the_first_line_is_taken_for_is_said(tmp_path, content, columns, number, note):
    table = table_of(tmp_path / "a.csv", content)
    assert table.columns == columns
    assert len(values(table)) == number
    notes = [each for each in table.notes if "separated by" not in each]
    assert len(notes) == bool(note)
    assert note in "".join(notes)


@pytest.mark.parametrize(
    ("content", "columns", "rows", "note"),
    [
        ("a;b\n1;x, y\n", ("a", "b"), [("1", "x, y")], "separated by semicolons"),
        ("a\tb\n1\tx, y\n", ("a", "b"), [("1", "x, y")], "separated by tabs"),
        ("a|b\n1|x, y\n", ("a", "b"), [("1", "x, y")], "separated by vertical bars"),
        ("sep=;\na;b\n1;x, y\n", ("a", "b"), [("1", "x, y")], ""),
        ("a, b;c\n1;2\n3;4\n", ("a, b", "c"), [("1", "2"), ("3", "4")], "separated by semicolons"),
        ('a, b\n1, "x, y"\n', ("a", "b"), [("1", "x, y")], ""),
        ("text\nNo, not; this|one\n", ("text",), [("No, not; this|one",)], ""),
        ("\n\na,b\n1,2\n", ("a", "b"), [("1", "2")], ""),
        (",a,,\n0,1,,\n", ("column 1", "a"), [("0", "1")], ""),
        ("a,b\n1,2,,\n", ("a", "b"), [("1", "2")], ""),
        ("text,text,id\nx,y,7\n", ("text", "text.1", "id"), [("x", "y", "7")],
         "the column 'text' is there again; it is called 'text.1'"),
        ("How do I return it?,Send it back.\nWhen is it open?,It is open at nine.\n",
         ("column 1", "column 2"),
         [("How do I return it?", "Send it back."), ("When is it open?", "It is open at nine.")],
         "the first line holds no names of columns, so that it is read as a row; "
         "the columns are called column 1, column 2"),
        *((f"{one},river bank\n{other},cat dog\n", ("column 1", "column 2"),
           [(one, "river bank"), (other, "cat dog")],
           f"{READ_AS_ROW}; the columns are called column 1, column 2")
          for one, other in (("q1", "q2"), ("2024-01-01", "2024-01-02"), ("https://a.b/c", "https://a.b/d"))),
        ("q1,q2\nyes,7\n", ("q1", "q2"), [("yes", "7")], ""),
        ("name,How old are you?\nAnna,I am very old.\n", ("name", "How old are you?"),
         [("Anna", "I am very old.")], ""),
        ("Create a list\tThis returns a list.\nDelete one of two or more lists\tIt is gone.\n",
         ("column 1", "column 2"),
         [("Create a list", "This returns a list."),
          ("Delete one of two or more lists", "It is gone.")],
         ...),
        ("a,b,c\n1,2,3\n" + "1,2\n" * 3, ("a", "b", "c"), [("1", "2", "3"), *[("1", "2", None)] * 3],
         "rows lack up to 1 of the last columns"),
        ('a\tb\n1\t" x " is y\n2\t"x\ty"\n', ("a", "b"), [("1", '" x " is y'), ("2", "x\ty")],
         "separated by tabs"),
        ("", (), [], ""),
    ],
)  # fmt: skip
def test_separators_and_names_are_found_and_said(tmp_path, content, columns, rows, note):
    table = table_of(tmp_path / "a.csv", content)
    assert table.columns == columns
    assert values(table) == rows
    assert note is ... or table.notes == ((f"a.csv: {note}",) if note else ())


def test_a_first_line_of_sentences_holds_names_if_the_user_says_so(tmp_path):
    table = table_of(tmp_path / "a.csv", "Is it open?\nIt is.\n", columns=["Is it open?"])
    assert table.columns == ("Is it open?",)


@pytest.mark.parametrize(
    ("content", "rows", "lines"),
    [
        # A quote that nobody closed takes no other row with it.
        ('a,b\n1,"open\n2,fine\n3,"x, y"\n4,"two\nlines"\n5,last\n',
         ["open", "fine", "x, y", "two\nlines", "last"], []),
        ('a,b\n1,"open\n2,fine\n', ["open", "fine"], []),
        ('a,b\n1,2\n"open, and\n3,4\n', ["2", " and", "4"], []),
        ('a,b\n1,"open, with, more\n3,4\n', ["4"],
         ["left out 1 text: 1 not valid CSV (a.csv, line 2)"]),
        # A row of several lines with one field too many is one row.
        ('a,b\n1,"Dear all,\nhow are you",more\n3,4\n', ["4"],
         ["left out 1 text: 1 with a wrong number of fields (a.csv, line 2)"]),
        ('a,b\n1,"two\nlines with "a" word"\n3,4\n', ['two\nlines with a" word"', "4"], []),
        ("a,b\n\n1,2\nonly\n , \n3,4,5\n", ["2"],
         ["left out 4 texts: 2 empty, 2 with a wrong number of fields (a.csv, lines 4, 6)"]),
        ("a,b\n1,c\rd\n", ["c\rd"], []),
        # Two files that were joined.
        ("a,b\n1,2\n\ufeffa,b\n3,4\n", ["2", "4"],
         ["left out 1 text: 1 with the names of the columns once more (a.csv, line 3)"]),
    ],
)  # fmt: skip
def test_rows_that_break_the_rules_cost_nothing_but_themselves(tmp_path, content, rows, lines):
    found, account = read(table_of(tmp_path / "a.csv", content))
    assert [row["b"].strip('"') for _, row in found] == [each.strip('"') for each in rows]
    assert account == lines


def test_a_quote_that_swallows_a_hundred_thousand_characters_is_noticed(tmp_path):
    line = f"7,{'a plain row ' * 20}\n"
    number = LONGEST_TEXT // len(line) + 2
    content = f'a,b\n1,"open\n{line * number}8,"closed\n'
    rows, account = read(table_of(tmp_path / "a.csv", content))
    assert len(rows) == number + 2
    assert not account
    long = "A long cell, in which, no line, is a row.\n" * (number // 2)
    rows, _ = read(table_of(tmp_path / "a.csv", f'a,b\n1,"{long}"\n2,c\n'))
    assert [len(row["b"]) for _, row in rows] == [len(long), 1]


def test_fields_beyond_the_limit_of_python_are_read_and_the_limit_stays(tmp_path):
    before = csv.field_size_limit()
    long = "x, " * before
    ((_, row),), _ = read(table_of(tmp_path / "a.csv", f'html,text\n"{long}",short\n'))
    assert row == {"html": long, "text": "short"}
    assert csv.field_size_limit() == before


GROWING = {
    "a.csv": ['x,5","abc\n', 'a,"b\n', '1,"say "a",b\n'],
    "a.json": ['{"a": [[["b"]]]}, '],
}


@pytest.mark.parametrize(("name", "piece"), [(n, piece) for n in GROWING for piece in GROWING[n]])
def test_time_grows_with_the_size_and_not_with_its_square(tmp_path, name, piece):
    times = []
    for number in (100, 800):
        content = piece * number
        path = tmp_path / name
        path.write_text(f"id,text\n{content}" if name == "a.csv" else f'[{content}"a"]')
        start = time.process_time()
        read(open_table(path, name))
        times.append(time.process_time() - start)
    assert times[1] < 24 * times[0] + 0.1


# What was written is read back

names = st.lists(
    st.text(st.characters(codec="utf-8", categories=["Lu", "Ll"]), min_size=1, max_size=8),
    min_size=2, max_size=4, unique_by=str.strip,
)  # fmt: skip
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@given(names, st.data())
@in_a_folder
def test_rows_of_csv_are_read_back(tmp_path, columns, data):
    rows = data.draw(st.lists(st.tuples(*[texts] * len(columns)), max_size=6))
    separator = data.draw(st.sampled_from(",;\t|"))
    written = io.StringIO(newline="")
    options = {"delimiter": separator, "quoting": csv.QUOTE_ALL}
    csv.writer(written, **options).writerows([columns, *rows])
    table = table_of(tmp_path / "a.csv", written.getvalue())
    assert table.columns == tuple(columns)
    found, _ = read(table)
    kept = [present(row) for row in rows if any(map(str.strip, row))]
    assert [tuple(row.values()) for _, row in found] == kept


@given(names, st.data())
@in_a_folder
def test_rows_of_tsv_are_read_back(tmp_path, columns, data):
    field = texts.filter(lambda text: not re.search(r"[\t\r\n]", text))
    rows = data.draw(st.lists(st.tuples(*[field] * len(columns)), max_size=6))
    content = "".join("\t".join(row) + "\n" for row in [tuple(columns), *rows])
    table = table_of(tmp_path / "a.tsv", content)
    if not table.notes:  # fields may happen to look as if Python's csv had written them
        found, _ = read(table)
        kept = [present(row) for row in rows if any(map(str.strip, row))]
        assert [tuple(row.values()) for _, row in found] == kept


def mended(value: Any) -> Any:
    """Return a value of JSON without halves of characters."""
    if isinstance(value, dict):
        return {mended(key): mended(each) for key, each in value.items()}
    if isinstance(value, list):
        return [*map(mended, value)]
    return re.sub("[\ud800-\udfff]", "\ufffd", value) if isinstance(value, str) else value


@given(st.lists(st.dictionaries(texts, json_values, min_size=1, max_size=3), max_size=4), st.data())
@in_a_folder
def test_objects_of_json_are_read_back(tmp_path, rows, data):
    extension = data.draw(st.sampled_from([".jsonl", ".ndjson", ".json"]))
    if extension == ".json":
        text = json.dumps(rows, indent=data.draw(st.sampled_from([None, 1])))
    else:
        text = "\n".join(map(json.dumps, rows))
    table = table_of(tmp_path / f"a{extension}", text)
    expected = [mended(json.loads(json.dumps(row))) for row in rows]
    assert table.columns == tuple(dict.fromkeys(key for row in expected for key in row))
    found, _ = read(table)
    ordered = [{key: row[key] for key in table.columns if key in row} for row in expected]
    assert repr([row for _, row in found]) == repr(ordered)  # NaN is not equal to itself


VALUES = {
    pa.string(): texts,
    pa.large_string(): texts,
    pa.string_view(): texts,
    pa.dictionary(pa.int8(), pa.string()): texts,
    pa.list_(pa.string()): st.lists(texts, max_size=3),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.bool_(): st.booleans(),
    pa.binary(): st.binary(max_size=8),
    pa.timestamp("us"): st.datetimes(),
}


@given(st.lists(st.sampled_from([*VALUES]), min_size=1, max_size=4), st.data())
@in_a_folder
def test_columns_of_arrow_are_read_back(tmp_path, types, data):
    number = data.draw(st.integers(0, 5))
    some = {
        kind: st.lists(st.none() | VALUES[kind], min_size=number, max_size=number) for kind in types
    }
    columns = [pa.array(data.draw(some[kind]), kind) for kind in types]
    table = pa.table(columns, names=["a"] * len(types))
    extension = data.draw(st.sampled_from([".parquet", ".arrow", ".feather"]))
    content = io.BytesIO()
    if extension == ".parquet":
        try:
            pq.write_table(table, content, row_group_size=2)
        except pa.ArrowNotImplementedError:  # string views, by older versions of pyarrow
            reject()
    else:
        new = pa.ipc.new_stream if extension == ".arrow" else pa.ipc.new_file
        with new(content, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    found = table_of(tmp_path / f"a{extension}", content.getvalue())
    assert found.columns == ("a", "a.1", "a.2", "a.3")[: len(types)]
    stored = [present(column.to_pylist()) for column in columns]
    assert values(found) == [*zip(*stored, strict=True)]
    (*_, last) = found.columns
    assert tuple(row[last] for _, row in found.rows([last], Ledger("a"))) == stored[-1]


# What is not a row stands in the ledger

CONTENT = {
    ".csv": b'a,b\n1,"b ""c"" d"\n"two\nlines",e\n3,"open\n4,last\n',
    ".tsv": b'a\tb\n1\t"x\n2\ty\n',
    ".jsonl": b'{"a": "x"}\n{"a": "\\ud83d", "b": [1]}\n\n[]\n',
    ".json": b'[{"a": "x"}, {"b": "y"}]',
    ".parquet": pd.DataFrame(PAIRS).to_parquet(),
    ".feather": pa.BufferOutputStream(),
}


def feather() -> bytes:
    content = io.BytesIO()
    table = pa.Table.from_pylist(PAIRS)
    with pa.ipc.new_file(content, table.schema) as writer:
        writer.write_table(table)
    return content.getvalue()


CONTENT[".feather"] = feather()


@pytest.mark.parametrize("extension", CONTENT)
@given(data=st.data())
@in_a_folder
def test_any_bytes_give_rows_or_an_error_for_people(tmp_path, extension, data):
    content = data.draw(spoiled(CONTENT[extension]) | st.binary(max_size=200))
    path = tmp_path / f"a{extension}"
    ledger = Ledger("a")
    try:
        table = table_of(path, content)
        rows = [*table.rows(table.columns, ledger)]
    except DataError:
        return
    numbers = [number for number, _ in rows]
    assert numbers == sorted(set(numbers))
    assert all(set(row) <= set(table.columns) for _, row in rows)
    if extension == ".jsonl":
        lines = sum(1 for _ in read_lines(path, "a", Ledger("a")))
        assert len(rows) + left_out(ledger) == lines
    json.dumps([row for _, row in rows], default=str, ensure_ascii=False).encode()


csv_pieces = st.sampled_from(['"', ",", "\n", "a", '""', '",', ',"', "\r", "x y"])


@given(st.lists(csv_pieces, max_size=60), st.integers(0, 3), st.booleans())
def test_each_line_of_a_csv_file_is_in_one_record(pieces, width, spans):
    lines = [*enumerate(io.StringIO("".join(pieces), newline="\n"), 1)]
    separator = "," if spans else "\t"
    lines = [(number, line.replace(",", separator)) for number, line in lines]
    found = [*records(lines, Dialect(separator, spans_lines=spans, width=width))]
    read = [number for record in found for number in range(record.first, record.last + 1)]
    assert read == [number for number, _ in lines]
    for record in found:
        assert record.fault or not width or len(record.fields) == width
        assert record.fault or spans or record.first == record.last


@given(st.lists(st.lists(texts, min_size=1, max_size=3), max_size=4))
def test_what_follows_the_rules_is_what_python_reads(rows):
    written = io.StringIO(newline="")
    csv.writer(written).writerows(rows)
    lines = enumerate(io.StringIO(written.getvalue(), newline="\n"), 1)
    found = [record.fields for record in records(lines, Dialect(","))]
    python = [*csv.reader(io.StringIO(written.getvalue(), newline=""))]
    assert "\r" in written.getvalue().replace("\r\n", "") or found == [
        row or [""] for row in python
    ]


# JSON


def test_broken_characters_are_replaced_and_counted(tmp_path):
    content = '{"text": "a \\ud83d sign"}\n{"text": "a \\ud83d\\ude00 face"}\n'
    rows, lines = read(table_of(tmp_path / "a.jsonl", content))
    assert [row["text"] for _, row in rows] == ["a \ufffd sign", "a \U0001f600 face"]
    assert lines == ["a.jsonl: broken characters (halves of escapes) in 1 row became U+FFFD"]


@pytest.mark.parametrize(
    ("found", "rows"),
    [
        ({"How do I log in?": "Use the link.", "Where is it?": "See the page."},
         [("How do I log in?", "Use the link."), ("Where is it?", "See the page.")]),
        ({"doc1": "A text.", "doc2": "Another text."},
         [("doc1", "A text."), ("doc2", "Another text.")]),
        ({"headline": "A title.", "body": "The text."}, [("A title.", "The text.")]),
        ({"First name": "Anna", "Your question": "When?"}, [("Anna", "When?")]),
        ({"columns": ["id", "text"], "index": [0, 1], "data": [["a", "One."], ["b", "Two."]]},
         [("a", "One."), ("b", "Two.")]),
        ({"columns": ["text", None, "text"], "data": [["a", "b", "c"]]}, [("a", "b", "c")]),
    ],
)  # fmt: skip
def test_an_object_is_rows_if_its_keys_name_no_columns(tmp_path, found, rows):
    assert values(table_of(tmp_path / "a.json", json.dumps(found))) == rows


def test_new_keys_in_each_row_take_no_longer_than_other_text(tmp_path):
    def parts(number: int) -> str:
        rows = ({f"key {row} {key}": "Some words." for key in range(9)} for row in range(number))
        return "\n".join(map(json.dumps, rows))

    def open_and_read(content: str) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text(content)
        assert [*open_documents_to_search(str(path)).read(Ledger("a"))]

    assert_linear_calls(open_and_read, parts)


def test_keys_are_collected_from_many_rows(tmp_path):
    rows = [{"text": "The library opens."}] * 1500 + [{"text": "x", "late": "y"}]
    rows[1] = {"text": "The cafe is closed.", "headline": "Cafe"}
    table = table_of(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert table.columns == ("text", "headline")
    with pytest.raises(DataError, match=r"no column 'never'.*Name one of these with --columns"):
        table.require(["late", "text", "never"], "--columns")
    assert [row for _, row in table.rows(["headline"], Ledger("a"))] == rows


ROWS = [{"a": "x"}, {"b": "y"}]


@pytest.mark.parametrize(
    ("content", "rows", "note"),
    [
        (json.dumps(ROWS, indent=1), ROWS, ""),
        ('\ufeff ["one", "two\\nlines",]', [{"sentence": "one"}, {"sentence": "two\nlines"}], ""),
        ('\n{"a": "x"}\n{"b": "y"}\n', ROWS, ""),
        ('{"version": 1, "data": [{"a": "x"}, {"b": "y"}]}', ROWS, "the rows are those of 'data'"),
        ('{"train": [{"a": "x"}, {"b": "y"}], "test": [{}]}', ROWS,
         "read the part 'train', not test"),
        ('{"a": ["x", "y"],\n "b": ["z", "w"]}', [{"a": "x", "b": "z"}, {"a": "y", "b": "w"}],
         "the lists 'a', 'b' are read as columns"),
        ('{\n "a": "A title",\n "b": ["y"]\n}', [{"a": "A title", "b": ["y"]}], ""),
        ('{"version": "1.0", "meta": {"x": "y"}, "b": ["one", "two"], "c": []}',
         [{"sentence": "one"}, {"sentence": "two"}], "the rows are those of 'b'"),
        ('{"b": ["one", 2]}', [{"b": ["one", 2]}], ""),
        ('{"b": ["one", null, "two"]}', [{"sentence": "one"}, {"sentence": "two"}],
         "the rows are those of 'b'"),
        ('{"b": [null, {"a": "x"}]}', ROWS[:1], "the rows are those of 'b'"),
        ('{"b": [null]}', [{"b": [None]}], ""),
        ('{"a": [{"b": {"c": "text"}}]}', [{"b": {"c": "text"}}], "the rows are those of 'a'"),
        ('{"a": "x"} {"b": "y"}', ROWS, ""),
        ("\n".join(json.dumps(row, indent=1) for row in ROWS), ROWS, ""),
        ("", [], ""),
        ("[]", [], ""),
    ],
)  # fmt: skip
def test_a_json_file_holds_a_list_or_lines_or_an_object(tmp_path, content, rows, note):
    table = table_of(tmp_path / "a.json", content)
    found, _ = read(table)
    assert [row for _, row in found] == rows
    assert table.notes[:1] == ((f"a.json: {note}",) if note else ())


@pytest.mark.parametrize("extension", [".json", ".jsonl", ".jsonl.gz"])
def test_objects_over_several_lines_are_rows(tmp_path, extension):
    path = tmp_path / f"a{extension}"
    content = "\n".join(json.dumps(row, indent=1) for row in ROWS).encode()
    path.write_bytes(gzip.compress(content) if extension.endswith(".gz") else content)
    rows, _ = read(open_table(path, path.name))
    assert [row for _, row in rows] == ROWS
    path = tmp_path / "b.jsonl"
    path.write_bytes(content[:-3])
    with pytest.raises(DataError, match=r"b\.jsonl, item 2 is not valid JSON"):
        read(open_table(path, path.name))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"a": 1}, {"b"', "a.json, item 2 is not valid JSON: Expecting ':' delimiter"),
        ("[1 2]", "a.json, item 2 is not valid JSON: '2' stands where ',' should be"),
        ("[1] 2", "'2' stands where the end should be. A json file holds a list"),
        ("[" * 100_000, "a.json, item 1 is not valid JSON: maximum recursion depth"),
        ("{\n", "a.json is not valid JSON"),
        ('{"dev": [{"a": 1}], "test": [{"a": 1}]}', "a.json has several parts: dev, test"),
    ],
)
def test_damaged_json_is_named(tmp_path, content, message):
    with pytest.raises(DataError, match=re.escape(message)):
        read(table_of(tmp_path / "a.json", content))


@pytest.mark.parametrize("content", ['[{"a": "x"}, {"a": "y"}]', '[\n{"a": "x"},\n{"a": "y"}\n]\n'])
def test_a_list_is_read_whatever_its_extension(tmp_path, content):
    assert values(table_of(tmp_path / "a.jsonl", content)) == [("x",), ("y",)]


@pytest.mark.parametrize("content", ['["x", 1]\n["y", null]\n', '[["x", 1], ["y", null]]'])
def test_lists_have_numbered_columns(tmp_path, content):
    rows, _ = read(table_of(tmp_path / "a.jsonl", content))
    assert [row for _, row in rows] == [
        {"column 1": "x", "column 2": 1},
        {"column 1": "y", "column 2": None},
    ]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("count", [2, 100_000])
def test_an_object_with_rows_is_read_whatever_its_extension(tmp_path, indent, count):
    content = json.dumps({"version": "1.0", "data": [{"a": "x"}] * count}, indent=indent)
    table = table_of(tmp_path / "a.jsonl", content)
    assert values(table) == [("x",)] * count
    assert table.notes == ("a.jsonl: the rows are those of 'data'",)


@pytest.mark.parametrize(
    "row", [{"a": "Some text.", "b": [{"c": "d"}]}, {"a": ["x"], "b": ["y"]}, {"a": "x"}]
)
def test_an_object_on_the_only_line_is_a_row(tmp_path, row):
    rows, _ = read(table_of(tmp_path / "a.jsonl", json.dumps(row)))
    assert [row for _, row in rows] == [row]


def test_lines_that_are_not_objects_are_entered_in_the_ledger(tmp_path):
    deep = "[" * 100_000
    content = f'{{"a": NaN}}\n[1]\n\n"text"\n{deep}\n{{"a": {"9" * 5000}}}\n{{"a": 1, "a": 2}}\n'
    rows, lines = read(table_of(tmp_path / "a.jsonl", content))
    assert [number for number, _ in rows] == [1, 4, 7]
    assert [row for _, row in rows] == [{"a": None}, {"sentence": "text"}, {"a": 2}]
    assert lines == ["left out 4 texts: 3 not a JSON object (a.jsonl, lines 2, 5, 6), 1 empty"]


def test_a_row_longer_than_any_text_is_cut_off_while_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": "' + b"x" * 20_000_000 + b'"}\n{"a": "y"}\n'))
    rows, lines = read(open_table(path, "a.jsonl.gz"))
    assert rows == [(2, {"a": "y"})]
    assert lines == ["left out 1 text: 1 longer than 8,388,608 characters (a.jsonl.gz, line 1)"]


def test_text_inside_objects_is_not_lost_silently(tmp_path):
    content = '{"data": [{"title": "A book", "paragraphs": [{"context": "Some text."}]}]}'
    table = table_of(tmp_path / "a.json", content)
    assert table.text_columns == ("title",)
    assert table.notes[1:] == ("a.json: text inside objects is not read (paragraphs)",)


# Parquet, Arrow and data sets


def test_dates_beyond_the_calendar_are_left_out(tmp_path):
    days = pa.array([0, 2932897, -800000], pa.int32()).cast(pa.date32())
    lists = pa.ListArray.from_arrays([0, 1, 2, 2], days[1::-1])
    table = pa.table({"day": days, "days": lists, "text": ["one", "two", "three"]})
    pq.write_table(table, tmp_path / "a.parquet")
    rows, lines = read(open_table(tmp_path / "a.parquet", "a.parquet"))
    assert [text_of(rows[0][1]["day"]), rows[1][1]["day"], rows[2][1]["day"]] == [
        "1970-01-01",
        None,
        None,
    ]
    assert [row["days"][0] for _, row in rows[:2]] == [None, datetime.date(1970, 1, 1)]
    assert [row["text"] for _, row in rows] == ["one", "two", "three"]
    problem = "left out 3 values that Python cannot hold, such as dates after the year 9999"
    assert lines == [f"a.parquet: {problem}"]


def test_strings_of_parquet_that_are_not_utf8_are_read(tmp_path):
    table = pa.table({"text": pa.array([b"caf\xe9", None]).view(pa.string())})
    pq.write_table(table, tmp_path / "a.parquet")
    rows, lines = read(open_table(tmp_path / "a.parquet", "a.parquet"))
    assert [row["text"] for _, row in rows] == ["café", None]
    assert lines == ["a.parquet: not UTF-8 in 1 value; read there in the encoding that fits best"]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather", "a.parquet.gz"])
def test_damaged_binary_files_are_named(tmp_path, name):
    with pytest.raises(DataError, match=rf"{name}.* cannot be read"):
        table_of(tmp_path / name, b"one\n")


def test_saved_data_sets_are_read_without_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_dict({"title": ["A", "B"], "text": ["Some text.", "More text."]})
    saved.save_to_disk(tmp_path / "one", num_shards=2)
    assert len(list((tmp_path / "one").glob("*.arrow"))) == 2
    datasets.DatasetDict(train=saved, test=saved).save_to_disk(tmp_path / "several")
    datasets.DatasetDict(dev=saved, test=saved).save_to_disk(tmp_path / "other")
    folders = data_set_folders(tmp_path.rglob("*"))
    assert [folder.name for folder in folders] == ["one", "other", "several"]
    assert find_source(f"{tmp_path}/*").data_sets == folders
    for name, note in [("one", ()), ("several", ("several: read the part 'train', not test",))]:
        table = open_table(tmp_path / name, name)
        assert values(table) == [("A", "Some text."), ("B", "More text.")]
        assert table.notes == note
    with pytest.raises(DataError, match="other has several parts: dev, test"):
        open_table(tmp_path / "other", "other")
    assert len(values(open_table(tmp_path / "other/dev", "dev"))) == 2


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("[", "cannot read state.json"),
        ("[]", "state.json does not hold an object"),
        ("{}", "it has no list _data_files"),
        ('{"_data_files": [{"filename": "../a.arrow"}]}', "does not name a file or folder beside"),
        ('{"_data_files": [{"filename": "a.arrow"}]}', "no such file"),
        ('{"_data_files": [], "_indices_files": [1]}', "an old version of datasets"),
    ],
)
def test_damaged_data_sets_are_named(tmp_path, state, message):
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(DataError, match=re.escape(message)):
        open_table(tmp_path, "saved")


def prepare(folder: Path, shards: int = 1) -> Path:
    """Write `PAIRS` as an ArrayRecord data set, and return its folder."""
    builder = Prepared(data_dir=str(folder), file_format="array_record")
    config = tfds.download.DownloadConfig(num_shards=shards, try_download_gcs=False)
    builder.download_and_prepare(download_config=config)
    return Path(builder.data_path)


def test_prepared_data_sets_are_read_in_order_or_named(tmp_path, monkeypatch):
    monkeypatch.setattr(columnar, "BLOCK_RECORDS", 3)
    folder = prepare(tmp_path / "out", shards=3)
    assert data_set_folders(tmp_path.rglob("*")) == (folder,)
    table = open_table(tmp_path / "out", "out")
    assert len(list(folder.glob("*.array_record*"))) == 3
    columns = [*PAIRS[0]]
    rows = [*table.rows(columns, Ledger("out"))]
    assert rows == [*enumerate(PAIRS, 1)]
    with pytest.raises(DataError, match=r"no column 'text'.*It has: hard_negative, positive"):
        list(table.rows(["text"], Ledger("out")))
    (shard,) = prepare(tmp_path / "other").glob("*.array_record*")
    with pytest.raises(DataError, match="2 data sets"):
        open_table(tmp_path, "both")
    content = shard.read_bytes()
    shard.write_bytes(content[:100] + b"\xff" * 50 + content[150:])
    with pytest.raises(DataError, match=r"damaged|cannot read the split"):
        read(open_table(tmp_path / "other", "other"))


# Values


@pytest.mark.parametrize("value", [None, "", b"", math.nan, np.float32("nan"), pd.NaT])
def test_empty_values_are_missing(value):
    assert without_missing(value) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "a"), (b"caf\xe9", "café"), (0, "0"), (1.5, "1.5"), (False, "False"),
        (["a", None, "b"], "a\nb"), ([1], None), ({"a": 1}, None), ([], ""),
        (pd.Timestamp(2026, 1, 2).date(), "2026-01-02"),
    ],
)  # fmt: skip
def test_values_are_text_if_people_would_read_them_so(value, text):
    assert without_missing(value) is value
    assert text_of(value) == text


COLUMNS = {
    "id": ["a first row", "a second row"], "customerId": ["blue", "red"],
    "number": [1, 2], "price": ["3.50 EUR", "4.20 EUR"], "size": ["5 kg", "7 kg"],
    "day": ["2026-01-02", "12 March 2026"], "日": ["2026年3月5日", "2026年4月5日"],
    "is_open": ["yes", "no"], "flag": [True, False],
    "url": ["https://example.org/a", "www.example.org/b"], "mail": ["a@example.org", "b@c.de"],
    "code": ["ERR-4711", "ERR-4712"], "uuid_of_it": ["123e4567-e89b", "123e4567-e89c"],
    "path": ["docs/a.md", "docs/b.md"], "data": ['{"a": 1}', '[{"b": 2}]'],
    "vector": [[0.1, 0.2], [0.3, 0.4]], "nothing": [None, ""], "language": ["en", "de"],
}  # fmt: skip


def test_columns_of_text_are_told_from_others():
    texts = {
        "title": ["Printer", "Login"], "name": ["Anna Schmidt", "Bo Ek"], "long": ["so " * 9] * 2,
        "日本": ["図書館は2026年に開きます", "東京"], "pos": [["A text.", "B text."], ["C text."]],
        "half": ["a text of words", None],
    }  # fmt: skip
    everything = {**COLUMNS, **texts}
    rows = [{name: column[row] for name, column in everything.items()} for row in range(2)]
    assert text_columns([*everything], by_column(rows)) == tuple(texts)


def test_repeated_words_are_a_category_unless_there_is_nothing_else():
    rows = [{"state": ["open", "closed"][n % 2], "text": f"{n} is a number"} for n in range(10)]
    assert text_columns(["state", "text"], by_column(rows)) == ("text",)
    assert text_columns(["state"], by_column(rows)) == ("state",)
    assert text_columns(["x", "n"], {"x": ["a"], "n": [1]}) == ("x",)
    assert text_columns(["code"], {"code": ["0xdeadbeaf"]}) == ()
    assert text_columns(["n"], {"n": [1]}) == text_columns(["n"], {}) == ()


def test_all_extensions_are_known():
    assert set(CONTENT) < set(KINDS)


# Time and memory


def read_all(path: Path) -> int:
    """Return the number of rows of a table."""
    table = open_table(path, path.name)
    return sum(1 for _ in table.rows(table.columns, Ledger(path.name)))


@pytest.mark.parametrize(
    ("make", "number"),
    [
        (lambda n: "a," * n + "\n" + "b," * n, 6_000),  # repeated names
        (lambda n: "a," * n + "\n" + "b,c\n" * n, 4_000),  # short rows
        (lambda n: "a" + "," * n + "\n" + ("b" + "," * n + "\n") * 9, 6_000),  # no names
    ],
)
def test_time_grows_with_the_size_of_a_wide_table(tmp_path, make, number):
    def read(text: str) -> int:
        (tmp_path / "a.csv").write_text(text)
        return read_all(tmp_path / "a.csv")

    assert_small(read, make, number)


def test_time_grows_with_the_number_of_columns(tmp_path):
    def read(names: str) -> int:
        table = pa.table({name: ["some text"] for name in names.split()})
        pq.write_table(table, tmp_path / "a.parquet")
        return read_all(tmp_path / "a.parquet")

    assert_small(read, lambda number: " ".join(f"c{each}" for each in range(number)), 1_000)


def test_time_grows_with_the_number_of_signs_in_a_text():
    assert_linear(lambda text: is_words(f"{text} ends here"), "@.")
    assert not is_words("somebody@example.com")
    assert is_words("write to somebody@example.com")


def test_a_sample_holds_only_the_start_of_nested_values():
    """A compressed row of 20 kB may hold a million lists."""
    values = {"lists": [[1], "a", {"b": 2}] * 1000, "object": {"c": [0] * 1000}}
    sample = sample_of([(1, values)])
    assert sample == {"lists": [[(), "a", {}] * 33 + [()]], "object": [{}]}


def test_a_number_may_be_larger_than_a_float(tmp_path):
    row = json.dumps({"text": "The library opens.", "number": 10**400})
    table = table_of(tmp_path / "a.jsonl", f"{row}\n{row}\n")
    assert (table.text_columns, table.scale_columns) == (("text",), ())


def test_rows_may_lack_a_hundred_columns_or_half(tmp_path):
    header = ",".join(f"column_{number}" for number in range(300))
    for width, expected in ((150, 9), (149, 0)):
        row = ",".join(["some text"] * width)
        (tmp_path / "a.csv").write_text("\n".join([header, *[row] * 9]))
        assert read_all(tmp_path / "a.csv") == expected


def test_blank_lines_may_stand_above_a_table(tmp_path):
    (tmp_path / "a.csv").write_text("\n" * 500 + "name,note\none,two\n")
    table = open_table(tmp_path / "a.csv", "a.csv")
    ledger = Ledger("a.csv")
    assert [*table.rows(table.columns, ledger)] == [(502, {"name": "one", "note": "two"})]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "[{}]"),
        ("a.json", '{{"a": {}}}'),
        ("a.jsonl", '{{"a": {}}}'),
    ],
)
def test_values_of_json_are_counted_before_they_take_memory(tmp_path, monkeypatch, name, text):
    number = 20_000
    monkeypatch.setattr(json_rows, "MOST_VALUES", number)
    monkeypatch.setattr(json_rows, "MOST_VALUES_OF_OBJECT", number)
    words = json.dumps("a, [b: {c" * number)
    (tmp_path / name).write_text(text.format(words))
    assert read_all(tmp_path / name) == 1  # marks inside a text are no values
    (tmp_path / name).write_text(text.format(f"[{'[],' * 400_000}[]]"))
    tracemalloc.start()
    rows = 0
    with contextlib.suppress(DataError):
        rows = read_all(tmp_path / name)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rows == 0
    assert most < 30 << 20


def test_values_that_parquet_and_arrow_store_once_are_read_with_little_memory(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(parquet, "MOST_DECODED", 1 << 20)
    monkeypatch.setattr(arrow_values, "MOST_OF_SMALL", 1 << 24)
    monkeypatch.setattr(arrow_values, "COST_OF_A_ROW", 1 << 14)
    zeros = pa.ListArray.from_arrays([0, 200_000], np.zeros(200_000, np.int8))
    words = pa.array([["word " * 2000] * 2000])
    parts = pa.table({"text": ["One text."], "zeros": zeros, "words": words})
    pq.write_table(parts, tmp_path / "a.parquet")
    rows, notes = read(open_table(tmp_path / "a.parquet", "a.parquet"))
    assert rows == [(1, {"text": "One text.", "words": None})]
    assert (
        "not read, because their values take more than 1 MB in a group of rows: zeros" in notes[1]
    )
    what = "1 row with lists of more than 1,048,576 values or 8,388,608 characters"
    assert f"{what} (a.parquet, line 1): read without them" in notes

    repeated = pa.table({"text": ["a" * 50_000] * 1000})
    pq.write_table(repeated, tmp_path / "b.parquet")
    nothing = pa.table({"text": pa.nulls(10**9)})
    with pa.ipc.new_file(tmp_path / "b.arrow", nothing.schema) as file:
        file.write_table(nothing)
    for name in ("b.parquet", "b.arrow"):
        with pytest.raises(
            DataError, match=rf"{name} after row [1-9][0-9,]{{2,4}}: its values repeat so often"
        ):
            read(open_table(tmp_path / name, name))


def test_few_rows_of_a_wide_table_are_judged():
    wide = {f"c{place}": "a" for place in range(20_000)}
    assert len(sample_of((number, wide) for number in range(1000))["c0"]) < 20
    assert len(sample_of((number, {"c0": "a"}) for number in range(1000))["c0"]) == 1000
