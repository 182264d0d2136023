"""Retrieval: how high queries rank the texts that they should find.

The texts are sentences of STS-B, pairs of the user's own, or a search collection with human
judgements. The measures of collections are those of trec_eval, by the library ir-measures.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
from jaxtyping import Bool, Float, Float32, Int

from diffcse_jax.config import DataConfig
from diffcse_jax.data.columns import training_columns
from diffcse_jax.data.sources import open_corpus, shown_name
from diffcse_jax.documents.find import DOCSTRINGS
from diffcse_jax.documents.ledger import Ledger, Place
from diffcse_jax.documents.open import open_pairs
from diffcse_jax.documents.sentences import canonical
from diffcse_jax.documents.tables.table import Table
from diffcse_jax.documents.text.lines import lines_with_text
from diffcse_jax.errors import DataError, printable, require_extra
from diffcse_jax.evaluation import (
    Embeddings,
    Encoder,
    EvaluationSettings,
    Task,
    encode_groups,
    encode_pairs,
)
from diffcse_jax.evaluation.answers import Answers, answers_of
from diffcse_jax.evaluation.search_collections import Collection, read_collection
from diffcse_jax.evaluation.senteval_data import numbered_lines
from diffcse_jax.evaluation.sts import STSB, ScoredPairs
from diffcse_jax.evaluation.trec_runs import Ranking, best_first, read_ranking, run_file, write_run
from diffcse_jax.hosts import report
from diffcse_jax.io import expand_path
from diffcse_jax.models.pooling import normalize
from diffcse_jax.search.embeddings import nearest

BLOCK = 1024  # queries whose similarities are held in memory at once
CUTOFFS = (1, 5, 10)
MOST_DOCSTRINGS = 1000
DEPTH = 1000  # hits kept for each query, as in TREC's runs
ROUNDING = 1e-9  # scores x 100 that differ by less are equal
CHOOSES = "ndcg@10"  # chooses the best checkpoint and compares two systems
# As ir-measures calls them.
_MEASURES = {"ndcg@10": "nDCG@10", "mrr@10": "RR@10", "recall@100": "R@100", "map": "AP"}


def retrieval_scores(
    queries: Embeddings,
    targets: Embeddings,
    answers: Answers | None = None,
) -> dict[str, float]:
    """Return how high queries rank their targets, x 100.

    Args:
        queries: Embeddings of the queries.
        targets: Embeddings of their targets: target i answers query i.
        answers: What `answers_of` returns for the texts. None: all texts are different.

    Returns:
        `mrr` (mean reciprocal rank), `recall@1`, `recall@5` and `recall@10`.

    Raises:
        DataError: There are no queries, another number of targets, or numbers that are NaN or
            infinite.
    """
    if not 0 < len(queries) == len(targets):
        raise DataError(f"{len(queries):,} queries and {len(targets):,} targets: give one for each")
    if not (np.isfinite(queries).all() and np.isfinite(targets).all()):
        raise DataError("an embedding has numbers that are NaN or infinite")
    return rank_scores(target_ranks(queries, targets, answers))


def rank_scores(ranks: Float[np.ndarray, " n"]) -> dict[str, float]:
    """Return the scores of `retrieval_scores` of these ranks."""
    return {"mrr": 100 * float(np.mean(1 / ranks))} | recalls(ranks)


def recalls(ranks: Float[np.ndarray, " n"]) -> dict[str, float]:
    """Return the percentage of ranks up to each of `CUTOFFS`."""
    return {f"recall@{k}": 100 * float(np.mean(ranks <= k)) for k in CUTOFFS}


def target_ranks(
    queries: Embeddings, targets: Embeddings, answers: Answers | None = None
) -> Float[np.ndarray, " sentences"]:
    """Return the rank, from 1, of each query's target among the distinct targets of `answers`.

    Ties share their mean rank. The arguments are those of `retrieval_scores`.
    """
    queries, targets = normalize(queries), normalize(targets)
    ranks = []
    for start in range(0, len(queries), BLOCK):
        scores = queries[start : start + BLOCK] @ targets.T
        if answers is None:
            ranks.append(ranks_among(scores, np.arange(start, start + len(scores))))
            continue
        target = answers.target[start : start + BLOCK]
        ignored = answers.ignored(start, len(scores))
        ranks.append(ranks_among(answers.scores(scores, start), target, ignored))
    return np.concatenate(ranks)


def ranks_among(
    scores: Float32[np.ndarray, "rows columns"],
    targets: Int[np.ndarray, " rows"],
    ignored: Bool[np.ndarray, "rows columns"] | None = None,
) -> Float[np.ndarray, " rows"]:
    """Return the rank, from 1, of column `targets[i]` in row i, highest first.

    Ties share their mean rank. Columns that are `ignored` do not count.
    """
    target_scores = scores[np.arange(len(targets)), targets][:, None]
    higher = scores > target_scores
    equal = scores == target_scores
    if ignored is not None:
        higher, equal = higher & ~ignored, equal & ~ignored
    return higher.sum(axis=1) + (equal.sum(axis=1) + 1) / 2


# Sentences of STS-B


def score_retrieval(
    encoder: Encoder,
    content: Mapping[str, ScoredPairs],
    settings: EvaluationSettings,
) -> dict[str, Any]:
    """Find the other sentence of each pair rated 5.0 among all sentences of the split.

    This is table 10 of DiffCSE. Scores are recall at 1, 5 and 10, x 100. If the settings name
    queries, `examples` are their best hits.
    """
    (pairs,) = content.values()
    rows = np.flatnonzero(np.array(pairs.gold) == 5.0)
    texts = pairs.first + pairs.second
    if not len(rows):
        raise DataError("retrieval needs pairs of STS-B that are rated 5.0")
    corpus = normalize(np.concatenate(encode_groups(encoder, [pairs.first, pairs.second])))
    scores = corpus[rows] @ corpus.T
    scores[np.arange(len(rows)), rows] = -np.inf  # a query does not find itself
    ranks = ranks_among(scores, targets=len(pairs.gold) + rows)
    results: dict[str, Any] = recalls(ranks) | {"n": len(rows)}
    if settings.queries_file:
        queries = read_queries(settings.queries_file)
        # sentences of one kind, with the default prompt
        embeddings = encoder.encode(queries, prompt=encoder.prompts.default)
        results["examples"] = [
            {"query": query, "hits": best_hits(row, texts, settings.top_k)}
            for query, row in zip(queries, normalize(embeddings) @ corpus.T, strict=True)
        ]
    return results


def read_queries(file: Path) -> list[str]:
    """Read queries, one per line."""
    queries = [line.strip() for _, line in numbered_lines(expand_path(file))]
    if not queries:
        raise DataError(f"{file} has no queries")
    return queries


def best_hits(
    scores: Float32[np.ndarray, " sentences"],
    texts: Sequence[str],
    top_k: int,
) -> list[tuple[str, float]]:
    """Return the `top_k` most similar distinct sentences and their similarities."""
    hits: dict[str, float] = {}
    for row in np.argsort(-scores, kind="stable"):
        hits.setdefault(texts[row], float(scores[row]))
        if len(hits) == top_k:
            break
    return list(hits.items())


STSB_RETRIEVAL = Task("retrieval", STSB.splits, STSB.read, score_retrieval, one_split=True)


# Pairs of the user's own


def score_pairs(encoder: Encoder, file: str, settings: EvaluationSettings) -> dict[str, Any]:
    """For the first text of each pair, find the second among the second texts of all pairs."""
    pairs = read_retrieval_pairs(file, strict=settings.strict)
    queries, targets = zip(*pairs, strict=True)
    embeddings = encode_pairs(encoder, queries, targets)
    ranks = target_ranks(embeddings[0], embeddings[1], answers_of(queries, targets))
    return rank_scores(ranks) | {"n": len(queries)}


def read_retrieval_pairs(file: str, *, strict: bool = False) -> list[tuple[str, str]]:
    """Read pairs of query and target, and warn of lines that are not pairs.

    Args:
        file: Two texts in each line, separated by a tab, in which quotes are text, perhaps below a
            line that names the columns; a csv, json, jsonl or Parquet file with the columns that
            training knows, in any order, or with two others; or `docstrings`, for the docstrings
            that training holds out.
        strict: Raise `DataError` at the first line that is not a pair.
    """
    if file == DOCSTRINGS:  # the pairs that training on them holds out
        from diffcse_jax.documents.docstrings import docstring_pairs

        return docstring_pairs(MOST_DOCSTRINGS)
    path = expand_path(file)
    table = open_pairs(path)
    name = shown_name(str(path))
    ledger = Ledger(name, strict=strict, noun="row{s}" if table else "line{s}")
    pairs = [*(_pairs_of_table(table, ledger) if table else _pairs_of_lines(path, ledger))]
    if len({canonical(target) for _, target in pairs}) < 2:
        needs = "pairs_retrieval needs at least two pairs with different second texts"
        raise DataError(". ".join([f"{name}: {needs}", *ledger.oddities()]))
    ledger.make("pair{s}", len(pairs))
    report(ledger)
    return pairs


def _pairs_of_lines(path: Path, ledger: Ledger) -> Iterator[tuple[str, str]]:
    order, width = [0, 1], 2
    for position, (number, line) in enumerate(lines_with_text(path, ledger)):
        fields = [field.strip() for field in line.rstrip().split("\t")]
        if position == 0 and (columns := training_columns(fields)):
            ledger.note(f"{path}: the first line names the columns: {', '.join(fields)}")
            order, width = [fields.index(name) for name in columns.names[:2]], len(fields)
            continue
        texts = [fields[at] for at in order if at < len(fields)]
        if len(fields) <= width and len(texts) == 2 and all(texts):
            yield texts[0], texts[1]
        else:
            ledger.leave_out("without two tab-separated texts", Place(str(path), number))
    ledger.count_file()


def _pairs_of_table(table: Table, ledger: Ledger) -> Iterator[tuple[str, str]]:
    columns = table.columns
    wanted = columns if len(columns) == 2 and not training_columns(columns) else ()
    if wanted:  # a file without a header would lose its first pair
        ledger.note(f"{table.name}: read the columns {' and '.join(map(printable, wanted))}")
    corpus = open_corpus(DataConfig(train_file=table.name, pairs="columns", columns=wanted))
    for row in corpus.rows(ledger):
        if len(row.texts) > 1:
            yield row.texts[0], row.texts[1]
        else:
            ledger.leave_out("without a second text", row.place)


# Search collections


def search(
    encoder: Encoder,
    collection: Collection,
    batch_size: int = 64,
) -> dict[str, dict[str, float]]:
    """Rank the documents of each query by cosine similarity, without the query itself.

    The encoder's prompts of queries and documents are used.
    """
    ids = [*collection.documents]
    texts = [*collection.queries.values()], [*collection.documents.values()]
    queries, documents = map(normalize, encode_pairs(encoder, *texts, batch_size))
    scores, rows = nearest(queries, documents, DEPTH + 1)
    ranking = {}
    for query, nearest_rows, similarities in zip(
        collection.queries, rows.tolist(), scores.tolist(), strict=True
    ):
        hits = {ids[row]: score for row, score in zip(nearest_rows, similarities, strict=True)}
        hits = without_itself(query, hits, collection.judgements[query])
        ranking[query] = dict(itertools.islice(hits.items(), DEPTH))
    return ranking


def without_itself(
    query: str,
    hits: Mapping[str, float],
    grades: Mapping[str, int],
) -> dict[str, float]:
    """Return the hits of a query without the document that has the query's own id.

    Queries can be documents of the collection, as in ArguAna and Quora. Such a hit does not count,
    as in BEIR and MTEB. If the document is judged relevant, ids of queries and of documents are
    numbered alike by chance, and the hit stays.
    """
    if grades.get(query, 0) > 0:
        return dict(hits)
    return {document: score for document, score in hits.items() if document != query}


def measure(
    judgements: Mapping[str, Mapping[str, int]],
    ranking: Ranking,
) -> dict[str, dict[str, float]]:
    """Return nDCG@10, MRR@10, recall@100 and MAP by measure and query, x 100.

    A query without hits has 0. Gains of nDCG are the grades. Of equal scores, the last id in the
    order of characters comes first, as in trec_eval: the library's measures would differ in this.
    """
    library = require_extra("ir_measures", "search")
    names = {library.parse_measure(theirs): ours for ours, theirs in _MEASURES.items()}
    scores = {ours: dict.fromkeys(judgements, 0.0) for ours in _MEASURES}
    ranked = {}
    for query, grades in judgements.items():
        documents = best_first(without_itself(query, ranking.get(query, {}), grades))
        ranked[query] = {document: -float(rank) for rank, document in enumerate(documents)}
    for result in library.iter_calc([*names], judgements, ranked):
        scores[names[result.measure]][result.query_id] = 100 * result.value
    return scores


def require_two(queries: int) -> None:
    """Raise an error if there are too few queries to compare two systems."""
    if queries < 2:
        raise DataError("two systems can only be compared by two queries or more")


def compare(
    first: Float[np.ndarray, " queries"],
    second: Float[np.ndarray, " queries"],
) -> dict[str, float]:
    """Compare two systems by their scores of the same queries, x 100.

    Returns:
        The mean `difference`, second minus first; `low` and `high` of its 95% interval by the
        paired bootstrap; and `p` of a two-sided paired randomisation test (Smucker et al. 2007). A
        single query raises `DataError`.
    """
    require_two(len(first))
    differences = second - first
    differences[np.abs(differences) < ROUNDING] = 0.0  # such as of means of equal scores
    if not differences.any():
        return {"difference": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}
    data = ((differences,), np.mean)
    # A batch bounds the memory, which otherwise holds all resamples of all queries.
    options: dict[str, Any] = {"n_resamples": 9999, "vectorized": True, "rng": 0, "batch": 256}
    test = scipy.stats.permutation_test(*data, permutation_type="samples", **options)
    low, high = scipy.stats.bootstrap(*data, method="percentile", **options).confidence_interval
    return {"difference": differences.mean(), "low": low, "high": high, "p": test.pvalue}


def score_collection(encoder: Encoder, file: str, settings: EvaluationSettings) -> dict[str, Any]:
    """Search a collection of the user's own, write the ranking, and compare it with another one."""
    collection = read_collection(expand_path(file), strict=settings.strict)
    other = None
    if settings.against:  # before the search, which takes long
        other = read_ranking(settings.against, collection, strict=settings.strict)
        require_two(len(collection.queries))
    ranking = search(encoder, collection)
    scores = measure(collection.judgements, ranking)
    result: dict[str, Any] = {
        name: float(np.mean([*each.values()]))  # over queries
        for name, each in scores.items()
    }
    if settings.runs:
        path, name = run_file(settings, file)
        write_run(path, ranking, name, collection)
        result["run"] = str(path)
    if other:
        before = np.array([*measure(collection.judgements, other)[CHOOSES].values()])
        after = np.array([*scores[CHOOSES].values()])
        run = {"run": str(settings.against), CHOOSES: float(before.mean())}
        result["against"] = run | compare(before, after)
    return result | {"n": len(collection.queries)}
