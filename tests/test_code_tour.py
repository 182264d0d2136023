"""The way of a line and of a row through the package is short, and is the one that the page shows."""

import re
from pathlib import Path

from paths import trace
from test_token_store import word_tokenizer

from diffcse_jax.config import DataConfig
from diffcse_jax.data.batches import BatchSource
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.data.token_store import build_or_open
from diffcse_jax.documents.ledger import Ledger
from diffcse_jax.documents.open import open_documents_to_search

# Files that the page names below the table of rows, because they only open the file.
NAMED_BELOW = {
    f"documents/{name}.py"
    for name in (
        *("find", "tables/formats", "tables/delimited"),
        *("tables/names", "tables/values", "tables/arrow"),
    )
}
PAGE = Path(__file__).parents[1] / "docs/code_tour.md"


def files_of(section: str) -> set[str]:
    """Return the files that a section of the page names in its tables."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## {section}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `(\S+\.py)` \|", text, flags=re.MULTILINE))


def test_a_line_reaches_the_batch_through_the_files_of_the_page(tmp_path):
    file = tmp_path / "two.txt"
    file.write_text("one two\nthree four\n")
    data = DataConfig(train_file=str(file))
    read = trace(lambda: list(open_corpus(data).rows()))
    assert len(read.files) <= 8
    assert read.returns <= 8
    tokenizer = word_tokenizer()

    def first_batch() -> object:
        store = build_or_open(open_corpus(data), tokenizer, 8, tmp_path / "cache")
        return BatchSource(store, batch_size=2, steps=1, seed=0, pad_token_id=0)[0]

    way = trace(first_batch)
    assert set(way.files) == files_of("From a line to a batch")
    assert len(way.files) <= 10
    assert way.returns <= 36


def test_a_row_becomes_a_document_through_the_files_of_the_page(tmp_path):
    file = tmp_path / "one.csv"
    file.write_text("id,title,text\n1,A title,The text of the row.\n")
    opening = trace(lambda: open_documents_to_search(file))
    documents = open_documents_to_search(file)
    way = trace(lambda: list(documents.read(Ledger(str(file)))))
    assert set(way.files) == files_of("From a row to a document")
    assert len(way.files) <= 9
    assert way.returns <= 10
    assert set(opening.files) <= set(way.files) | NAMED_BELOW
    assert opening.returns <= 24
