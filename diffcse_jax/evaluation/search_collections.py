"""Search collections: documents, queries and human judgements, in BEIR's form or in TREC's."""

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from diffcse_jax.errors import DataError
from diffcse_jax.evaluation.senteval_data import numbered_lines

# The files of BEIR's form and of TREC's; the first that exists is read.
_DOCUMENTS, _QUERIES = ("corpus.jsonl", "collection.tsv"), ("queries.jsonl", "queries.tsv", "topics.tsv")
_JUDGEMENTS = ("qrels/test.tsv", "qrels/dev.tsv", "qrels.tsv", "qrels.txt")


class Collection(NamedTuple):
    """Documents, queries and judgements by their ids. All queries are judged."""

    documents: Mapping[str, str]  # title and text, joined
    queries: Mapping[str, str]
    judgements: Mapping[str, Mapping[str, int]]  # by query: grades by document; 0: not relevant


def read_collection(folder: Path) -> Collection:
    """Read a collection.

    Args:
        folder: `corpus.jsonl` and `queries.jsonl` have objects with `_id`, `text` and perhaps `title`, as in BEIR;
            `collection.tsv` and `queries.tsv` (or `topics.tsv`) have an id and a text, separated by a tab, as in TREC.
            `qrels/test.tsv` (or `qrels/dev.tsv`, `qrels.tsv`, `qrels.txt`) has query, document and grade, below a
            header; or query, 0, document and grade, separated by blanks. Queries without judgements are left out.
    """
    documents, queries = (_read_texts(_first_file(folder, names)) for names in (_DOCUMENTS, _QUERIES))
    path = _first_file(folder, _JUDGEMENTS)
    judgements: dict[str, dict[str, int]] = {}
    first_lines: dict[str, int] = {}
    for number, line in numbered_lines(path):
        fields = line.split("\t") if line.count("\t") > 1 else line.split()
        *ids, grade = (field.strip() for field in fields)
        if not grade.removeprefix("-").isdecimal() or len(ids) not in (2, 3):
            if number == 1 and len(ids) == 2:  # a header
                continue
            raise DataError(f"{path}, line {number}: expected a query, a document and a grade (a whole number)")
        query, document = ids[0], ids[-1]
        for kind, key, known in (("query", query, queries), ("document", document, documents)):
            if key not in known:
                raise DataError(f"{path}, line {number}: the {kind} {key[:60]!r} is not in the collection")
        judgements.setdefault(query, {})[document] = int(grade)
        first_lines.setdefault(query, number)
    for query, grades in judgements.items():
        if max(grades.values()) < 1:
            raise DataError(f"{path}, line {first_lines[query]}: the query {query[:60]!r} has no relevant document")
    if not judgements:
        raise DataError(f"{path} has no judgements")
    return Collection(documents, {query: queries[query] for query in judgements}, judgements)


def _first_file(folder: Path, names: Iterable[str]) -> Path:
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        raise DataError(f"{folder} is not a search collection: it has no {' or '.join(names)}")
    return found


def _read_texts(path: Path) -> dict[str, str]:
    """Read texts by their id."""
    texts: dict[str, str] = {}
    is_json = path.suffix == ".jsonl"
    for number, line in numbered_lines(path):
        if is_json:
            key, text = _from_json(line)
        else:
            key, tab, text = line.partition("\t")
            key = key.strip() if tab else ""
        if not key:
            expected = "an object with `_id` and `text`" if is_json else "an id, a tab and a text"
            raise DataError(f"{path}, line {number}: expected {expected}")
        if key in texts:
            raise DataError(f"{path}, line {number}: the id {key[:60]!r} occurs twice")
        texts[key] = text.strip()
    return texts


def _from_json(line: str) -> tuple[str, str]:
    """Return the id of an object, and its title and text. They are empty strings if the line is not valid."""
    row = None
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line)
    if not isinstance(row, dict) or row.get("_id") is None or not isinstance(row.get("text"), str):
        return "", ""
    title, text = row.get("title"), row["text"]
    return str(row["_id"]), f"{title} {text}" if isinstance(title, str) and title else text
