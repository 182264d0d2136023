"""Time single queries on a warm index: encoding, search, and ten hits with their snippets.

    python -m benchmarks.query_time --text SENTENCES.txt --output FILE.json

The index has the first `--rows` lines, with their words and with random embeddings, because search
takes as long with those. Queries are ten words of the last lines. Times are in milliseconds.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks import measure
from diffcse_jax import SentenceEncoder
from diffcse_jax.documents.document import Document, Section
from diffcse_jax.models.pooling import normalize
from diffcse_jax.search.contents import Contents, documents_table, passages_table
from diffcse_jax.search.embeddings import StoredEmbeddings
from diffcse_jax.search.folder import Stored
from diffcse_jax.search.index import Index
from diffcse_jax.search.lexical import LexicalIndex
from diffcse_jax.search.modes import MODES, STORAGES
from diffcse_jax.search.passages import Passage
from diffcse_jax.search.settings import IndexSettings

QUERIES, WARM_UP = 200, 40


def main() -> None:
    """Time each mode with each storage, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    encoder = SentenceEncoder.from_pretrained(options.model)
    lines = options.text.read_text(encoding="utf-8").splitlines()
    queries = [" ".join(line.split()[2:12]) for line in lines[options.rows :][: QUERIES + WARM_UP]]
    texts = lines[: options.rows]
    size = (len(texts), encoder.dimension)
    vectors = normalize(np.random.default_rng(0).normal(size=size).astype(np.float32))
    documents = documents_table(
        (Document(str(row), (Section("", (text,)),)) for row, text in enumerate(texts, 1)),
        input_number=0,
    )
    passages = passages_table([Passage(row, "", text) for row, text in enumerate(texts)])
    words = LexicalIndex.build(texts)
    times: dict[str, dict[str, float]] = {}
    for storage, mode in itertools.product(STORAGES, MODES):
        if mode == MODES[0]:
            contents = Contents(documents, passages, StoredEmbeddings.of(vectors, storage), words)
            settings = IndexSettings("hybrid", storage=storage)
            index = Index.of(Stored(settings, contents, encoder.record()))
        taken = []
        for query in queries:
            start = time.perf_counter()
            embedding = None if mode == "lexical" else encoder.encode_query([query], normalize=True)
            index.rank([query], embedding, 10, mode=mode)
            taken.append(1000 * (time.perf_counter() - start))
        taken = taken[WARM_UP:]
        times[f"{storage} {mode}"] = {"median": float(np.median(taken)), "minimum": min(taken)}
        print(storage, mode, times[f"{storage} {mode}"], file=sys.stderr, flush=True)
    measure.write_record(
        options.output, "benchmarks.query_time", sys.argv[1:], {"milliseconds": times}
    )


if __name__ == "__main__":
    main()
