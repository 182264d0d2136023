"""Compare encoding, with tokenisation, with sentence-transformers on the same model and sentences.

    python -m benchmarks.encode --text FILE --sentences 2000 --output benchmarks/results/NAME.json

The model is the packaged MiniLM, unless `--model` names another folder. Without `--text`, the
sentences are random words of its vocabulary, with lengths from `benchmarks.workload`.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure, workload
from benchmarks.measure import Implementation
from diffcse_jax.errors import reported_to_user
from diffcse_jax.models import files
from diffcse_jax.models.tokenizer import load_tokenizer


def ours(folder: Path, sentences: list[str], batch_size: int, precision: str) -> Implementation:
    """`SentenceEncoder.encode`."""
    import jax

    from diffcse_jax import SentenceEncoder

    encoder = SentenceEncoder.from_pretrained(folder, dtype=precision)
    facts = {"device": jax.devices()[0].device_kind}
    return _implementation(lambda: encoder.encode(sentences, batch_size=batch_size), facts)


def sentence_transformers(
    folder: Path, sentences: list[str], batch_size: int, precision: str
) -> Implementation:
    """Encode by `SentenceTransformer.encode`."""
    import sentence_transformers as library

    model = library.SentenceTransformer(
        str(folder), trust_remote_code=False, model_kwargs={"dtype": precision}
    )
    return _implementation(
        lambda: model.encode(sentences, batch_size=batch_size, show_progress_bar=False), {}
    )


def plain_transformers(
    folder: Path, sentences: list[str], batch_size: int, precision: str
) -> Implementation:
    """Encode by `AutoModel` as its model card shows.

    Batches are in the given order. Embeddings are means over real tokens, of length 1.
    """
    import torch
    import transformers

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(folder)
    model = (
        transformers.AutoModel.from_pretrained(folder, dtype=precision, trust_remote_code=False)
        .to(device)
        .eval()
    )

    @torch.inference_mode()
    def encode() -> np.ndarray:
        vectors = []
        for start in range(0, len(sentences), batch_size):
            chunk = sentences[start : start + batch_size]
            batch = tokenizer(chunk, padding=True, truncation=False, return_tensors="pt").to(device)
            states, mask = model(**batch).last_hidden_state, batch["attention_mask"][:, :, None]
            means = (states * mask).sum(1) / mask.sum(1)
            vectors.append(torch.nn.functional.normalize(means).float().cpu().numpy())
        return np.concatenate(vectors)

    return _implementation(encode, {})


OTHERS = {"sentence-transformers": sentence_transformers, "transformers": plain_transformers}


def _implementation(encode: Callable[[], np.ndarray], facts: dict[str, Any]) -> Implementation:
    vectors = np.empty(0)

    def step() -> None:
        nonlocal vectors
        vectors = encode()

    return Implementation(step, lambda: None, lambda: facts | {"vectors": vectors})


def synthetic_sentences(folder: Path, count: int, seed: int = 0) -> list[str]:
    """Return sentences of random whole words of the vocabulary."""
    words = sorted(
        word for word in load_tokenizer(folder).get_vocab() if word.isascii() and word.isalpha()
    )
    rng = np.random.default_rng(seed)
    lengths = workload.synthetic_lengths(rng, count, longest=32)
    return [" ".join(rng.choice(words, length - 2)) for length in lengths]


def measured(
    folder: Path,
    sentences: list[str],
    against: list[str],
    *,
    batch_size: int,
    precision: str,
    rounds: int,
) -> dict[str, Any]:
    """Return the record of a comparison. Each turn encodes all sentences once."""
    arguments = folder, sentences, batch_size, precision
    with contextlib.ExitStack() as stack:
        sides = {"ours": ours} | {name: OTHERS[name] for name in against}
        workers = {
            name: stack.enter_context(measure.worker(side, *arguments))
            for name, side in sides.items()
        }
        seconds = measure.alternate(workers, steps=rounds, block=1)
        summaries = {
            name: measure.summary(seconds[name], side.first_call, len(sentences)) | side.finish()
            for name, side in workers.items()
        }
    vectors = {name: side.pop("vectors") for name, side in summaries.items()}
    settings = {
        "model": folder.name,
        "sentences": len(sentences),
        "batch_size": batch_size,
        "precision": precision,
    }
    return {
        "device": summaries["ours"].pop("device"),
        "settings": settings,
        "implementations": summaries,
        "max_abs_difference": {
            name: float(np.abs(vectors[name] - vectors["ours"]).max()) for name in against
        },
        "ratios": measure.ratios(summaries),
    }


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="minilm", help="a sentence-transformers folder of mean and Normalize"
    )
    parser.add_argument("--text", type=Path, help="a file of real sentences, one per line")
    parser.add_argument(
        "--sentences", type=int, default=2000, help="number of sentences (default: %(default)s)"
    )
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--rounds", type=int, default=5, help="timed passes of each side (default: %(default)s)"
    )
    parser.add_argument("--against", nargs="+", choices=OTHERS, default=["sentence-transformers"])
    parser.add_argument("--threads", type=int, default=0, help="number of cores; 0: all")
    parser.add_argument("--output", type=Path, help="JSON file for the record (default: print it)")
    return parser.parse_args(argv)


def main(argv: list[str]) -> dict[str, Any]:
    """Measure as the command line says, write the record and return it."""
    args = parse(argv)
    measure.use_cores(args.threads)
    folder = files.find_folder(args.model)
    if args.text:
        sentences = workload.read_sentences(args.text, args.sentences)
    else:
        sentences = synthetic_sentences(folder, args.sentences)
    options = {"batch_size": args.batch_size, "precision": args.precision, "rounds": args.rounds}
    record = measured(folder, sentences, args.against, **options)
    return measure.write_record(args.output, "benchmarks.encode", argv, record)


if __name__ == "__main__":
    with reported_to_user():
        main(sys.argv[1:])
