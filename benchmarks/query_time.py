"""Time single queries on a warm index: encoding, search, and the texts of ten hits.

    python -m benchmarks.query_time --text SENTENCES.txt --output FILE.json

The index has the first `--rows` lines, with their words and with random embeddings, because search takes as long with
those. Queries are ten words of the last lines. Times are in milliseconds.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks import measure
from diffcse_jax import SentenceEncoder
from diffcse_jax.models.pooling import normalize
from diffcse_jax.search.embeddings import STORAGES
from diffcse_jax.search.index import MODES, SentenceIndex

QUERIES, WARM_UP = 200, 40


def main() -> None:
    """Time each mode with each storage, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    encoder = SentenceEncoder.from_pretrained(options.model)
    lines = options.text.read_text(encoding="utf-8").splitlines()
    queries = [" ".join(line.split()[2:12]) for line in lines[options.rows :][: QUERIES + WARM_UP]]
    texts = pa.table({"sentence": lines[: options.rows]})
    vectors = normalize(np.random.default_rng(0).normal(size=(len(texts), encoder.dimension)).astype(np.float32))
    times: dict[str, dict[str, float]] = {}
    for storage, mode in itertools.product(STORAGES, MODES):
        if mode == MODES[0]:
            index = SentenceIndex.of(texts, encoder.record(), vectors, "hybrid", storage=storage)
        taken = []
        for query in queries:
            start = time.perf_counter()
            embedding = None if mode == "lexical" else encoder.encode_query([query], normalize=True)
            index.search(embedding, 10, texts=[query], mode=mode)
            taken.append(1000 * (time.perf_counter() - start))
        taken = taken[WARM_UP:]
        times[f"{storage} {mode}"] = {"median": float(np.median(taken)), "minimum": min(taken)}
        print(storage, mode, times[f"{storage} {mode}"], file=sys.stderr, flush=True)
    measure.write_record(options.output, "benchmarks.query_time", sys.argv[1:], {"milliseconds": times})


if __name__ == "__main__":
    main()
