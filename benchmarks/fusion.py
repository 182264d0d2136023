"""Measure embeddings, BM25 and their fusions on search collections in BEIR's form, by nDCG@10.

    python -m benchmarks.fusion --data FOLDER --output FILE.json

FOLDER contains a folder for each collection, with `corpus.jsonl`, `queries.jsonl` and
`qrels/test.tsv`. Weights are those of BM25. `float16`, `int8` and `bits` say how embeddings are
stored.
"""

import argparse
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks import measure
from diffcse_jax import SentenceEncoder
from diffcse_jax.evaluation.hybrid_weight import TRIED_WEIGHTS, ndcg
from diffcse_jax.evaluation.search_collections import read_collection
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
    best, tenth = np.sort(lexical)[[-1, -10]]
    return min(0.6, 0.4 * (best - tenth) / best) if best > 0 else 0.0


FUSIONS: Mapping[str, Fusion] = {"z": by_z_scores, "rrf": by_ranks}


def score(scores: Sequence[np.ndarray], grades: Sequence[Mapping[int, float]]) -> float:
    """Return the mean nDCG@10 x 100."""
    return 100 * float(
        np.mean(
            [ndcg(best_rows(each, 10), wanted) for each, wanted in zip(scores, grades, strict=True)]
        )
    )


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
    rows = {key: row for row, key in enumerate(collection.documents)}
    judged = (collection.judgements[key] for key in collection.queries)
    grades = [{rows[document]: float(grade) for document, grade in each.items()} for each in judged]
    vectors = encoded(encoder, documents, encoder.prompts.document, cache)
    asked = encoded(encoder, queries, encoder.prompts.query, cache)
    dense = asked @ vectors.T
    words = LexicalIndex.build(documents)
    lexical = [words.scores(query) for query in queries]
    results = {"dense": score(dense, grades), "bm25": score(lexical, grades)}
    for name, fuse in FUSIONS.items():
        for weight in TRIED_WEIGHTS[1:-1]:
            fused = [fuse(one, other, weight) for one, other in zip(dense, lexical, strict=True)]
            results[f"{name} {weight}"] = score(fused, grades)
    pairs = zip(dense, lexical, strict=True)
    fused = [by_z_scores(one, other, own_weight(other)) for one, other in pairs]
    results["z, own weight of each query"] = score(fused, grades)
    for storage in STORAGES[1:]:
        found = StoredEmbeddings.of(vectors, storage).nearest(asked, 10)[1]
        results[storage] = 100 * float(np.mean([*map(ndcg, found, grades)]))
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
