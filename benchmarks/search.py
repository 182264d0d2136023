"""Compare the exact search of an index with a NumPy loop, on a large corpus.

    python -m benchmarks.search --rows 1000000 --dimension 384 --queries 100 --output FILE

Random embeddings of length 1 are written to a temporary file. Each side reads them in a process of
its own, one after the other, with one thread. Processor time is measured, because other work on the
machine changes it little. `memory_bytes` is the peak of resident memory without the pages of the
file, which the system can take back (Linux). `max_rss_bytes` is the peak of `getrusage`, with them.
"""

import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure

BLOCK_ROWS = 8192
Found = tuple[np.ndarray, np.ndarray]  # similarities and rows
Search = Callable[[np.ndarray, int], Found]


def ours(path: Path) -> Search:
    """Search as the index does, already compiled."""
    from diffcse_jax.search.embeddings import nearest

    vectors = np.load(path, mmap_mode="r")

    def search(queries: np.ndarray, top_k: int) -> Found:
        return nearest(queries, vectors, top_k)

    nearest(np.load(path.with_name("queries.npy")), vectors[:BLOCK_ROWS], 10)
    return search


def numpy_loop(path: Path) -> Search:
    """Search in the same blocks by NumPy.

    It computes the products, the best of each block, and the best of these.
    """
    vectors = np.load(path, mmap_mode="r")

    def search(queries: np.ndarray, top_k: int) -> Found:
        scores, rows = [], []
        for number, block in enumerate(blocks_of(vectors)):
            similarities = queries @ block.T
            best = np.argpartition(-similarities, top_k, axis=1)[:, :top_k]
            scores.append(np.take_along_axis(similarities, best, axis=1))
            rows.append(best + number * BLOCK_ROWS)
        all_scores, all_rows = np.concatenate(scores, axis=1), np.concatenate(rows, axis=1)
        order = np.argsort(-all_scores, axis=1, kind="stable")[:, :top_k]
        return np.take_along_axis(all_scores, order, axis=1), np.take_along_axis(
            all_rows, order, axis=1
        )

    return search


SIDES = {"ours": ours, "numpy": numpy_loop}


def blocks_of(vectors: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the embeddings in blocks."""
    for start in range(0, len(vectors), BLOCK_ROWS):
        yield np.asarray(vectors[start : start + BLOCK_ROWS])


def run_side(name: str, path: Path, top_k: int, results: Any) -> None:
    """Search once, and send the cost and the hits."""
    search, queries = SIDES[name](path), np.load(path.with_name("queries.npy"))
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], anonymous_memory())
            done.wait(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    wall, cpu = time.perf_counter(), time.process_time()
    scores, rows = search(queries, top_k)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    done.set()
    watcher.join()
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    facts = {
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "memory_bytes": peak[0],
        "max_rss_bytes": max_rss,
    }
    results.put((facts, np.asarray(scores), np.asarray(rows)))


def anonymous_memory() -> int:
    """Return the bytes of resident memory that are not pages of files, or 0 if unknown."""
    status = Path("/proc/self/status")
    found = (
        [line for line in status.read_text().splitlines() if line.startswith("RssAnon")]
        if status.is_file()
        else []
    )
    return int(found[0].split()[1]) * 1024 if found else 0


def write_vectors(path: Path, rows: int, dimension: int, queries: int) -> None:
    """Write random embeddings of length 1, and queries of the same kind to `queries.npy`."""
    from diffcse_jax.models.pooling import normalize

    rng = np.random.default_rng(0)
    np.save(
        path.with_name("queries.npy"),
        normalize(rng.random((queries, dimension), np.float32) - np.float32(0.5)),
    )
    vectors = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(rows, dimension))
    for start in range(0, rows, BLOCK_ROWS):
        count = min(BLOCK_ROWS, rows - start)
        vectors[start : start + count] = normalize(
            rng.random((count, dimension), np.float32) - np.float32(0.5)
        )
    vectors.flush()


def main() -> None:
    """Measure every side and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--top_k", type=int, default=10)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    context = multiprocessing.get_context("spawn")
    sides, found = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vectors.npy"
        write_vectors(path, options.rows, options.dimension, options.queries)
        for name in options.sides:
            results = context.Queue()
            process = context.Process(target=run_side, args=(name, path, options.top_k, results))
            process.start()
            sides[name], *found[name] = results.get()
            process.join()
            print(name, json.dumps(sides[name]), file=sys.stderr, flush=True)
    first = options.sides[0]
    record = {
        "corpus_bytes": 4 * options.rows * options.dimension,
        "sides": sides,
        "cpu_ratios": {
            name: side["cpu_seconds"] / sides[first]["cpu_seconds"] for name, side in sides.items()
        },
        "same_rows": {
            name: float((rows == found[first][1]).mean()) for name, (_, rows) in found.items()
        },
        "largest_difference": {
            name: float(np.abs(scores - found[first][0]).max())
            for name, (scores, _) in found.items()
        },
    }
    measure.write_record(options.output, "benchmarks.search", sys.argv[1:], record)


if __name__ == "__main__":
    main()
