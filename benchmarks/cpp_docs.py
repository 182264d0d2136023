"""Documents and labelled pairs of Microsoft's C++ documentation, a text on which the preset was not chosen.

    git clone https://github.com/MicrosoftDocs/cpp-docs && git -C cpp-docs checkout a2e592a
    python -m benchmarks.cpp_docs --checkout cpp-docs --output cpp
    python -m benchmarks.adaptation_recipes --text cpp/pages --tasks pairs_retrieval:cpp/test.tsv,STSBenchmark

A hash of its path leaves every tenth page out of the documents. Among those, the pages of compiler messages are the
labelled text, `test.tsv`: the message, and the first 64 words of the remarks that explain it. `all.tsv` has them of all
pages, for a difference that so few cannot tell; its texts are trained on, the pairs are not.
"""

import argparse
import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from diffcse_jax.data.markdown import sections
from diffcse_jax.errors import ConfigError, reported_to_user

LEFT_OUT = 10  # every so many
WORDS = 64
FEWEST_CHARACTERS = 20


def pages(checkout: Path) -> Iterator[tuple[str, str]]:
    """Names and text of the pages, in order; tables of contents and what pages include are none."""
    root = checkout / "docs"
    for path in sorted(root.rglob("*.md")):
        name = path.relative_to(root).as_posix()
        if path.name != "TOC.md" and "includes" not in path.relative_to(root).parts[:-1]:
            yield name, path.read_text(encoding="utf-8-sig")


def is_left_out(name: str) -> bool:
    """True of every tenth page, by the SHA-1 of its path in the repository."""
    return int(hashlib.sha1(f"docs/{name}".encode()).hexdigest(), 16) % LEFT_OUT == 0


def explained(text: str) -> tuple[str, str] | None:
    """The message of a page and the beginning of the remarks on it; None for pages that are no such."""
    (_, message), (title, remarks), *_ = [*sections(text), ("", []), ("", [])]
    pair = _line(message), _line(remarks, WORDS)
    return pair if title.endswith(": Remarks") and min(map(len, pair)) >= FEWEST_CHARACTERS else None


def labelled(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of message and remarks; of pairs that share a text the first one."""
    rows: list[tuple[str, str]] = []
    seen: set[str] = set()
    for pair in filter(None, map(explained, texts)):
        if not seen & set(pair):
            rows.append(pair)
            seen |= set(pair)
    return rows


def _line(paragraphs: list[str], most_words: int | None = None) -> str:
    return " ".join(" ".join(paragraphs).split()[:most_words])


def _write(path: Path, rows: Iterable[tuple[str, str]]) -> None:
    path.write_text("".join(f"{message}\t{remarks}\n" for message, remarks in rows), encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="folder of the repository")
    parser.add_argument("--output", type=Path, required=True, help="folder for `pages`, `test.tsv` and `all.tsv`")
    options = parser.parse_args(argv)
    with reported_to_user():
        found = dict(pages(options.checkout))
        if not found:
            raise ConfigError(f"--checkout {options.checkout}: no pages in {options.checkout / 'docs'}")
        folder = options.output / "pages"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in found.items():
            if not is_left_out(name):
                (folder / name.replace("/", "__")).write_text(text, encoding="utf-8")
        messages = {name: text for name, text in found.items() if name.startswith("error-messages/")}
        tests = labelled(text for name, text in messages.items() if is_left_out(name))
        _write(options.output / "test.tsv", tests)
        _write(options.output / "all.tsv", labelled(messages.values()))
        print(f"{sum(not is_left_out(name) for name in found):,} pages, {len(tests)} labelled pairs", file=sys.stderr)


if __name__ == "__main__":
    main()
