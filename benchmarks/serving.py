r"""Measure forms for serving: size on disk, processor time and quality, next to float32.

    python -m benchmarks.serving --model minilm --data COLLECTIONS --collections A B C \
        --work FOLDER --output benchmarks/results/NAME.json

The model is exported in each form to FOLDER. Quality is the Spearman correlation on STS-B (test)
and nDCG@10 on search collections in BEIR's form, which COLLECTIONS contains. Processor time is of
1,000 documents of the first collection, in turns with sentence-transformers in float32, each in a
process of its own. FOLDER keeps each result, so the same command resumes after an interruption.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.measure import Implementation
from diffcse_jax.commands import FORMS
from diffcse_jax.errors import reported_to_user

TEXTS = 1000
JAX, LIBRARY = "jax float32", "sentence-transformers float32"


def _implementation(encode: Callable[[], object]) -> Implementation:
    """Return an implementation that also records the processor seconds of each call."""
    seconds: list[float] = []

    def step() -> None:
        start = time.process_time()
        encode()
        seconds.append(time.process_time() - start)

    # The first call compiles.
    return Implementation(step, lambda: None, lambda: {"processor_seconds": seconds[1:]})


def ours(folder: str, backend: str, texts: list[str]) -> Implementation:
    """`SentenceEncoder.encode`."""
    from diffcse_jax import SentenceEncoder

    encoder = SentenceEncoder.from_pretrained(folder, backend=backend)
    return _implementation(functools.partial(encoder.encode, texts))


def library(folder: str, texts: list[str]) -> Implementation:
    """`SentenceTransformer.encode`."""
    import sentence_transformers

    model = sentence_transformers.SentenceTransformer(folder, device="cpu", trust_remote_code=False)
    return _implementation(functools.partial(model.encode, texts, show_progress_bar=False))


def quality(folder: Path, collections: list[Path]) -> dict[str, float]:
    """Return the scores of STS-B and of each collection, which are kept beside the folder."""
    from diffcse_jax.evaluation import EvaluationSettings
    from diffcse_jax.evaluation.runner import evaluate_model

    tasks = {"STS-B": ("STSBenchmark", "spearman")}
    tasks |= {each.name: (f"retrieval:{each}", "ndcg@10") for each in collections}
    scores = {}
    for name, (task, measured) in tasks.items():
        path = folder.with_name(f"{folder.name}.{name}.json")
        if not path.is_file():
            results = evaluate_model(str(folder), EvaluationSettings(tasks=task, backend="onnx"))
            path.write_text(json.dumps(results["tasks"][task][measured]))
        scores[name] = json.loads(path.read_text())
    return scores


def times(folders: dict[str, Path], texts: list[str], rounds: int) -> dict[str, Any]:
    """Return the processor seconds of each form, in turns, and their ratios."""
    import contextlib

    exact = str(folders["float32"])
    sides: dict[str, tuple[Any, ...]] = {
        LIBRARY: (library, exact, texts),
        JAX: (ours, exact, "jax", texts),
    }
    sides |= {
        f"onnx {form}": (ours, str(folder), "onnx", texts) for form, folder in folders.items()
    }
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(measure.worker(*side)) for name, side in sides.items()}
        for _ in range(rounds):
            for worker in workers.values():
                worker.run(1)
        seconds = {name: each.finish()["processor_seconds"] for name, each in workers.items()}
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        name: {
            "processor_seconds": measure.spread(each),
            "per_1000_texts": 1000 * medians[name] / len(texts),
            "share_of_sentence_transformers": medians[name] / medians[LIBRARY],
        }
        for name, each in seconds.items()
    }


def main(argv: list[str]) -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["float32", "float16", "int8"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--collections", nargs="+", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=TEXTS)
    parser.add_argument("--quality_only", action="store_true", help="leave the times out")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)

    from diffcse_jax.evaluation.search_collections import read_collection
    from diffcse_jax.export import export
    from diffcse_jax.models.graph import GRAPH

    args.work.mkdir(parents=True, exist_ok=True)
    collections = [args.data / name for name in args.collections]
    folders = {form: args.work / form for form in dict.fromkeys(["float32", *args.forms])}
    for form, folder in folders.items():
        if not (folder / GRAPH).is_file():
            export(args.model, folder, onnx=form)
    scores: dict[str, dict[str, Any]] = {}
    for form in args.forms:
        scores[form] = quality(folders[form], collections)
        scores[form]["bytes"] = (folders[form] / GRAPH).stat().st_size
        print(form, scores[form], file=sys.stderr, flush=True)
    record: dict[str, Any] = {"model": args.model, "forms": scores}
    if not args.quality_only:
        texts = [*read_collection(collections[0]).documents.values()][: args.texts]
        record["texts"] = {"count": len(texts), "of": args.collections[0]}
        record["times"] = times(folders, texts, args.rounds)
    measure.write_record(args.output, "benchmarks.serving", argv, record)


if __name__ == "__main__":
    with reported_to_user():
        main(sys.argv[1:])
