"""Serves a search page over a text of your own, with one model or two.

diffcse demo --model runs/quickstart --corpus sentences.txt
diffcse demo --model runs/quickstart --against minilm --corpus docstrings

The text is read as training text is: a line, or a row, is a sentence. Nobody but
this machine can open the page, unless --host says so. docs/report.md
"""

import argparse
import ipaddress
import sys
from pathlib import Path

from diffcse_jax.errors import ConfigError, NoSentencesError, reported_to_user


def main() -> None:
    """Encodes the text and serves the page until Ctrl-C."""
    options = parse_arguments()
    with reported_to_user():
        from diffcse_jax.demo.server import Corpus, open_server
        from diffcse_jax.encoder import SentenceEncoder
        from diffcse_jax.hosts import keep_compiled

        keep_compiled()
        sentences = read_sentences(options.corpus, tuple(options.columns))
        encoders = {name: SentenceEncoder.from_pretrained(name) for name in models_of(options.model, options.against)}
        corpus = Corpus(Path(options.corpus).name, sentences, encoders, options.top_k)
        with open_server(corpus, options.host, options.port) as server:  # first: a port may be taken
            for name, encoder in encoders.items():
                print(f"encoding {len(sentences):,} sentences with {name} ...", file=sys.stderr)
                encoder.build_index(sentences, show_progress=True)
            corpus.search(corpus.name)  # compiles what short queries need, so that nobody waits for it
            print(f"search at {address(options.host, server.server_address[1])} (Ctrl-C ends it)", flush=True)
            if warning := warning_of(options.host):
                print(warning, file=sys.stderr)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                print("\nstopped", file=sys.stderr)


def models_of(model: str, against: str | None) -> list[str]:
    """The models to search with.

    Raises:
        ConfigError: they are the same.
    """
    if against == model:
        raise ConfigError(f"--against {against} is the --model itself; name another one, or leave it out")
    return [model, against] if against else [model]


def read_sentences(name: str, columns: tuple[str, ...] = ()) -> list[str]:
    """The distinct sentences of a text, in their order.

    Raises:
        DataError: it cannot be read, or holds no sentence.
    """
    from diffcse_jax.data.sources import open_text

    corpus = open_text(name, "--corpus", columns=columns)
    sentences = list(dict.fromkeys(row[0] for row in corpus))
    if not sentences:
        raise NoSentencesError(f"--corpus {name} holds no sentence")
    return sentences


def address(host: str, port: int) -> str:
    """Where a browser finds the page."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def warning_of(host: str) -> str:
    """A warning where others can open the page; empty where they cannot."""
    try:
        alone = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        alone = False
    return "" if alone else f"warning: --host {host}: everybody who reaches this machine can search, unencrypted"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help="a run's folder, a Hugging Face or sentence-transformers folder, a hub id, `minilm`",
    )
    add("--corpus", required=True, metavar="FILE", help="the text to search, in any form that training reads")
    add("--columns", nargs=1, default=(), metavar="NAME", help="the column of a table that holds the sentences")
    add("--against", metavar="MODEL", help="a second model, for the same searches beside the first")
    add("--top_k", type=int, default=10, help="sentences per search (default: 10)")
    add("--host", default="127.0.0.1", help="the address to listen at (default: 127.0.0.1, this machine alone)")
    add("--port", type=int, default=8000, help="its port; 0: any free one (default: 8000)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
