"""Measure when a search should say that nothing is close to a query.

    python -m benchmarks.closeness --data FOLDER --collections NAME NAME --output FILE.json

FOLDER holds collections in BEIR's form. Each one is searched with its own queries and with those of
the others. The record has the percentiles of the closeness of the best text (`Contents.closeness`),
and the share of queries below `ranking.CLOSE`, for which a search says so.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from benchmarks import measure
from diffcse_jax import SentenceEncoder
from diffcse_jax.documents.document import Document, Section
from diffcse_jax.evaluation.search_collections import read_collection
from diffcse_jax.search.contents import Contents, documents_table, passages_table
from diffcse_jax.search.embeddings import StoredEmbeddings
from diffcse_jax.search.passages import Passage
from diffcse_jax.search.ranking import CLOSE

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)


def contents_of(texts: list[str], encoder: SentenceEncoder) -> Contents:
    """Return texts as the contents of an index."""
    documents = [Document(str(row), (Section("", (text,)),)) for row, text in enumerate(texts, 1)]
    passages = [Passage(row, "", text) for row, text in enumerate(texts)]
    vectors = encoder.encode_document(texts, normalize=True)
    return Contents(
        documents_table(documents, 0), passages_table(passages), StoredEmbeddings.of(vectors)
    )


def measured(
    contents: Contents, queries: Float32[np.ndarray, "queries dimension"]
) -> dict[str, object]:
    """Return what the closeness of queries is."""
    assert contents.embeddings
    best = contents.embeddings.nearest(queries, 1)[0][:, 0].tolist()
    closeness = np.array([contents.closeness(score) for score in best])
    percentiles = np.percentile(closeness, PERCENTILES).round(3).tolist()
    return {
        "percentiles": dict(zip(map(str, PERCENTILES), percentiles, strict=True)),
        "below": round(float((closeness < CLOSE).mean()), 4),
    }


def main() -> None:
    """Measure all pairs of collections and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--collections", nargs="+", required=True, help="names of folders")
    parser.add_argument("--queries", type=int, default=200, help="of each collection")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    encoder = SentenceEncoder.from_pretrained(options.model)
    contents, queries = {}, {}
    for name in options.collections:
        collection = read_collection(options.data / name)
        contents[name] = contents_of([*collection.documents.values()], encoder)
        asked = [*collection.queries.values()][: options.queries]
        queries[name] = encoder.encode_query(asked, normalize=True)
    table = {
        f"{name}, queries of {other}": measured(own, queries[other])
        for name, own in contents.items()
        for other in options.collections
    }
    for pair, found in table.items():
        print(pair, found, file=sys.stderr)
    record = {"model": Path(options.model).name, "close": CLOSE, "closeness": table}
    measure.write_record(options.output, "benchmarks.closeness", sys.argv[1:], record)


if __name__ == "__main__":
    main()
