"""Search collections: documents, queries and human judgements, in BEIR's form or in TREC's.

What trec_eval, BEIR and MTEB accept is accepted here. Whatever is left out or changed is counted,
and one warning says so for the whole collection.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from diffcse_jax.documents.ids import as_id
from diffcse_jax.documents.ledger import Ledger, Place
from diffcse_jax.documents.text.encodings import encodable
from diffcse_jax.documents.text.lines import lines_with_text
from diffcse_jax.errors import DataError
from diffcse_jax.hosts import log_line, report

COLLECTION = "retrieval"  # the kind of the task `retrieval:FOLDER`

# The files of BEIR's form and of TREC's; the first that exists is read.
_DOCUMENTS = ("corpus.jsonl", "collection.tsv")
_QUERIES = ("queries.jsonl", "queries.tsv", "topics.tsv")
_JUDGEMENTS = ("qrels/test.tsv", "qrels/dev.tsv", "qrels/validation.tsv", "qrels.tsv", "qrels.txt")
# In the first line of a tsv file, which other programs write with or without it.
_ID_NAMES = frozenset(("id", "_id", "docid", "doc_id", "docno", "pid", "passage_id", "corpus_id"))
_ID_NAMES |= {"qid", "query_id", "topic_id"}
_TEXT_NAMES = frozenset(("title", "text", "contents", "body", "passage", "document", "sentence"))
_TEXT_NAMES |= {"query", "question", "topic"}
_GRADE = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,2})?")
_LARGEST_GRADE = 1_000_000  # trec_eval counts the documents of each grade
_UNANSWERED = "judgement{s} of queries without a relevant document"


class Collection(NamedTuple):
    """Documents, queries and judgements by their ids. Each query has a relevant document."""

    documents: Mapping[str, str]  # title and text, joined
    queries: Mapping[str, str]
    # By query: grades by document; 0: not relevant. A document may be missing in `documents`.
    judgements: Mapping[str, Mapping[str, int]]


def read_collection(folder: Path, *, strict: bool = False) -> Collection:
    """Read a collection, and warn once of all that is odd in its files.

    Args:
        folder: `corpus.jsonl` and `queries.jsonl` have objects with `_id` (or `id`), `text` and
            perhaps `title`, as in BEIR; `collection.tsv` and `queries.tsv` (or `topics.tsv`) have
            an id and a text, separated by a tab, as in TREC. `qrels/test.tsv` (or another split,
            `qrels.tsv`, `qrels.txt`) has query, document and grade, or query, 0, document and
            grade, separated by tabs or blanks. All but JSON may have a header.
        strict: Raise `DataError` at the first line that is left out.

    Returns:
        The collection, without queries that have no relevant document. Relevant documents that are
        not in the corpus stay in the judgements, so they count as missed.
    """
    ledger = Ledger(str(folder), strict=strict, noun="line{s}")
    documents = _read_texts(_first_file(folder, _DOCUMENTS), "document{s}", ledger)
    queries = _read_texts(_first_file(folder, _QUERIES), "quer{y}", ledger)
    judgements = _read_judgements(_judgements_file(folder), documents, queries, ledger)
    report(ledger)
    return Collection(documents, {query: queries[query] for query in judgements}, judgements)


def _first_file(folder: Path, names: Iterable[str]) -> Path:
    path = next((folder / name for name in names if os.path.isfile(folder / name)), None)
    if path is None:
        needed = " or ".join(names)
        raise DataError(f"{str(folder)[:200]} is not a search collection: it has no {needed}")
    return path


def _judgements_file(folder: Path) -> Path:
    """Return the judgements of the split `test` or, if there are none, of another split."""
    splits = sorted((folder / "qrels").glob("*.tsv"))
    names = [name for name in _JUDGEMENTS if os.path.isfile(folder / name)]
    if not names and len(splits) > 1:
        listed = ", ".join(split.name for split in splits)
        raise DataError(f"{folder}/qrels has several splits: {listed}. Name one of them test.tsv")
    path = _first_file(folder, _JUDGEMENTS) if names or not splits else splits[0]
    if others := [split.name for split in splits if split != path]:
        log_line(f"notice: {path}: other splits are not read: {', '.join(others)}")
    return path


# Texts


class _Record(NamedTuple):
    """An id and its text, or the reason why a line has none."""

    key: str = ""
    text: str = ""
    problem: str = ""
    has_title_alone: bool = False  # the object has no key `text`


def _read_texts(path: Path, what: str, ledger: Ledger) -> dict[str, str]:
    """Read texts by their id. `what` they are, is for messages."""
    is_json = path.suffix == ".jsonl"
    texts: dict[str, str] = {}
    is_first = True
    for number, line in lines_with_text(path, ledger):
        place = Place(str(path), number)
        is_header = is_first and not is_json and _is_header(line)
        is_first = False
        if is_header:
            ledger.note(f"{path}: the first line names the columns: {', '.join(line.split())}")
            continue
        record = _from_json(line, place) if is_json else _from_table(line)
        key, text, problem, has_title_alone = record
        if problem:
            ledger.leave_out(problem, place)
        elif key in texts:
            ledger.leave_out("with an id that came before", place)
        else:
            texts[key] = text
            if not text:
                ledger.change(f"{what} without text", "kept", place)
            elif has_title_alone:
                ledger.change(f"{what} without `text`", "kept with the title alone", place)
    if not any(texts.values()):
        expected = "an object with `_id` and `text`" if is_json else "an id, a tab and a text"
        details = "; ".join(ledger.oddities()) or "The file is empty"
        raise DataError(f"{path}: no line has text. Expected {expected} in each line. {details}")
    ledger.count_file()
    ledger.make(what, len(texts))
    return texts


def _is_header(line: str) -> bool:
    """Return whether a line of a tsv file has the names of columns, and not an id and a text."""
    first, *others = (field.strip().lower().replace("-", "_") for field in line.split("\t"))
    return first in _ID_NAMES and others != [] and _TEXT_NAMES.issuperset(others)


def _from_table(line: str) -> _Record:
    key, tab, text = line.partition("\t")
    if not tab or not key.strip():
        return _Record(problem="without an id, a tab and a text")
    return _Record(key.strip(), text.strip())


def _from_json(line: str, place: Place) -> _Record:
    """Return the id of an object, and its title and text. A float that lost digits is refused."""
    row = None
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line)
    if not isinstance(row, dict):
        return _Record(problem="without a JSON object")
    key = _as_id(row.get("_id"), place) or _as_id(row.get("id"), place)
    if not key:
        return _Record(problem="without an id")
    title = _as_text(row.get("title"))
    text = row.get("text")
    if "text" not in row and not title:
        return _Record(problem="without `text`")
    if isinstance(text, list | dict | bool):
        return _Record(problem="whose `text` is not a string")
    joined = f"{title} {_as_text(text)}" if title else _as_text(text)
    return _Record(key, joined.strip(), has_title_alone="text" not in row)


def _as_id(value: Any, place: Place) -> str:
    """Return an id as text, or an empty text if a value is not one. See `ids.as_id`."""
    text = _as_text(value)
    return as_id(value if isinstance(value, float) else text, place) if text else ""


def _as_text(value: Any) -> str:
    """Return a string or number as text. Other values, such as null and NaN, are empty."""
    if isinstance(value, str):
        return encodable(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number and value == value else ""  # NaN is not itself


# Judgements


class _Judgement(NamedTuple):
    query: str
    document: str
    grade: float


def _read_judgements(
    path: Path, documents: Mapping[str, str], queries: Mapping[str, str], ledger: Ledger
) -> dict[str, dict[str, int]]:
    """Read grades by query and document, for queries with a relevant document."""
    judgements: dict[str, dict[str, int]] = {}
    lines: dict[str, list[Place]] = {}  # by query
    is_first = True
    for number, line in lines_with_text(path, ledger):
        place = Place(str(path), number)
        judgement = _judgement(line)
        if judgement is None:
            if not _is_remark(line, queries, is_first=is_first):
                ledger.leave_out("without a query, a document and a grade", place)
        elif judgement.query not in queries:
            ledger.leave_out("whose query is not among the queries", place)
        else:
            lines.setdefault(judgement.query, []).append(place)
            grades = judgements.setdefault(judgement.query, {})
            for what, outcome in _oddities(judgement, grades, documents):
                ledger.change(what, outcome, place)
            grades[judgement.document] = max(0, int(judgement.grade))
        is_first = is_first and line.startswith("#")
    for query in [query for query, grades in judgements.items() if not any(grades.values())]:
        del judgements[query]
        for place in lines[query]:
            ledger.change(_UNANSWERED, "left out, though trec_eval scores such queries 0", place)
    if not judgements:
        details = "; ".join(ledger.oddities()) or "The file is empty"
        raise DataError(f"{path}: no query has a relevant document. {details}")
    ledger.count_file()
    ledger.make("judgement{s}", sum(map(len, judgements.values())))
    return judgements


def _judgement(line: str) -> _Judgement | None:
    """Return the judgement in a line; None if the line has another form.

    Between tabs, ids may contain blanks. A grade is a number from minus to plus `_LARGEST_GRADE`.
    """
    *ids, grade = _fields(line)
    if len(ids) not in (2, 3) or not ids[0] or not ids[-1] or not _GRADE.fullmatch(grade):
        return None
    value = float(grade)
    return _Judgement(ids[0], ids[-1], value) if abs(value) <= _LARGEST_GRADE else None


def _fields(line: str) -> list[str]:
    line = line.strip()
    fields = line.split("\t") if line.count("\t") > 1 else line.split()
    return [field.strip() for field in fields]


def _is_remark(line: str, queries: Mapping[str, str], *, is_first: bool) -> bool:
    """Return whether a line that is not a judgement is a comment, as in trec_eval, or a header."""
    return line.startswith("#") or (is_first and _fields(line)[0] not in queries)


def _oddities(
    judgement: _Judgement,
    grades: Mapping[str, int],
    documents: Mapping[str, str],
) -> Iterable[tuple[str, str]]:
    """Yield what is odd about a judgement, and what becomes of it."""
    if judgement.document not in documents:
        what = "judgement{s} whose document is not in the corpus"
        yield what, "a relevant document counts as missed"
    if judgement.document in grades:  # trec_eval refuses the file
        yield "repeated judgement{s}", "the last one counts, as in BEIR"
    if not judgement.grade.is_integer():
        yield "grade{s} with decimals", "cut to a whole number, as in trec_eval"
