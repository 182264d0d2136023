"""What a name can stand for, and an account of everything that is found there."""

import contextlib
import dataclasses
import functools
import gzip
import io
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diffcse_jax.config import DataConfig
from diffcse_jax.data.sources import open_corpus, open_split
from diffcse_jax.data.token_store import Corpus
from diffcse_jax.documents.document import Document, Section
from diffcse_jax.documents.find import LINK_OUT, LINK_TO_FOLDER, find_source
from diffcse_jax.documents.ledger import EMPTY, Ledger
from diffcse_jax.documents.memory import documents_in_memory
from diffcse_jax.documents.open import BESIDE_FILES, open_documents_to_search
from diffcse_jax.errors import DataError, UserError
from diffcse_jax.search.index import Index
from diffcse_jax.search.settings import IndexSettings


def opened(path: Path | str, **options) -> Corpus:
    return open_corpus(DataConfig(train_file=str(path), **options))


def searched(path: Path | str, **options) -> tuple[list[Document], Ledger]:
    """Return the documents that search reads, and the account."""
    ledger = Ledger(str(path))
    return list(open_documents_to_search(str(path), **options).read(ledger)), ledger


def text_of(document: Document) -> str:
    return " ".join(document.text().split())


# Names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "--input is empty. Name a file"),
        ("/dev/zero", "--input: cannot read /dev/zero: it is a pipe or a device."),
        ("{}/pipe.txt", "pipe.txt: it is a pipe or a device"),
        ("{}/a\0b.txt", "embedded null"),
        ("{}/sentence.txt", "no such file. Name a file, a folder, docstrings or wiki1m"),
        ("{}/empty", "empty: no file of a known kind (none found)"),
        ("{}/none-*.txt", "none-*.txt. Check the pattern, and put it in quotes"),
        ("{}/a.odd", "a.odd: no file of a known kind (skipped 1 file: 1 of the kind .odd"),
        ("{}/numbers.csv", "numbers.csv: no table with a column of text"),
    ],
)
def test_errors_name_the_users_option_and_the_fix(tmp_path, name, message):
    """Also of a pipe or device, which is never waited for."""
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.odd").write_text("x")
    (tmp_path / "numbers.csv").write_text("id,n\n1,2\n2,3\n")
    with pytest.raises(UserError, match=re.escape(message.format(tmp_path))) as raised:
        searched(name.format(tmp_path))
    assert "data." not in str(raised.value).partition("(")[0]


@pytest.mark.parametrize("name", ["", "/*", "/**", "/**/[abm]*"])
def test_folders_and_patterns_stand_for_their_files(tmp_path, name):
    folder = tmp_path / "shards"
    (folder / "more").mkdir(parents=True)
    lines = b'{"n": 1, "text": "one"}\n\n{"n": 2, "text": "two"}\n'
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "b.jsonl").write_text("")
    (folder / "more/a.jsonl").write_text(
        '{"text": "three", "other": "x"}\n{"text": {"a": 1}}\n{"text": "five"}\n'
    )
    for other in ("LICENSE", ".hidden.jsonl", "_meta.json", "a.md"):
        (folder / other).write_text('{"text": "not this"}\n')
    for link in ("0.csv", "more/b.jsonl"):
        (folder / link).symlink_to(folder / "more/a.jsonl")
    assert [row.texts for row in opened(folder / "_meta.json").rows()] == [("not this",)]
    corpus = opened(f"{folder}{name}", columns=("text",))
    ledger = corpus.new_ledger()
    rows = list(corpus.rows(ledger))
    assert [row.texts[0] for row in rows] == ["one", "two", "three", "five"]
    assert [str(row.place).rpartition("/")[2] for row in rows[1:3]] == [
        "a.jsonl.gz, line 3",
        "a.jsonl, line 1",
    ]
    left_out = {reason: entry.count for reason, entry in ledger.left_out.items()}
    assert left_out == {"empty": 1, "with a value that is not text": 1}
    if not name:
        unread = {reason: entry.count for reason, entry in ledger.unread.items() if entry.is_loss}
        others = {"without extension": 1, "named _*, as other programs name their notes": 1}
        documents = "without rows to train on (data.pairs makes some of documents)"
        assert unread == others | {documents: 1}
    with pytest.raises(DataError, match=r"a\.jsonl\.gz, line 2: empty"):
        list(opened(f"{folder}/**/a.json*", columns=("text",), on_bad_line="error").rows())
    before = corpus.fingerprint()
    (folder / "b.jsonl").write_text('{"text": "new"}')
    assert opened(f"{folder}{name}", columns=("text",)).fingerprint() != before


