"""How often the 95% interval of a verdict misses the truth, by the number of held-out documents.

Two models are equally good: the true difference is 0. Queries of one document gain or lose
together. Each draw gives documents of unequal sizes, and the interval is the one that verdicts
have. `missed` is how often it does not contain 0, and `better` how often all of it is above 0, so
that a verdict would wrongly say "better". A perfect interval has 5% and 2.5%. With `--skewed`, few
documents gain much and most lose a little.

Command:
    python -m benchmarks.coverage
    python -m benchmarks.coverage --skewed
"""

import argparse

import numpy as np
from jaxtyping import Float, Int

from diffcse_jax.evaluation.metrics import paired_interval

DOCUMENTS = (3, 5, 10, 15, 20, 30, 50, 100)
QUERIES = 10.0  # of a document, in the mean
SHARED = 5.0  # points of reciprocal rank x 100: the spread of the gain of a document
OWN = 20.0  # the spread of the gain of a query within its document


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


def main() -> None:
    """Print a line for each number of documents."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=4000, help="draws of each number (4000)")
    parser.add_argument("--skewed", action="store_true", help="few documents gain much")
    options = parser.parse_args()
    print("documents  missed  better")
    for documents in DOCUMENTS:
        missed, above = rates(documents, options.draws, skewed=options.skewed)
        print(f"{documents:9}  {missed:5.1f}%  {above:5.1f}%")


if __name__ == "__main__":
    main()
