"""How often the 95% interval of a verdict misses the truth, by the number of held-out documents.

Two models are equally good: the true difference is 0. Queries of one document gain or lose
together. Each draw gives documents of unequal sizes, and the interval is the one that verdicts
have. `missed` is how often it does not contain 0, and `better` how often all of it is above 0, so
that a verdict would wrongly say "better". A perfect interval has 5% and 2.5%. With `--skewed`, few
documents gain much and most lose a little.

With `--texts`: how much a gain flatters if the queries that chose the checkpoint also judge it.
`adapt` trains on each text with all trained weights, batches of 128 and an evaluation every two of
20 steps. Then one half of the held-out documents chooses the best checkpoint, and both halves judge
it. Halves are drawn again and again. `as measured` divides the documents. `without a gain` sets the
mean gain of each checkpoint to 0 and draws the documents of both halves with replacement.

Command:
    python -m benchmarks.coverage
    python -m benchmarks.coverage --skewed
    python -m benchmarks.coverage --texts docstrings FOLDER ... --work FOLDER --output FILE
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from benchmarks.measure import write_record
from diffcse_jax.config import Config, shipped_config
from diffcse_jax.evaluation.dev import build_dev_evaluation
from diffcse_jax.evaluation.metrics import paired_interval
from diffcse_jax.run_folder.checkpoints import read_record
from diffcse_jax.run_folder.records import read_baseline
from diffcse_jax.training.callbacks import Callback
from diffcse_jax.training.train import train_in_folder

DOCUMENTS = (3, 5, 10, 15, 20, 30, 50, 100)
QUERIES = 10.0  # of a document, in the mean
SHARED = 5.0  # points of reciprocal rank x 100: the spread of the gain of a document
OWN = 20.0  # the spread of the gain of a query within its document

STEPS = {"10 checkpoints": range(2, 21, 2), "2 checkpoints, as in adapt": (10, 20)}
DIVISIONS = 500

Gains = Float[np.ndarray, "checkpoints queries"]
Members = Sequence[Int[np.ndarray, " _"]]  # the queries of each document


def draw(
    rng: np.random.Generator, documents: int, *, skewed: bool
) -> tuple[Float[np.ndarray, " queries"], Int[np.ndarray, " queries"]]:
    """Return the gain of each query, and its document.

    Args:
        rng: Randomness.
        documents: The number of documents.
        skewed: Documents gain as an exponential distribution minus its mean, not as a normal one.
    """
    sizes = 1 + rng.poisson(QUERIES * rng.lognormal(-0.5, 1.0, documents))
    shared = rng.exponential(1.0, documents) - 1 if skewed else rng.normal(size=documents)
    document_of = np.repeat(np.arange(documents), sizes)
    return SHARED * shared[document_of] + OWN * rng.normal(size=len(document_of)), document_of


def rates(documents: int, draws: int, *, skewed: bool) -> tuple[float, float]:
    """Return how often the interval misses 0, and how often it is above 0, in percent."""
    rng = np.random.default_rng(documents)
    missed = above = 0
    for _ in range(draws):
        gains, document_of = draw(rng, documents, skewed=skewed)
        low, high = paired_interval([np.zeros_like(gains)], [gains], groups=document_of)
        missed += low > 0 or high < 0
        above += low > 0
    return 100 * missed / draws, 100 * above / draws


# The queries that chose


class Outcomes(Callback):
    """Keeps what each evaluation finds, for all queries."""

    def __init__(self) -> None:
        self.by_step: dict[int, list[float]] = {}

    def on_save(self, step: int, checkpoint: Path) -> None:
        (self.by_step[step],) = read_record(checkpoint).outcomes


def measure(text: str, folder: Path) -> dict[str, Any]:
    """Train on a text, and return the document and the outcomes of each held-out query."""
    values = shipped_config("adapt")
    values.data.train_file, values.data.cache_dir = text, str(folder / "tokens")
    values.train.batch_size, values.eval.every = 128, 2
    values.eval.guard, values.eval.interpolate, values.eval.hold = False, (), ()
    config, outcomes = Config.from_dict(values.to_dict()), Outcomes()
    verdict = train_in_folder(config, folder / "run", [outcomes])
    start = read_baseline(folder / "run")
    assert start is not None
    groups = build_dev_evaluation(config, lambda: ()).chosen.groups
    by_step = {0: start.outcomes[0]} | outcomes.by_step
    return {"verdict": verdict, "groups": groups.tolist(), "by_step": by_step}


def halves(
    rng: np.random.Generator, members: Members, *, replace: bool
) -> Iterator[tuple[Int[np.ndarray, " half"], Int[np.ndarray, " half"]]]:
    """Yield the queries of each half of the documents, and their documents."""
    count = len(members)
    drawn = rng.integers(count, size=count) if replace else rng.permutation(count)
    for part in (drawn[: count // 2], drawn[count // 2 :]):
        queries = [members[document] for document in part]
        yield np.concatenate(queries), np.repeat(np.arange(len(part)), [*map(len, queries)])


def flattery(gains: Gains, members: Members, *, replace: bool) -> dict[str, float]:
    """Return how the best checkpoint's gain differs between the halves. Each half chooses once."""
    rng, found = np.random.default_rng(0), []
    for _ in range(DIVISIONS):
        two = [*halves(rng, members, replace=replace)]
        for chooses in (0, 1):
            best = gains[:, two[chooses][0]].mean(axis=1).argmax()
            row: list[float] = []
            for queries, documents in (two[chooses], two[1 - chooses]):
                gain = gains[best, queries]
                low, high = paired_interval([np.zeros_like(gain)], [gain], groups=documents)
                row += [gain.mean(), low, high]
            found.append(row)
    gain, low, _, judged, judged_low, judged_high = np.array(found).T
    flattered = (gain - judged).reshape(DIVISIONS, 2).mean(axis=1)
    return {
        "gain, by queries that chose": float(gain.mean()),
        "gain, by the others": float(judged.mean()),
        "flattered": float(flattered.mean()),
        "error of flattered, of the draws": float(flattered.std() / np.sqrt(DIVISIONS)),
        "half width": float((judged_high - judged_low).mean() / 2),
        "better %, by queries that chose": 100 * float((low > 0).mean()),
        "better %, by the others": 100 * float((judged_low > 0).mean()),
        "better %, only by queries that chose": 100 * float(((low > 0) & (judged_low <= 0)).mean()),
    }


