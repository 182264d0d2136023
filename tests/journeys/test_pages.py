"""Every code block of README and the pages runs, or its page says what it needs.

The blocks of a page run in their order, with an encoder of one block as `minilm` and on a few pages of text. The
quickstart has a test of its own.
"""

import gzip
import json
import shutil
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from tiny_model import write_tiny_model
from tiny_run import overrides

from journeys.pages import ROOT, Workspace, blocks_of

SHORT = {"train.steps": 2, "train.batch_size": 8, "data.max_length": 16, "generator.head_steps": 2, "mesh.data": 1}
TESTED_ELSEWHERE = {
    "docs/quickstart.md": "test_quickstart.py",
    "docs/extending.md": "tests/test_extending.py",
}
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if blocks_of(page) and page not in TESTED_ELSEWHERE]
ORDER = ["README.md", "docs/adapting.md", "docs/search.md"]  # later pages use what these leave
PAGES.sort(key=lambda page: (ORDER.index(page) if page in ORDER else len(ORDER), page))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, minilm_dir) -> Workspace:
    folder = tmp_path_factory.mktemp("pages")
    model = str(write_tiny_model(folder / "tiny", minilm_dir, blocks=1))
    write_texts(folder)
    arguments = overrides(SHORT | {"model.name_or_path": model, "data.cache_dir": str(folder / "cache")})
    seeds = ["--seeds", "1"]
    commands = {"train": arguments, "finetune": arguments, "study": [*arguments, *seeds]}
    return Workspace(folder, commands, {"--model minilm": f"--model {model}", '"minilm"': f'"{model}"'})


def write_texts(folder: Path) -> None:
    """Write the files that the pages name."""
    sentences = [f"Sentence {i} tells about number {i * i} and about {i % 7} more things." for i in range(60)]
    pairs = [(f"question {i}?", f"The answer to {i} is {i * i}.") for i in range(30)]
    for name in ("my_documents", "documents"):
        shutil.copytree(ROOT / "docs", folder / name, ignore=lambda _, names: {n for n in names if n[-3:] != ".md"})
    files = {
        "sentences.txt": "\n".join(sentences),
        "queries.tsv": "\n".join("\t".join(pair) for pair in pairs),
        "faq.tsv": "\n".join("\t".join(pair) for pair in pairs),
        "questions.tsv": "\n".join(f"{a}\t{b}\t{i % 2}" for i, (a, b) in enumerate(pairs)),
        "questions.txt": "\n".join(a for a, _ in pairs),
        "tickets.csv": "message,urgency\n" + "".join(f"{text},{'ab'[i % 2]}\n" for i, text in enumerate(sentences)),
        "new.csv": "ticket,message\n" + "".join(f"{i},{text}\n" for i, text in enumerate(sentences[:5])),
        "pairs.jsonl": "".join(json.dumps({"one": a, "other": b, "same": len(a) % 2}) + "\n" for a, b in pairs),
    }
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
    (folder / "shards").mkdir()
    for name in ("text.txt.gz", "shards/1.txt.gz", "shards/2.txt.gz"):
        (folder / name).write_bytes(gzip.compress(files["sentences.txt"].encode()))


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch, request):
    """End the search page at once, as Ctrl-C does."""

    def serve_forever(self, *_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", serve_forever)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page, workspace):
    for block in blocks_of(page):
        if not block.needs:
            workspace.run(block)
