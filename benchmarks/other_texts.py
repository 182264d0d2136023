r"""Make documents and labelled pairs from public repositories.

They test on text other than docstrings and manual pages.

    git clone https://github.com/MicrosoftDocs/cpp-docs && git -C cpp-docs checkout a2e592a
    python -m benchmarks.other_texts --text cpp --checkout cpp-docs --output cpp
    python -m benchmarks.adaptation_recipes --text cpp/pages \
        --tasks pairs_retrieval:cpp/test.tsv,STSBenchmark

A tenth of the pages is left out of the documents (a third for PowerShell and EIPs, which are
small). A hash of the path chooses them. `test.tsv` has the labelled pairs of these pages. `all.tsv`
has those of all pages, for differences that need more pairs: its texts are trained on, but not as
pairs. Texts to be found are cut to 64 words. If several pairs share a text, the first is taken.

--text      repository, commit                  query, and text to be found
cpp         MicrosoftDocs/cpp-docs, a2e592a     a compiler's message, and the remarks on it
powershell  MicrosoftDocs/PowerShell-Docs, 27138b2  a command's synopsis, and its description
medquad     abachaa/MedQuAD, 577bd37                a question on a disease, and its answer (NIH)
eips        ethereum/EIPs, f767a1e                  a proposal in a line, and its abstract
"""

import argparse
import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from diffcse_jax.documents.files.formats import Parsed, parse
from diffcse_jax.errors import ConfigError, reported_to_user

WORDS = 64
FEWEST_CHARACTERS = 20
DESCRIPTION = re.compile(r"^description: *(.+)$", re.MULTILINE)

Pair = tuple[str, str]


class Page(NamedTuple):
    """A page.

    Attributes:
        path: Its path in the repository.
        text: Its text, as markdown.
        pairs: Labelled pairs: queries and texts to be found.
    """

    path: str
    text: str
    pairs: Sequence[Pair] = ()


class Text(NamedTuple):
    """The text of a repository.

    Attributes:
        pages: Returns the pages of a checkout.
        left_out: One of this many pages is not training text.
    """

    pages: Callable[[Path], Iterator[Page]]
    left_out: int


def cpp(checkout: Path) -> Iterator[Page]:
    """Return Microsoft's C++ documentation, without tables of contents and included files."""
    for path, text in _markdown(checkout, "docs"):
        if not path.endswith("/TOC.md") and "/includes/" not in path:
            (_, message), (title, remarks), *_ = [*_sections(text), ("", []), ("", [])]
            explained = path.startswith("docs/error-messages/") and title.endswith(": Remarks")
            yield Page(path, text, [(_line(message), _line(remarks))] if explained else ())


def powershell(checkout: Path) -> Iterator[Page]:
    """Return PowerShell's reference and concepts."""
    for path, text in _markdown(checkout, "reference/7.5", "reference/docs-conceptual"):
        told = {title.rpartition(": ")[2]: _line(lines) for title, lines in _sections(text)}
        command = {"SYNOPSIS", "DESCRIPTION"} <= told.keys()
        yield Page(path, text, [(told["SYNOPSIS"], told["DESCRIPTION"])] if command else ())


def medquad(checkout: Path) -> Iterator[Page]:
    """Return the answers about each disease, below its name.

    Questions are only in the labelled pairs.
    """
    for file in sorted(checkout.glob("*/*.xml")):
        page = ElementTree.parse(file).getroot()
        asked = [
            (_line([_of(pair, "Question")]), _of(pair, "Answer")) for pair in page.iter("QAPair")
        ]
        answers = [
            "\n".join(map(str.strip, answer.splitlines())) for _, answer in asked if answer.strip()
        ]
        if answers:
            text = "\n\n".join([f"# {_line([_of(page, 'Focus')])}", *answers])
            yield Page(
                file.relative_to(checkout).as_posix(),
                text,
                [(query, _line([found])) for query, found in asked],
            )


def eips(checkout: Path) -> Iterator[Page]:
    """Return Ethereum's proposals.

    The line of newer ones is in the front matter, which is not training text.
    """
    for path, text in _markdown(checkout, "EIPS"):
        told = {title.rpartition(": ")[2]: _line(lines) for title, lines in _sections(text)}
        line = DESCRIPTION.search(text)
        query = line[1] if line else told.get("Simple Summary", "")
        yield Page(path, text, [(query, told.get("Abstract", ""))])


def _sections(text: str) -> Sequence[tuple[str, list[str]]]:
    """Return the titles and lines of Markdown."""
    found = parse(text.encode(), ".md", with_code=False)
    return found.sections if isinstance(found, Parsed) else ()


TEXTS = {
    "cpp": Text(cpp, 10),
    "powershell": Text(powershell, 3),
    "medquad": Text(medquad, 10),
    "eips": Text(eips, 3),
}


def is_left_out(path: str, one_of: int) -> bool:
    """Return True for one of this many pages, by the SHA-1 of the path in the repository."""
    return int(hashlib.sha1(path.encode()).hexdigest(), 16) % one_of == 0


def labelled(pages: Iterable[Page]) -> list[Pair]:
    """Return the pairs of pages.

    Texts to be found are cut, and short ones and repeated texts are left out.
    """
    rows: list[Pair] = []
    seen: set[str] = set()
    for query, found in (pair for page in pages for pair in page.pairs):
        pair = query, " ".join(found.split()[:WORDS])
        if min(map(len, pair)) >= FEWEST_CHARACTERS and not seen & set(pair):
            rows.append(pair)
            seen |= set(pair)
    return rows


def _markdown(checkout: Path, *folders: str) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for file in sorted((checkout / folder).rglob("*.md")):
            yield file.relative_to(checkout).as_posix(), file.read_text(encoding="utf-8-sig")


def _line(lines: Iterable[str]) -> str:
    return " ".join(" ".join(lines).split())


def _of(element: ElementTree.Element, name: str) -> str:
    return element.findtext(name) or ""


def _write(path: Path, rows: Iterable[Pair]) -> None:
    path.write_text("".join(f"{query}\t{found}\n" for query, found in rows), encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", choices=TEXTS, required=True)
    parser.add_argument("--checkout", type=Path, required=True, help="folder of the repository")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for `pages`, `test.tsv` and `all.tsv`"
    )
    options = parser.parse_args(argv)
    with reported_to_user():
        text = TEXTS[options.text]
        pages = list(text.pages(options.checkout))
        if not pages:
            raise ConfigError(f"--checkout {options.checkout}: no pages of --text {options.text}")
        folder = options.output / "pages"
        folder.mkdir(parents=True, exist_ok=True)
        left_out = []
        for page in pages:
            if is_left_out(page.path, text.left_out):
                left_out.append(page)
            else:
                name = Path(page.path).with_suffix(".md").as_posix().replace("/", "__")
                (folder / name).write_text(page.text, encoding="utf-8")
        tests = labelled(left_out)
        _write(options.output / "test.tsv", tests)
        _write(options.output / "all.tsv", labelled(pages))
        print(
            f"{len(pages) - len(left_out):,} pages, {len(tests):,} labelled pairs", file=sys.stderr
        )


if __name__ == "__main__":
    main()