def write_rows(file, rows):
    table = pa.Table.from_pylist(rows)
    if file.suffix == ".parquet":
        pq.write_table(table, file)
    elif file.suffix == ".csv":
        pyarrow.csv.write_csv(table, file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


GRADES_OF_PAIRS = [
    (4.8, 0.0),
    (True, False),
    ("yes", "N"),
    (1, 0),
    (1 / 3, 2e-05),
    ("0,5", "1,0"),
    ("50%", "100 %"),
    tuple(n / 60 for n in range(20)),  # similarities, which do not repeat
    tuple(n / 4 for n in range(20)) * 2,
]


@pytest.mark.parametrize("grades", GRADES_OF_PAIRS)
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_pairs_beside_a_column_of_few_numbers_are_refused(tmp_path, grades, suffix):
    file = tmp_path / f"pairs{suffix}"
    rows = [
        {"sentence1": f"A cat {n} sleeps.", "sentence2": f"A dog {n} runs.", "how_close": grade}
        for n, grade in enumerate(grades if len(grades) > 2 else grades * 3)
    ]
    write_rows(file, rows)
    with pytest.raises(DataError, match=r"how_close holds few numbers.*`diffcse finetune`"):
        opened(file)
    assert len(list(opened(file, columns=("sentence1", "sentence2")).rows())) == len(rows)


@pytest.mark.parametrize("early", [1, None])
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_grades_that_only_later_rows_show_are_seen(tmp_path, early, suffix):
    kinds = [early] * 1000 + [1, 0, 1, 0]
    write_rows(
        tmp_path / f"pairs{suffix}",
        [
            {"question": f"Q{n}?", "answer": f"A{n}.", "kind": kind, "same": early}
            for n, kind in enumerate(kinds)
        ],
    )
    with pytest.raises(DataError, match="kind holds few numbers"):
        opened(tmp_path / f"pairs{suffix}")


def test_columns_of_years_counts_and_ids_beside_pairs_are_not_grades(tmp_path):
    rows = "".join(f"Q{n}?,A{n}.,{n % 2},{2020 + n % 2},1,{n}.99\n" for n in range(6))
    (tmp_path / "a.csv").write_text(f"question,answer,user_id,year,version,price\n{rows}")
    assert len(list(opened(tmp_path / "a.csv").rows())) == 6


def test_an_id_that_may_have_lost_digits_is_refused(tmp_path):
    file = tmp_path / "a.parquet"
    ids = [10.0**17 + 1, 3.0]
    pq.write_table(pa.table({"id": ids, "text": ["One apple.", "Two pears."]}), file)
    with pytest.raises(
        DataError, match=r"a\.parquet, line 1: the id 1e\+17 is a float.*dtype='Int64'"
    ):
        searched(file)
    for written in ("1.23457E+17", "1e+17", "-9007199254740992.0"):
        (tmp_path / "a.csv").write_text(f"id,text\n{written},One apple.\n1e17,Two pears.\n")
        with pytest.raises(DataError, match=r"a\.csv, line 2: the id .* is a float"):
            searched(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text("id,text\n1e17,A hash.\n1.0,A.\n2e+05,B.\n1e+1,C.\n")
    assert len(searched(tmp_path / "a.csv")[0]) == 4
    rows = [{"id": each, "text": f"Text {each}."} for each in ids]
    with pytest.raises(DataError, match=r"line 1: the id 1e\+17 is a float"):
        list(documents_in_memory(rows).read(Ledger("given")))


@pytest.mark.parametrize(("kind", "first"), [("float16", 2**11), ("float32", 2**24)])
def test_floats_of_few_bits_lose_digits_of_ids_earlier(tmp_path, kind, first):
    datasets = pytest.importorskip("datasets")
    for key, is_refused in ((first - 1, False), (first, True)):
        ids = np.array([key, 3], kind)
        table = pa.table({"id": ids, "text": ["One apple.", "Two pears."]})
        pq.write_table(table, tmp_path / "a.parquet")
        frame = table.to_pandas()
        given = (
            table,
            frame,
            datasets.Dataset(table),
            [{"id": each, "text": f"Text {each}."} for each in ids],
        )
        for source in given:
            with (
                pytest.raises(DataError, match=rf"the id {first}\.0 is a float")
                if is_refused
                else contextlib.nullcontext()
            ):
                documents = [*documents_in_memory(source).read(Ledger("given"))]
                assert [each.id for each in documents] == [str(key), "3"]
        with (
            pytest.raises(DataError, match=r"a\.parquet, line 1: the id .* is a float")
            if is_refused
            else contextlib.nullcontext()
        ):
            assert len(searched(tmp_path / "a.parquet")[0]) == 2


@pytest.mark.parametrize("pattern", ["**", "**/", "**/*.md", "**/**/*.md"])
def test_patterns_of_any_depth_do_not_follow_links(tmp_path, pattern):
    """Packages of a repository link to one another, as pnpm makes them."""
    for name in "abc":
        (tmp_path / name / "modules").mkdir(parents=True)
        (tmp_path / name / "a.md").write_text(f"# {name}\n\nA text.\n")
        for other in "abc":
            (tmp_path / name / "modules" / other).symlink_to(tmp_path / other)
    documents, ledger = searched(f"{tmp_path}/{pattern}")
    assert [document.id.partition("#")[0] for document in documents] == [
        f"{tmp_path}/{name}/a.md" for name in "abc"
    ]
    assert ledger.unread[LINK_TO_FOLDER].count == 9


@pytest.mark.parametrize("name", ["", "/*", "/**", "/**/*"])
def test_links_that_leave_the_folder_are_read_only_if_the_user_wants_it(tmp_path, name):
    outside = tmp_path / "outside"
    folder = tmp_path / "folder"
    outside.mkdir()
    folder.mkdir()
    (outside / "secret.md").write_text("Outside.")
    (folder / "a.md").write_text("Inside.")
    (folder / "link.md").symlink_to(outside / "secret.md")
    (folder / "more").symlink_to(outside)
    (folder / "again").symlink_to(folder)
    source = find_source(f"{folder}{name}")
    assert [file.name for file in source.files] == ["a.md"]
    reasons = {skipped.reason for skipped in source.skipped}
    assert LINK_OUT in reasons
    followed = find_source(f"{folder}{name}", follow_links=True)
    assert {file.resolve().name for file in followed.files} == {"a.md", "secret.md"}


def test_no_pattern_leads_through_a_link_that_leaves_its_folder(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret.md").write_text("Outside.")
    (tmp_path / "folder/more").mkdir(parents=True)
    (tmp_path / "folder/more/a.md").write_text("Inside.")
    (tmp_path / "folder/link").symlink_to(tmp_path / "outside")
    documents, ledger = searched(f"{tmp_path}/folder/*/*.md")
    assert [*map(text_of, documents)] == ["Inside."]
    assert ledger.unread[LINK_TO_FOLDER].count == 1
    named, _ = searched(f"{tmp_path}/folder/link/*.md")
    assert [*map(text_of, named)] == ["Outside."]


def test_a_data_set_with_links_that_leave_its_folder_is_not_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["Outside."]}).save_to_disk(tmp_path / "outside")
    (tmp_path / "folder").mkdir()
    for file in (tmp_path / "outside").iterdir():
        (tmp_path / "folder" / file.name).symlink_to(file)
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / "folder" / name).unlink()
        (tmp_path / "folder" / name).write_bytes((tmp_path / "outside" / name).read_bytes())
    with pytest.raises(DataError, match="1 a data set with links to files outside the folder"):
        searched(tmp_path / "folder")
    documents, _ = searched(tmp_path / "folder", follow_links=True)
    assert [*map(text_of, documents)] == ["Outside."]


