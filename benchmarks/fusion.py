"""Measure embeddings, BM25 and their fusions on search collections in BEIR's form, by nDCG@10.

    python -m benchmarks.fusion --data FOLDER --output FILE.json

FOLDER contains a folder for each collection, with `corpus.jsonl`, `queries.jsonl` and
`qrels/test.tsv`. Weights are those of BM25. `float16`, `int8` and `bits` say how embeddings are
stored.
"""

import argparse
import hashlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks import measure
from diffcse_jax import SentenceEncoder
from diffcse_jax.evaluation import retrieval
from diffcse_jax.evaluation.hybrid_weight import TRIED_WEIGHTS
from diffcse_jax.evaluation.retrieval import without_itself
from diffcse_jax.evaluation.search_collections import Collection, read_collection
from diffcse_jax.search.embeddings import StoredEmbeddings
from diffcse_jax.search.fusion import combine
from diffcse_jax.search.lexical import LexicalIndex, best_rows
from diffcse_jax.search.modes import DEFAULT_WEIGHT, STORAGES

RANK_OFFSET = 60  # of reciprocal rank fusion (Cormack et al. 2009)
Fusion = Callable[[np.ndarray, np.ndarray, float], np.ndarray]


def by_z_scores(dense: np.ndarray, lexical: np.ndarray, weight: float) -> np.ndarray:
    """Return the package's fusion."""
    return combine(dense, lexical, weight, dense, lexical)


def by_ranks(dense: np.ndarray, lexical: np.ndarray, weight: float) -> np.ndarray:
    """Return weighted reciprocal rank fusion of the best 100 of each half."""
    ranks = [np.argsort(np.argsort(-scores, kind="stable")) + 1 for scores in (dense, lexical)]
    one, other = (np.where(rank <= 100, 1 / (RANK_OFFSET + rank), 0) for rank in ranks)
    return (1 - weight) * one + weight * other


def own_weight(lexical: np.ndarray) -> float:
    """Return a weight of BM25 for one query: larger if its best hit stands out."""
    best, tenth = np.sort(lexical)[::-1][[0, min(9, len(lexical) - 1)]]
    return min(0.6, 0.4 * (best - tenth) / best) if best > 0 else 0.0


FUSIONS: Mapping[str, Fusion] = {"z": by_z_scores, "rrf": by_ranks}


def score(collection: Collection, scores: Iterable[np.ndarray]) -> np.ndarray:
    """Return nDCG@10 x 100 of each query, from its scores of all documents."""
    ids = [*collection.documents]
    ranking = {}
    for key, of_query in zip(collection.queries, scores, strict=True):
        rows = best_rows(of_query, 11)  # one more than counts: a query does not find itself
        hits = {ids[row]: float(of_query[row]) for row in rows.tolist()}
        ranking[key] = without_itself(key, hits, collection.judgements[key])
    by_query = retrieval.measure(collection.judgements, ranking)["ndcg@10"]
    return np.array([by_query[key] for key in collection.queries])


def scores_of_rows(scores: np.ndarray, rows: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """Yield the scores of all documents for each query, of which only some rows are known."""
    for of_query, found in zip(scores, rows, strict=True):
        of_all = np.full(count, -np.inf, np.float32)
        of_all[found] = of_query
        yield of_all


def encoded(
    encoder: SentenceEncoder, texts: Sequence[str], prompt: str | None, cache: Path | None
) -> np.ndarray:
    """Return embeddings of length 1, from the folder `cache` if they are there already."""
    if cache is None:
        return encoder.encode([*texts], normalize=True, prompt=prompt)
    digest = hashlib.sha256("\0".join((encoder.fingerprint(), repr(prompt), *texts)).encode())
    path = cache / f"{digest.hexdigest()[:16]}.npy"
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        np.save(path, encoder.encode([*texts], normalize=True, prompt=prompt))
    return np.load(path)


def measure_collection(
    folder: Path, encoder: SentenceEncoder, cache: Path | None = None
) -> dict[str, float]:
    """Return nDCG@10 of each system."""
    collection = read_collection(folder)
    documents, queries = [*collection.documents.values()], [*collection.queries.values()]
    vectors = encoded(encoder, documents, encoder.prompts.document, cache)
    asked = encoded(encoder, queries, encoder.prompts.query, cache)
    dense = asked @ vectors.T
    words = LexicalIndex.build(documents)
    lexical = [words.scores(query) for query in queries]
    found: dict[str, Iterable[np.ndarray]] = {"dense": dense, "bm25": lexical}
    for name, fuse in FUSIONS.items():
        for weight in TRIED_WEIGHTS[1:-1]:
            found[f"{name} {weight}"] = map(fuse, dense, lexical, itertools.repeat(weight))
    found["z, own weight of each query"] = map(
        by_z_scores, dense, lexical, map(own_weight, lexical)
    )
    for storage in STORAGES[1:]:
        found[storage] = scores_of_rows(
            *StoredEmbeddings.of(vectors, storage).nearest(asked, 11), len(documents)
        )
    results = {system: float(score(collection, each).mean()) for system, each in found.items()}
    print(
        folder.name,
        words.language,
        {name: round(value, 1) for name, value in results.items()},
        file=sys.stderr,
    )
    return results


def main() -> None:
    """Measure all collections and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--collections", nargs="+", help="names of folders (default: all)")
    parser.add_argument("--model", default="minilm")
    parser.add_argument(
        "--cache", type=Path, help="folder that keeps embeddings for later commands"
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    encoder = SentenceEncoder.from_pretrained(options.model)
    names = options.collections or sorted(
        path.parent.name for path in options.data.glob("*/corpus.jsonl")
    )
    table = {
        name: measure_collection(options.data / name, encoder, options.cache) for name in names
    }
    record = {
        "model": Path(options.model).name,
        "collections": table,
        "default weight": DEFAULT_WEIGHT,
    }
    measure.write_record(options.output, "benchmarks.fusion", sys.argv[1:], record)


if __name__ == "__main__":
    main()