def compare(text: str, folder: Path) -> dict[str, Any]:
    """Return everything about a text. An earlier command may have trained on it."""
    kept = folder / "outcomes.json"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(measure(text, folder)), encoding="utf-8")
    content = json.loads(kept.read_text(encoding="utf-8"))
    groups, by_step = np.array(content["groups"]), content["by_step"]
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    found = {"queries": len(groups), "documents": len(members), "verdict": content["verdict"]}
    for name, steps in STEPS.items():
        gains = np.array([np.subtract(by_step[str(step)], by_step["0"]) for step in steps])
        centred = gains - gains.mean(axis=1, keepdims=True)
        found[name] = {
            "gains": gains.mean(axis=1).tolist(),
            "as measured": flattery(gains, members, replace=False),
            "without a gain": flattery(centred, members, replace=True),
        }
    return found


def main() -> None:
    """Print a line for each number of documents, or train on texts and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=4000, help="draws of each number (4000)")
    parser.add_argument("--skewed", action="store_true", help="few documents gain much")
    parser.add_argument("--texts", nargs="+", help="as data.train_file")
    parser.add_argument("--work", type=Path, default=Path("runs/coverage"), help="keeps the runs")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.texts:
        names = {Path(text).name: text for text in options.texts}
        texts = {name: compare(text, options.work / name) for name, text in names.items()}
        write_record(options.output, "benchmarks.coverage", sys.argv[1:], {"texts": texts})
        return
    print("documents  missed  better")
    for documents in DOCUMENTS:
        missed, above = rates(documents, options.draws, skewed=options.skewed)
        print(f"{documents:9}  {missed:5.1f}%  {above:5.1f}%")


if __name__ == "__main__":
    main()