def test_a_link_to_itself_is_named_and_the_rest_is_read(tmp_path):
    (tmp_path / "a.md").write_text("A text.")
    (tmp_path / "loop.md").symlink_to("loop.md")
    documents, ledger = searched(tmp_path)
    assert [*map(text_of, documents)] == ["A text."]
    assert "Too many levels of symbolic links" in ledger.summary()


def test_a_folder_that_cannot_be_read_is_named_and_the_rest_is_read(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.md").write_text("A text.")
    scan = os.scandir

    def refusing(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    documents, ledger = searched(tmp_path)
    assert len(documents) == 1
    assert ledger.unread["unreadable: Permission denied"].count == 1


def test_names_of_files_cannot_forge_a_line_or_colour_a_terminal(tmp_path):
    file = tmp_path / "a\n\x1b[31mwarning: all is well.pdf"
    file.write_bytes(b"not a pdf")
    (tmp_path / "b.md").write_text("A text.")
    _, ledger = searched(tmp_path)
    (line,) = [line for line in ledger.lines() if "all is well" in line]
    assert line.isprintable()
    assert r"a\n\x1b[31mwarning" in line


@pytest.mark.parametrize("name", ["", "/*", "/**/*.md"])
def test_a_folder_whose_files_may_only_be_listed_is_named_and_the_rest_is_read(
    name, tmp_path, monkeypatch
):
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed/b.md").write_text("A text.")
    (tmp_path / "a.md").write_text("A text.")

    def refusing(function, path, **options):
        if "/closed/" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return function(path, **options)

    for function in (os.stat, os.lstat):
        monkeypatch.setattr(os, function.__name__, functools.partial(refusing, function))
    source = find_source(f"{tmp_path}{name}")
    assert [file.name for file in source.files] == ["a.md"]
    assert ["closed/b.md': Permission denied" in each.reason for each in source.skipped] == [True]


def test_a_pipe_with_the_name_of_a_data_set_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "dataset_info.json")
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "a.md").write_text("A text.")
    documents, ledger = searched(tmp_path)
    assert f"{tmp_path}/a.md" in [document.id for document in documents]
    assert any("dataset_info.json" in line for line in ledger.lines())


