"""Rankings in files of TREC's form, so that rankings of other programs can be compared.

A line has six fields: `query Q0 document rank score name`. White space separates them, so white
space in ids is percent-encoded.
"""

import dataclasses
import math
import os
import re
from collections.abc import Collection as Keys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from diffcse_jax.documents.ledger import Ledger, Place
from diffcse_jax.documents.text.lines import lines_with_text
from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.evaluation import EvaluationSettings
from diffcse_jax.evaluation.search_collections import COLLECTION, Collection
from diffcse_jax.hosts import report
from diffcse_jax.io import disk_errors, expand_path, json_digest, write_text
from diffcse_jax.options import names_in

Ranking = Mapping[str, Mapping[str, float]]  # by query: scores by document

_MODEL_PARTS = 2  # of a model's path in the name of its runs, such as `runs-mine`
_SEPARATOR = re.compile(r"[\s\ufeff]")  # a byte-order mark at the start of a file is not read
_ENCODED = re.compile(r"[\s\ufeff%]")
_INSTEAD = "name another folder with --runs"


def best_first(hits: Mapping[str, float]) -> list[str]:
    """Return documents by their scores, the highest first, in the order of trec_eval.

    Of equal scores, the last id in the order of characters comes first.
    """
    return sorted(hits, key=lambda document: (hits[document], document), reverse=True)


def fields_of_ids(ids: Keys[str]) -> dict[str, str]:
    """Return each id as it stands in a run.

    In an id with white space, that and `%` are percent-encoded. All other ids stay as they are, so
    runs of other programs are read without decoding. If an encoded id equals another id, it is
    encoded again.
    """
    plain = {key for key in ids if not _SEPARATOR.search(key)}
    fields = {key: key for key in plain}
    for key in ids:
        if key not in plain:
            field = _ENCODED.sub(lambda match: quote(match[0]), key)
            while field in plain:
                field = field.replace("%", "%25")
            fields[key] = field
    return fields


def _ids_of_fields(ids: Keys[str]) -> dict[str, str]:
    return {field: key for key, field in fields_of_ids(ids).items()}


def write_run(path: Path, ranking: Ranking, name: str, collection: Collection) -> None:
    """Write a ranking of a collection's queries, best first."""
    queries, documents = map(fields_of_ids, (collection.queries, collection.documents))
    lines = []
    for query, scores in ranking.items():
        for rank, document in enumerate(best_first(scores), 1):
            score = f"{scores[document]:.9g}"  # all digits of a float32, so that no ties arise
            lines.append(f"{queries[query]} Q0 {documents[document]} {rank} {score} {name}")
    with disk_errors(path, safe="Nothing else was changed.", instead=_INSTEAD):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "\n".join([*lines, ""]))


def read_ranking(
    path: Path,
    collection: Collection,
    *,
    strict: bool = False,
) -> dict[str, dict[str, float]]:
    """Read a ranking, also of another program. Its fields may be separated by tabs.

    Hits of queries that the collection does not have are left out and counted, which is not a
    loss: a run may be of another split. Documents that it does not have stay, as in trec_eval, and
    are counted in a warning, as are judged queries without hits.
    """
    queries, documents = map(_ids_of_fields, (collection.queries, collection.documents))
    ledger = Ledger(str(path), strict=strict, noun="hit{s}")
    ranking: dict[str, dict[str, float]] = {}
    order = _Order()
    is_of_collection = False
    for number, line in lines_with_text(path, ledger):
        fields = line.split("\t") if line.count("\t") == 5 else line.split()
        if len(fields) != 6 and line.startswith("#"):  # a comment, as in trec_eval
            continue
        query, document, rank, score = _hit(fields, f"{path}, line {number}")
        query, document = queries.get(query, query), documents.get(document, document)
        place = Place(str(path), number)
        if query not in collection.queries:
            ledger.leave_out("of other queries", place, is_loss=False)
            continue
        hits = ranking.setdefault(query, {})
        if document in hits:
            ledger.change("repeated hit{s}", "the highest score counts", place)
        elif document not in collection.documents:
            ledger.change("hit{s} whose document is not in the corpus", "kept", place)
        order.see(query, rank, score)
        is_of_collection |= document in collection.documents
        hits[document] = max(score, hits.get(document, score))
    if not is_of_collection:
        raise DataError(f"{path} ranks no document for a query of the collection")
    for query in collection.judgements:
        if query not in ranking:
            ledger.change("judged quer{y} without a hit", "scored 0", Place())
        elif query in order.rising - order.falling:
            outcome = "ranked by the scores, as in trec_eval; write distances with a minus"
            ledger.change("quer{y} whose scores rise with the ranks", outcome, Place())
    ledger.count_file()
    ledger.make("hit{s}", sum(map(len, ranking.values())))
    report(ledger)
    return ranking


