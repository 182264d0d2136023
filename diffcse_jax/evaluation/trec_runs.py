"""Rankings in files of TREC's form, so that rankings of other programs can be compared."""

import math
from collections.abc import Mapping
from pathlib import Path

from diffcse_jax.errors import DataError
from diffcse_jax.evaluation.search_collections import Collection
from diffcse_jax.evaluation.senteval_data import numbered_lines
from diffcse_jax.io import disk_errors, write_text

Ranking = Mapping[str, Mapping[str, float]]  # by query: scores by document


def best_first(hits: Mapping[str, float]) -> list[str]:
    """Return documents by their scores, the highest first, in the order of trec_eval.

    Of equal scores, the last id in the order of characters comes first.
    """
    return sorted(hits, key=lambda document: (hits[document], document), reverse=True)


def write_run(path: Path, ranking: Ranking, name: str) -> None:
    """Write a ranking in TREC's form: `query Q0 document rank score name`, best first."""
    lines = []
    for query, scores in ranking.items():
        for rank, document in enumerate(best_first(scores), 1):
            score = f"{scores[document]:.9g}"  # all digits of a float32, so that no ties arise
            lines.append(f"{query} Q0 {document} {rank} {score} {name}")
    with disk_errors(path, safe="Nothing else was changed.", instead="name another folder with --runs"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "\n".join([*lines, ""]))


def read_run(path: Path, collection: Collection) -> dict[str, dict[str, float]]:
    """Read a ranking in TREC's form. Queries that the collection does not have are left out."""
    ranking: dict[str, dict[str, float]] = {}
    for number, line in numbered_lines(path):
        try:
            query, _, document, _, score, _ = line.split()
            value = float(score)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: expected `query Q0 document rank score name`") from error
        if not math.isfinite(value):
            raise DataError(f"{path}, line {number}: the score {score[:60]!r} is not a finite number")
        if document not in collection.documents:
            raise DataError(f"{path}, line {number}: the document {document[:60]!r} is not in the collection")
        if query in collection.queries:
            ranking.setdefault(query, {})[document] = value
    if not ranking:
        raise DataError(f"{path} ranks no query of the collection")
    return ranking