def test_rows_of_files_leave_out_a_data_set_beside_them_without_opening_it(tmp_path):
    (tmp_path / "saved").mkdir()
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / "saved" / name).write_text("{}")  # which would be refused
    (tmp_path / "rows.csv").write_text("sentence1,sentence2\nOne.,Two.\n")
    corpus = opened(tmp_path)
    ledger = corpus.new_ledger()
    assert [row.texts for row in corpus.rows(ledger)] == [("One.", "Two.")]
    assert ledger.unread[BESIDE_FILES].count == 1


def test_files_beside_a_saved_data_set_are_listed(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["One text.", "Another one."]}).save_to_disk(tmp_path)
    (tmp_path / "more.csv").write_text("id,text\n1,Not read.\n")
    documents, ledger = searched(tmp_path)
    assert len(documents) == 2
    assert ledger.unread["beside the files of a data set"].count == 1
    with pytest.raises(DataError, match=r"more\.csv"):
        [*opened(tmp_path, on_bad_line="error").rows()]


@pytest.mark.parametrize(
    ("row", "read", "change"),
    [
        ({"query": "q", "positive": ["a", "b"], "negative": ["c", "d"]},
         [("q", "a", "c", "d"), ("q", "b", "c", "d")], False),
        ({"anchor": "q", "positive": ["a", "b"]}, [("q", "a"), ("q", "b")], False),
        ({"question": "q", "answer": [42, "b"]}, [("q", "42"), ("q", "b")], False),
        ({"query": ["a", "b"], "answer": "c"}, [("a\nb", "c")], True),
        ({"set": ["a", "b"]}, [("a\nb",)], True),
    ],
)  # fmt: skip
def test_lists_are_rows_of_their_own_or_counted(tmp_path, row, read, change):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    corpus = opened(path)
    ledger = corpus.new_ledger()
    assert [row.texts for row in corpus.rows(ledger)] == read
    assert bool(ledger.changed) == change


def test_tokens_are_made_again_after_a_library_was_installed(tmp_path, monkeypatch):
    (tmp_path / "a.md").write_text("Read in both cases, unlike the other file.")
    (tmp_path / "b.pdf").write_bytes(b"%PDF")

    def fingerprint() -> str:
        return open_documents_to_search(str(tmp_path)).fingerprint()

    installed = fingerprint()
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    assert fingerprint() != installed


