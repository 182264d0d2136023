r"""Measure tokenising of text, and reading batches from the token store on one core.

    python -m benchmarks.input_pipeline --sentences 100000 1000000 10000000 \
        --output benchmarks/results/NAME.json

Needs grain. For batches, token stores are written directly, with random tokens and lengths from
`benchmarks.workload`. For tokenising, files with random words of MiniLM's vocabulary are written.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure, workload
from diffcse_jax.config import DataConfig
from diffcse_jax.data.batches import BatchSource, make_batches
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.data.token_store import build_or_open
from diffcse_jax.errors import reported_to_user
from diffcse_jax.models import files
from diffcse_jax.models.tokenizer import load_tokenizer

LENGTH = 32


def measure_batches(
    folder: Path, sentences: int, batch_size: int, seconds: float
) -> dict[str, Any]:
    """Draw batches from a store of `sentences` for about `seconds`, as training does."""
    start = time.perf_counter()
    store = workload.synthetic_store("minilm", folder, sentences, LENGTH)
    built = time.perf_counter()
    source = BatchSource(
        store, batch_size=batch_size, steps=10**9, seed=0, pad_token_id=workload.PAD
    )
    batches = make_batches(source)
    next(batches)  # draws the epoch's order
    shuffled = time.perf_counter()
    before = _anonymous_bytes()
    drawn = elapsed = 0
    while elapsed < seconds:
        next(batches)
        drawn += 1
        elapsed = time.perf_counter() - shuffled
    return {
        "sentences": sentences,
        "build_seconds": built - start,
        "shuffle_seconds": shuffled - built,
        "batches": drawn,
        "sentences_per_second": drawn * batch_size / elapsed,
        "rss_growth_bytes": _anonymous_bytes() - before,
    }


def measure_tokenizing(folder: Path, sentences: int) -> dict[str, Any]:
    """Tokenise text into a store, including reading and writing, on all cores of this process."""
    tokenizer = load_tokenizer(files.find_folder("minilm"))
    words = np.array(
        sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha())
    )
    rng = np.random.default_rng(0)
    text = folder / f"{sentences}.txt"
    with text.open("w") as lines:
        for length in workload.synthetic_lengths(rng, sentences, LENGTH):
            lines.write(" ".join(words[rng.integers(0, len(words), length - 2)]) + "\n")
    corpus = open_corpus(DataConfig(train_file=str(text)))
    start = time.perf_counter()
    store = build_or_open(corpus, tokenizer, LENGTH, folder / "stores")
    elapsed = time.perf_counter() - start
    return {
        "sentences": sentences,
        "seconds": elapsed,
        "sentences_per_second": sentences / elapsed,
        "tokens": len(store.token_ids),
    }


def _anonymous_bytes() -> int:
    """Return the resident memory of this process, without mapped files.

    The system can take back the pages of mapped files.
    """
    status = Path("/proc/self/status")
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sentences", type=int, nargs="+", default=[100_000, 1_000_000], help="sizes of the stores"
    )
    parser.add_argument(
        "--tokenize", type=int, nargs="*", default=[100_000], help="sizes of the texts to tokenise"
    )
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="time to draw batches for, per store"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the record (default: print it)")
    return parser.parse_args(argv)


def main(argv: list[str]) -> dict[str, Any]:
    """Measure as the command line says, write the record and return it."""
    args = parse(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokenizing = [measure_tokenizing(folder, sentences) for sentences in args.tokenize]
        everywhere = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(everywhere)})  # threads started from here on share one core
        batches = [
            measure_batches(folder / str(sentences), sentences, args.batch_size, args.seconds)
            for sentences in args.sentences
        ]
        os.sched_setaffinity(0, everywhere)
    record = {
        "settings": {"batch_size": args.batch_size, "length": LENGTH},
        "batches": batches,
        "tokenizing": tokenizing,
    }
    return measure.write_record(args.output, "benchmarks.input_pipeline", argv, record)


if __name__ == "__main__":
    with reported_to_user():
        main(sys.argv[1:])
