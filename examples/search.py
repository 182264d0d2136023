"""Search Python documentation with an encoder before and after training.

python examples/search.py --before minilm --after runs/quickstart/export [--query "wait until a
thread has finished"]

The documents are the docstrings that `docstrings` keeps out of training, without their first
sentences. The first sentences are the queries, so the right document for each query is known.
"""

import argparse
import textwrap
from collections.abc import Sequence

from diffcse_jax import SentenceEncoder
from diffcse_jax.documents.docstrings import docstring_pairs
from diffcse_jax.errors import reported_to_user
from diffcse_jax.evaluation.answers import answers_of
from diffcse_jax.evaluation.retrieval import retrieval_scores

SHOWN = 4  # queries, evenly spaced, so that none is chosen for its result
TOP = 3
WIDTH = 56


def main() -> None:
    """Print how well both encoders find the documents, and the best hits of some queries."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", default="minilm", help="folder or hub id (default: minilm)")
    parser.add_argument(
        "--after", default="runs/quickstart/export", help="folder or hub id of the trained encoder"
    )
    parser.add_argument("--query", action="append", help="a query of your own; may be repeated")
    options = parser.parse_args()
    encoders = {
        "before": SentenceEncoder.from_pretrained(options.before),
        "after": SentenceEncoder.from_pretrained(options.after),
    }
    pairs = docstring_pairs()
    queries, documents = ([*texts] for texts in zip(*pairs, strict=True))
    print(f"\n{len(documents)} held-out functions: find a docstring by its first sentence\n")
    print(f"{'':24}" + "".join(f"{name:>10}" for name in encoders))
    answers = answers_of(queries, documents)
    scores = {
        name: retrieval_scores(
            encoder.encode_query(queries), encoder.encode_document(documents), answers
        )
        for name, encoder in encoders.items()
    }
    labels = {
        "mrr": "mean reciprocal rank",
        "recall@1": "found first, %",
        "recall@5": "among five, %",
    }
    for measure, label in labels.items():
        print(f"{label:24}" + "".join(f"{scores[name][measure]:10.2f}" for name in encoders))
    for encoder in encoders.values():
        encoder.build_index(documents)
    shown = range(0, len(pairs), -(-len(pairs) // SHOWN))
    for query in options.query or [queries[index] for index in shown]:
        show(query, dict(pairs).get(query, ""), encoders)


def show(query: str, wanted: str, encoders: dict[str, SentenceEncoder]) -> None:
    """Print the best hits of a query; an arrow marks the right document."""
    print(f"\n{query}")
    print("   " + "   ".join(name.ljust(WIDTH) for name in encoders).rstrip())
    hits = [encoder.search([query], top_k=TOP)[0] for encoder in encoders.values()]
    for row in zip(*hits, strict=True):
        print_columns(
            [f"{'->' if text == wanted else '  '} {score:.2f} {text}" for text, score in row]
        )


def print_columns(texts: Sequence[str]) -> None:
    """Print texts side by side, at most two lines each."""
    columns = [
        textwrap.wrap(
            text,
            WIDTH,
            max_lines=2,
            placeholder=" ...",
            subsequent_indent=" " * 8,
            drop_whitespace=True,
        )
        for text in texts
    ]
    for row in range(max(map(len, columns))):
        print(
            "   "
            + "   ".join(
                (lines[row] if row < len(lines) else "").ljust(WIDTH) for lines in columns
            ).rstrip()
        )


if __name__ == "__main__":
    with reported_to_user():
        main()