def test_rows_of_files_of_several_kinds_are_refused(tmp_path):
    (tmp_path / "a[1].txt").write_text("one\n")
    (tmp_path / "b.csv").write_text("text\none\n")
    (tmp_path / "c.csv").write_text("body,title\none,two\n")
    with pytest.raises(
        DataError, match=r"files of several kinds \(2 \.csv, 1 \.txt\)\. Name the files of one"
    ):
        opened(tmp_path)
    texts = [row.texts for row in opened(f"{tmp_path}/a[1].txt").rows()]
    assert texts == [("one",)]  # the name of a file, not a pattern
    with pytest.raises(DataError, match=r"c\.csv: no column 'text'\. It has: body, title"):
        opened(f"{tmp_path}/*.csv")


@pytest.mark.parametrize(
    ("name", "content", "options", "reason"),
    [
        (
            "a.csv",
            "a,b,c\nx y,z,w\n",
            {"pairs": "lead", "columns": ("a", "b", "c")},
            "name a title and a text",
        ),
        (
            "a.md",
            "# One\n",
            {"pairs": "lead", "columns": ("text",)},
            r"no table with a column of text \(.*a\.md",
        ),
        ("folder/a.md", "# One\n", {}, r"folder: these files contain documents\. Set data\.pairs"),
        (
            "a.md",
            "# One\n",
            {"columns": ("text",)},
            r"a\.md: these files contain documents\. Do not name columns$",
        ),
        (
            "a.md",
            "# A\n\nOne.",
            {"pairs": "lead", "held_out": 0.1},
            r"a single document, and data\.held_out=0\.1",
        ),
        ("a.txt", "\n \n", {}, r"a\.txt: no usable text \(.*2 empty"),
    ],
)
def test_sources_without_rows_are_refused(tmp_path, name, content, options, reason):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    with pytest.raises(DataError, match=reason):
        list(opened(tmp_path / Path(name).parts[0], **options).rows())


# Documents to search