@dataclasses.dataclass
class _Order:
    """Whether scores rise or fall with the ranks, by query. Distances rise."""

    last: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    rising: set[str] = dataclasses.field(default_factory=set)
    falling: set[str] = dataclasses.field(default_factory=set)  # or not in the order of ranks

    def see(self, query: str, rank: float, score: float) -> None:
        """Compare a hit with the one before."""
        if query in self.last:
            last_rank, last_score = self.last[query]
            if rank <= last_rank or score < last_score:
                self.falling.add(query)
            elif score > last_score:
                self.rising.add(query)
        self.last[query] = rank, score


def _hit(fields: Sequence[str], place: str) -> tuple[str, str, float, float]:
    """Return the query, the document, the rank and the score of a line. `place` is for errors.

    A rank that is not a number is 0, since only scores count.
    """
    try:
        query, _, document, rank, score, _ = (field.strip() for field in fields)
        value = float(score)
    except ValueError as error:
        expected = "expected `query Q0 document rank score name`"
        raise DataError(f"{place}: {expected}. If ids contain blanks, use tabs") from error
    if not math.isfinite(value):
        raise DataError(f"{place}: the score {score[:60]!r} is not a finite number")
    return query, document, float(rank) if rank.isdecimal() else 0, value


# Files


def run_file(settings: EvaluationSettings, folder: str) -> tuple[Path, str]:
    """Return where a model's ranking of a collection is written, and the name in its lines.

    The name ends with a hash of all that decides on the ranking: model, collection and settings.
    """
    assert settings.runs is not None, "called for --runs"
    models = distinct_names([settings.model, *settings.compared], _MODEL_PARTS)
    collections = distinct_names([folder, *_collections(settings)], 1)
    model = models[settings.model]
    identity = [
        str(expand_path(settings.model).resolve()),
        str(expand_path(folder).resolve()),
        *(getattr(settings, name) for name in ("pooler", "truncate_dim", "backend", "post")),
    ]
    path = settings.runs / f"{model}.{collections[folder]}.trec"
    return path, f"{model}-{json_digest(identity)[:8]}"


def check_run_files(settings: EvaluationSettings) -> None:
    """Raise an error if a run cannot be written, or if its file contains another run."""
    assert settings.runs is not None, "called for --runs"
    with disk_errors(settings.runs, safe="Nothing was started.", instead=_INSTEAD):
        settings.runs.mkdir(parents=True, exist_ok=True)
        if not os.access(settings.runs, os.W_OK):
            raise PermissionError("permission denied")
    for model in settings.compared or [settings.model]:
        for folder in _collections(settings):
            path, name = run_file(dataclasses.replace(settings, model=model), folder)
            lines = lines_with_text(path, Ledger(str(path))) if path.exists() else iter(())
            _, line = next(lines, (0, ""))
            recorded = (line.split() or [name])[-1]
            if recorded != name:
                raise ConfigError(
                    f"--runs: {path} contains another run, {recorded[:60]}, of another model or "
                    f"collection or with other settings. Remove it, or {_INSTEAD}"
                )


def _collections(settings: EvaluationSettings) -> list[str]:
    tasks = (task.partition(":") for task in names_in(settings.tasks))
    return [folder for kind, _, folder in tasks if kind == COLLECTION and folder]


def distinct_names(paths: Sequence[str], parts: int) -> dict[str, str]:
    """Return a name for each path: its last parts, at most `parts` unless two would be alike."""
    places = {path: expand_path(path).resolve() for path in paths}
    counts = {path: max(1, min(parts, len(Path(path).parts))) for path in paths}
    while True:
        names = {
            path: re.sub(r"\s", "_", "-".join(place.parts[1:][-counts[path] :])) or "root"
            for path, place in places.items()
        }
        named: dict[str, set[Path]] = {}
        for path, place in places.items():
            named.setdefault(names[path], set()).add(place)
        alike = [path for path in places if len(named[names[path]]) > 1]
        if not alike:
            return names
        if all(counts[path] > len(places[path].parts) for path in alike):
            raise ConfigError(
                f"--runs: rankings of {' and '.join(alike)} would be written to one file. Evaluate "
                "them one by one, each with a folder of its own"
            )
        counts |= {path: counts[path] + 1 for path in alike}
