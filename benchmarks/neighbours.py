"""Measure hybrid search if each document's embedding is mixed with those of its neighbours.

    python -m benchmarks.neighbours --data COLLECTIONS --pairs docstrings --output FILE.json

COLLECTIONS contains a folder for each collection in BEIR's form. `--pairs` adds pairs of query and
text, in which each text is the only answer. Nothing is trained. Each embedding e is mixed with the
mean m of its k nearest ones. `plain` takes (1 - a) e + a m, with a length of 1. `centred` does the
same to differences from the mean embedding, by which it also finds neighbours, and keeps their
lengths. This matters if all embeddings point almost the same way: mixtures with distant neighbours
then come closer to the mean than mixtures with near copies, and a length of 1 does not undo it.

Scores are nDCG@10 x 100 of hybrid search with the default weight, compared with the same search
without neighbours by a paired randomisation test.
"""

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.fusion import by_z_scores, encoded, score
from diffcse_jax import SentenceEncoder
from diffcse_jax.errors import reported_to_user
from diffcse_jax.evaluation.retrieval import compare, read_retrieval_pairs
from diffcse_jax.evaluation.search_collections import Collection, read_collection
from diffcse_jax.models.pooling import normalize
from diffcse_jax.search.embeddings import nearest
from diffcse_jax.search.lexical import LexicalIndex
from diffcse_jax.search.modes import DEFAULT_WEIGHT

MIXTURES = ((3, 0.2), (5, 0.2), (8, 0.15), (8, 0.2), (8, 0.3), (16, 0.1))  # k, a
COPY = 0.8  # cosine of centred embeddings of near copies


def collection_of_pairs(file: str) -> Collection:
    """Read pairs of a query and the only text that answers it."""
    pairs = read_retrieval_pairs(file)
    return Collection(
        documents={f"text {number}": text for number, (_, text) in enumerate(pairs)},
        queries={f"query {number}": query for number, (query, _) in enumerate(pairs)},
        judgements={f"query {number}": {f"text {number}": 1} for number in range(len(pairs))},
    )


def mixed(embeddings: np.ndarray, rows: np.ndarray, share: float) -> np.ndarray:
    """Return each embedding mixed with the mean of those in its rows."""
    return (1 - share) * embeddings + share * embeddings[rows].mean(axis=1)


def neighbours(embeddings: np.ndarray, count: int) -> np.ndarray:
    """Return the rows of the nearest embeddings of each one, without itself."""
    unit = normalize(embeddings)
    rows = nearest(unit, unit, count + 1)[1]
    others = rows != np.arange(len(rows))[:, None]
    others[others.all(axis=1), -1] = False  # a copy took its place
    return rows[others].reshape(len(rows), count)


def measure_collection(
    collection: Collection, encoder: SentenceEncoder, cache: Path | None
) -> dict[str, Any]:
    """Compare hybrid search with and without neighbours."""
    documents, queries = [*collection.documents.values()], [*collection.queries.values()]
    embeddings = encoded(encoder, documents, encoder.prompts.document, cache)
    asked = encoded(encoder, queries, encoder.prompts.query, cache)
    index = LexicalIndex.build(documents)
    lexical = [index.scores(query) for query in queries]

    def of_hybrid(similarities: np.ndarray) -> np.ndarray:
        weights = itertools.repeat(DEFAULT_WEIGHT)
        return score(collection, map(by_z_scores, similarities, lexical, weights))

    before = of_hybrid(asked @ embeddings.T)
    mean = embeddings.mean(axis=0)
    centred = embeddings - mean
    lengths = np.linalg.norm(centred, axis=1, keepdims=True)
    unit = centred / lengths
    most = max(count for count, _ in MIXTURES)
    near, centred_near = neighbours(embeddings, most), neighbours(centred, most)
    copies = np.einsum("ij,ij->i", unit, unit[centred_near[:, 0]]) > COPY
    results: dict[str, Any] = {
        "documents": len(embeddings),
        "queries": len(asked),
        "answers per query": float(np.mean([*map(len, collection.judgements.values())])),
        "length of the mean embedding": float(np.linalg.norm(mean)),
        "documents with a near copy": float(copies.mean()),
        "without": float(before.mean()),
    }
    for count, share in MIXTURES:
        plain = normalize(mixed(embeddings, near[:, :count], share))
        moved = normalize(mixed(centred, centred_near[:, :count], share)) * lengths
        for name, changed in (("plain", plain), ("centred", mean + moved)):
            after = of_hybrid(asked @ changed.T)
            results[f"{name}, k={count}, a={share}"] = compare(before, after)
    return results


def main() -> None:
    """Measure all collections and pairs, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of collections")
    add("--collections", nargs="*", help="names of folders (default: all)")
    add("--pairs", nargs="*", default=[], help="files of pairs, or docstrings")
    add("--model", default="minilm")
    add("--cache", type=Path, help="folder that keeps embeddings for later commands")
    add("--output", type=Path, help="file for the record (default: print it)")
    options = parser.parse_args()
    names = options.collections
    if names is None:
        names = sorted(path.parent.name for path in options.data.glob("*/corpus.jsonl"))
    table = {}
    with reported_to_user():
        encoder = SentenceEncoder.from_pretrained(options.model)
        for name in [*names, *options.pairs]:
            is_pairs = name in options.pairs
            collection = (
                collection_of_pairs(name) if is_pairs else read_collection(options.data / name)
            )
            table[Path(name).stem] = measure_collection(collection, encoder, options.cache)
            print(name, table[Path(name).stem], file=sys.stderr, flush=True)
    record = {"model": Path(options.model).name, "weight": DEFAULT_WEIGHT, "collections": table}
    measure.write_record(options.output, "benchmarks.neighbours", sys.argv[1:], record)


if __name__ == "__main__":
    main()