def test_each_document_has_an_id_and_a_place(tmp_path):
    (tmp_path / "a.md").write_text("# Rules\n\nThe cafe is closed on Monday.\n")
    (tmp_path / "faq.csv").write_text(
        "id,title,text,note\n7,Cafe,It opens at ten.,x\n8,Hall,It is open.,\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"text": "One."}\n{"text": "Two.", "n": 3}\n')
    found, ledger = searched(tmp_path)
    by_id = {document.id: document for document in found}
    assert [*by_id] == [
        f"{tmp_path}/a.md",
        "7",
        "8",
        f"{tmp_path}/rows.jsonl:1",
        f"{tmp_path}/rows.jsonl:2",
    ]
    assert str(by_id["8"].place) == f"{tmp_path}/faq.csv, line 3"
    assert json.loads(by_id["7"].columns) == {"note": "x"}
    assert by_id["7"].sections[0].title == "Cafe"
    assert json.loads(by_id[f"{tmp_path}/rows.jsonl:2"].columns) == {"n": 3}
    assert (ledger.files, ledger.texts) == (3, 5)


def test_a_row_whose_only_text_is_its_title_is_a_document(tmp_path):
    texts: list = ["", None, " \n", []]
    rows = [{"title": f"Mount  {i}", "text": text} for i, text in enumerate(texts)]
    rows += [{"title": "Sea", "n": 1}, {"title": "-", "text": ""}, {"title": "Lake", "text": {}}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    in_memory = Ledger("given")
    given = list(documents_in_memory(rows).read(in_memory))
    for found, ledger in (searched(tmp_path / "a.jsonl"), (given, in_memory)):
        sections = [document.sections for document in found]
        titles = ["Mount 0", "Mount 1", "Mount 2", "Mount 3", "Sea", "-"]
        assert sections == [(Section(title, ()),) for title in titles]
        left_out = {reason: entry.count for reason, entry in ledger.left_out.items()}
        assert left_out == {"with a value that is not text": 1}
        (line,) = [line for line in ledger.lines() if "title alone" in line]
        assert line.startswith("1 row without the column of text")


def test_keys_that_only_later_rows_have_are_read_or_noted(tmp_path):
    path = tmp_path / "a.jsonl"
    rows: list[dict] = [{"text": f"This is row {number}."} for number in range(1000)]
    rows.append({"id": "x", "title": "Zanzibar", "text": "An island.", "note": "It was seen."})
    rows.append({"_id": "y", "text": "Another row."})
    path.write_text("\n".join(map(json.dumps, rows)))
    (*_, found, other), ledger = searched(path)
    assert (found.id, text_of(found)) == ("x", "Zanzibar An island.")
    assert json.loads(found.columns) == {"note": "It was seen."}
    assert (other.id, other.columns) == ("y", "")
    assert not ledger.notes
    *_, found, other = documents_in_memory(rows).read(Ledger("given"))
    assert (found.id, text_of(found)) == ("x", "Zanzibar An island.")
    assert (json.loads(found.columns), other.id) == ({"note": "It was seen."}, "y")
    for row in rows:
        row["body"] = row.pop("text")
    path.write_text("\n".join(map(json.dumps, rows)))
    late = (
        "not read as text: title (line 1,001), note (line 1,001). To choose others, use --columns"
    )
    documents, ledger = searched(path)
    assert json.loads(documents[1000].columns) == {"title": "Zanzibar", "note": "It was seen."}
    corpus = opened(path)
    own = corpus.new_ledger()
    assert len(list(corpus.rows(own))) == 1002
    assert all(late in next(iter(each.notes)) for each in (ledger, own))
    *_, found, _ = documents_in_memory(rows).read(Ledger("given"))
    assert text_of(found) == "An island. Zanzibar It was seen."


def test_an_id_is_one_document_only_within_a_file(tmp_path):
    (tmp_path / "a.csv").write_text("id,text\n1,One.\n2,Two.\n2,Two more.\n")
    (tmp_path / "b.csv").write_text("id,text\n2,Three.\n2,Four.\n3,Five.\n")
    (tmp_path / "c.csv").write_text("id,text\n1,Six.\n")
    found, ledger = searched(tmp_path)
    two = f"{tmp_path}/b.csv#2"
    assert [each.id for each in found] == ["1", "2", "2", two, two, "3", f"{tmp_path}/c.csv#1"]
    (note,) = ledger.notes
    assert note.startswith(
        f"{tmp_path}/a.csv and {tmp_path}/b.csv share 1 id, and 1 more pair of files share"
    )
    (tmp_path / "b.csv").write_text("id,text\n2,Three.\n 2 ,Four.\n ,Five.\n ,Six.\n,Seven.\n")
    found, ledger = searched(tmp_path / "b.csv")
    ids = [each.id.removeprefix(f"{tmp_path}/") for each in found]
    assert (ids, [*ledger.notes]) == (["2", "2", "b.csv:4", "b.csv:5", "b.csv:6"], [])


def test_tables_without_known_columns_are_read_with_all_text(tmp_path):
    rows = 'id,subject,body,customer\n1,Printer,"The printer prints empty pages.",blue\n2,Login,"I cannot log in.",red\n'
    (tmp_path / "helpdesk.csv").write_text(rows)
    (first, _), ledger = searched(tmp_path / "helpdesk.csv")
    assert first.id == "1"
    assert text_of(first).startswith("Printer The printer prints empty pages.")
    (note,) = [each for each in ledger.notes if "columns of text" in each]
    assert "subject, body" in note
    assert "--columns" in note
    documents, _ = searched(tmp_path / "helpdesk.csv", columns=["body"], id_column="customer")
    first = documents[0]
    assert (first.id, text_of(first)) == ("blue", "The printer prints empty pages.")
    assert first.whole


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", ",text\n0,One text.\n1,Two texts.\n"),  # as pandas writes it
        ("a.jsonl", '{"": "0", "text": "One text."}\n{"": "1", "text": "Two texts."}\n'),
    ],
)
def test_a_column_without_a_name_is_neither_id_nor_title(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content)
    for options in ({}, {"columns": ["text"]}):
        documents, _ = searched(path, **options)
        assert [document.id.partition(name)[1] for document in documents] == [name, name]
        assert [text_of(document) for document in documents] == ["One text.", "Two texts."]
        assert "0" in json.loads(documents[0].columns).values()


def test_standard_input_has_lines(monkeypatch):
    content = io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfone\r\n\ntwo\n"))
    monkeypatch.setattr(sys, "stdin", content)
    found, ledger = searched("-")
    assert [(text_of(each), each.place.row) for each in found] == [("one", 1), ("two", 3)]
    assert ledger.left_out["empty"].count == 1


