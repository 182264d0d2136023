"""Five searches through Python documentation, with an encoder before and after training.

python examples/search.py --before minilm --after runs/quickstart/export

The documents are docstrings of functions that `docstrings` (diffcse_jax/data/docstrings.py) holds out from training.
"""

import argparse
import textwrap
import warnings

from diffcse_jax import SentenceEncoder
from diffcse_jax.data.docstrings import docstring_pairs
from diffcse_jax.errors import reported_to_user

QUERIES = (
    "How can I find the eigenvalues of a matrix?",
    "read the contents of a compressed archive",
    "random numbers from a given distribution",
    "Which function draws lines and markers on a plot?",
    "wait until another thread has finished",
)
WIDTH = 46


def main() -> None:
    """Prints each query's best hit by both encoders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="minilm", help="folder or hub id (default: minilm)")
    parser.add_argument("--after", default="runs/quickstart/export", help="folder or hub id of the trained encoder")
    options = parser.parse_args()
    with reported_to_user():
        after = SentenceEncoder.from_pretrained(options.after)
        with warnings.catch_warnings(action="ignore"):  # another pooler than its own, on purpose
            before = SentenceEncoder.from_pretrained(options.before, pooler=after.pooler)
    documents = [" ".join(pair) for pair in docstring_pairs()]
    print(f"\nbest of {len(documents)} held-out docstrings, sentence vector `{after.pooler}`\n")
    hits = {}
    for name, encoder in (("before training", before), ("after training", after)):
        encoder.build_index(documents)
        hits[name] = [best for (best, *_) in encoder.search(QUERIES, top_k=1)]
    print("   " + "   ".join(name.ljust(WIDTH) for name in hits))
    for query, *answers in zip(QUERIES, *hits.values(), strict=True):
        print(f"\n{query}")
        print_columns([f"{score:.2f} {text}" for text, score in answers])


def print_columns(texts: list[str]) -> None:
    """Texts side by side, at most three lines each."""
    columns = [textwrap.wrap(text, WIDTH, max_lines=3, placeholder=" ...") for text in texts]
    for row in range(max(map(len, columns))):
        print("   " + "   ".join((lines[row] if row < len(lines) else "").ljust(WIDTH) for lines in columns).rstrip())


if __name__ == "__main__":
    main()