@pytest.mark.parametrize("content", ["Three.\nFour.\n", "Three.\n\nFour.\n"])
def test_each_txt_file_of_a_folder_is_a_document_whatever_is_in_it(tmp_path, content):
    (tmp_path / "a.txt").write_text("One.\nTwo.\n")
    assert len(searched(tmp_path / "a.txt")[0]) == 2  # a file that is named holds lines
    (tmp_path / "b.txt").write_text(content)
    found, ledger = searched(tmp_path)
    assert len(found) == 2
    assert [*ledger.notes] == [f"{tmp_path}: each of its txt files is a document"]


@pytest.mark.parametrize("options", [{"columns": ["text"]}, {"id_column": "id"}])
@pytest.mark.parametrize(
    ("name", "reason"), [("-", "is read as lines"), ("docstrings", "have no columns")]
)
def test_columns_of_what_has_none_are_refused(name, reason, options):
    with pytest.raises(
        DataError, match=rf"--input {name}: .*{reason}, so --columns and --id_column do not apply"
    ):
        open_documents_to_search(name, **options)


def test_of_a_search_collection_only_documents_are_read(tmp_path):
    (tmp_path / "set/qrels").mkdir(parents=True)
    row = {"_id": "a", "title": "A clock", "text": "This is a clock that tells the time."}
    (tmp_path / "set/corpus.jsonl").write_text(json.dumps(row))
    (tmp_path / "set/queries.jsonl").write_text(
        json.dumps({"_id": "q", "text": "What is a clock? It tells what."})
    )
    (tmp_path / "set/qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq\ta\t1\n")
    for folder in (tmp_path / "set", tmp_path):
        corpus = opened(folder, pairs="lead")
        ledger = corpus.new_ledger()
        assert [each.texts for each in corpus.rows(ledger)] == [("A clock", row["text"])]
        assert ledger.unread["of queries and judgements"].count == 2
        assert not ledger.has_losses
        (document,), _ = searched(folder)
        assert document.id == "a"


# Nothing is lost silently

words = st.sampled_from(["alpha", "beta", "gamma", "delta", ""])
lines = st.lists(words, max_size=4).map(" ".join)
contents = st.one_of(
    st.tuples(st.sampled_from([".txt", ".md", ".rst", ".html"]), st.lists(lines, max_size=5).map("\n".join)),
    st.tuples(st.just(".jsonl"), st.lists(lines | st.integers(), max_size=4).map(
        lambda texts: "\n".join(json.dumps({"title": "t", "text": text}) for text in texts))),
    st.tuples(st.just(".csv"), st.lists(lines, max_size=4).map(lambda rows: "\n".join(["text,n", *rows]))),
    st.tuples(st.sampled_from([".docx", ".png", "", ".xyz"]), st.just("alpha")),
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(contents, min_size=1, max_size=5))
def test_the_ledger_accounts_for_every_file_and_text(tmp_path_factory, files):
    folder = tmp_path_factory.mktemp("folder")
    for number, (extension, content) in enumerate(files):
        (folder / f"{number}{extension}").write_text(content)
    with contextlib.suppress(DataError):
        found, ledger = searched(folder)
        check_account(folder, files, found, ledger)
        return
    with pytest.raises(DataError, match=r"no file of a known kind|no table with a column of text"):
        searched(folder)


def check_account(
    folder: Path, files: list[tuple[str, str]], found: list[Document], ledger: Ledger
) -> None:
    assert ledger.files + sum(entry.count for entry in ledger.unread.values()) == len(files)
    assert ledger.texts == len(found)
    for number, (extension, content) in enumerate(files):
        name = f"{folder}/{number}{extension}"
        kept = " ".join(text_of(each) for each in found if each.place.file == name)
        is_named = any(
            place.file == name
            for entry in (*ledger.unread.values(), *ledger.left_out.values())
            for place in entry.first
        )
        if extension in (".txt", ".md", ".rst") and not is_named:
            assert sorted(re.findall(r"[a-z]+", kept)) == sorted(re.findall(r"[a-z]+", content))
        if not kept and re.search(r"[a-z]{4}", content) and extension not in (".csv", ".png"):
            assert is_named


def test_losses_are_errors_if_strict(tmp_path):
    (tmp_path / "a.txt").write_text("One text.\n\nAnother text.\n")
    (tmp_path / "b.docx").write_text("PK")
    (tmp_path / "c.png").write_text("x")
    split = open_split(DataConfig(str(tmp_path), pairs="lead", held_out=0.1, on_bad_line="error"))
    with pytest.raises(DataError, match=r"b\.docx was not read: "):
        list(split.training(Ledger("a", strict=True)))
    (tmp_path / "b.docx").unlink()
    assert list(searched(tmp_path)[0])


def test_a_file_that_is_gone_before_it_is_read_is_listed(tmp_path):
    for name in ("a.md", "b.md"):
        (tmp_path / name).write_text("One text.\n")
    (tmp_path / "c.md.gz").write_bytes(gzip.compress(b""))
    source = open_documents_to_search(tmp_path)
    (tmp_path / "a.md").unlink()
    ledger = Ledger("a folder")
    assert [text_of(each) for each in source.read(ledger)] == ["One text."]
    is_loss = {reason: entry.is_loss for reason, entry in ledger.unread.items()}
    assert is_loss == {"no such file": True, "empty": False}


@pytest.mark.parametrize("pattern", ["", "/**", "/**/*.arrow", "/**/*.json"])
def test_an_index_below_a_folder_is_not_text(tmp_path, pattern):
    index = tmp_path / "docs/index"
    index.parent.mkdir()
    (tmp_path / "docs/rules.json").write_text('{"text": "It opens at ten."}')
    arrow = pa.table({"text": ["It is open."]})
    with pa.ipc.new_file(tmp_path / "docs/rows.arrow", arrow.schema) as sink:
        sink.write_table(arrow)
    before = {text_of(each) for each in searched(f"{tmp_path}/docs{pattern}")[0]}
    assert before
    own = Index.of_settings(IndexSettings(mode="lexical"), None)
    own.add(["A text of the index."])
    own.save(index)
    found, ledger = searched(f"{tmp_path}/docs{pattern}")
    assert {text_of(each) for each in found} == before
    assert ledger.unread["an index of this program"].count == 1
    assert not ledger.has_losses
    with pytest.raises(DataError, match="1 an index of this program"):
        searched(index)


def test_what_the_configuration_wants_left_out_is_not_a_loss():
    ledger = Ledger("a", strict=True, refuse_empty=True)
    ledger.leave_out(EMPTY, is_loss=False)
    assert not ledger.has_losses
    with pytest.raises(DataError, match="a: empty"):
        ledger.leave_out(EMPTY)
    ledger = Ledger("a", strict=True)
    ledger.leave_out(EMPTY)
    assert not ledger.has_losses


@pytest.mark.parametrize(
    ("name", "text", "columns"),
    [("one.txt", "One sentence.\n", "sentence"), ("one.csv", "text\nOne sentence.\n", "text")],
)
def test_single_sentences_are_refused_where_pairs_are_asked_for(
    tmp_path: Path, name: str, text: str, columns: str
):
    (tmp_path / name).write_text(text)
    message = rf"each row has 1 text \({columns}\), but data.min_columns=2"
    with pytest.raises(DataError, match=message):
        opened(tmp_path / name, min_columns=2)
    assert opened(tmp_path / name).columns == (columns,)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("anchor,positive,negative", "anchor, positive, negative are pairs with hard negatives"),
        ("Sentence1,sentence2,Score", "Score grades pairs of Sentence1, sentence2"),
    ],
)
def test_pairs_that_are_not_documents_are_refused(head, message, tmp_path):
    rows = "the river is wide here,boats go up the river,letters come on Monday\n"
    (tmp_path / "a.csv").write_text(f"{head}\n{rows}")
    data = DataConfig(train_file=str(tmp_path / "a.csv"), pairs="lead", held_out=0.1)
    with pytest.raises(DataError, match=f"{message}, so its rows are not documents"):
        open_split(data)
    open_split(dataclasses.replace(data, columns=tuple(head.split(",")[:2])))
    (tmp_path / "a.csv").write_text(f"question,answer,note\n{rows}")  # a lead and its rest
    open_split(data)
