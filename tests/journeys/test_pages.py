"""Every code block of README and the pages runs, or its page says what it needs.

A page's blocks run in their order, with a tiny encoder and on a few pages of text. The quickstart
has its own test.
"""

import dataclasses
import gzip
import json
import shutil
from http.server import ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import pytest
from tiny_model import write_tiny_model
from tiny_run import overrides

import diffcse_jax
from journeys.pages import ROOT, Workspace, blocks_of, write_documents

pytestmark = pytest.mark.filterwarnings("default")  # a warning does not end a command of a user
SHORT = {
    "train.steps": 2,
    "train.batch_size": 8,
    "data.max_length": 16,
    "generator.head_steps": 2,
    "mesh.data": 1,
}
SHORT |= {"eval.hold": (), "eval.guard": False, "train.packing": "off", "train.recompute": "off"}
# test_quickstart.py and tests/test_extending.py
HAVE_TESTS = ("docs/quickstart.md", "docs/extending.md")
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if blocks_of(page) and page not in HAVE_TESTS]


@pytest.fixture(scope="module", autouse=True)
def without_torch():
    """Exports are not compared with PyTorch here. The quickstart's are."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("diffcse_jax.export._installed", lambda module: False)
        yield


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, minilm_dir) -> Workspace:
    """Return a folder with the texts that pages name, and with a run under each name that pages use."""
    folder = tmp_path_factory.mktemp("pages")
    model = str(write_tiny_model(folder / "tiny", minilm_dir, blocks=1))
    write_texts(folder)
    settings = SHORT | {"model.name_or_path": model, "data.cache_dir": str(folder / "cache")}
    commands = {"train": overrides(settings), "finetune": overrides(settings)}
    commands["study"] = [*commands["train"], "--seeds", "1"]
    adapted = str(folder / "runs/mine/export")  # records its pooler, as MiniLM does
    renamed = {
        "--model minilm": f"--model {adapted}", '"minilm"': f'"{adapted}"', "--against minilm": f"--against {adapted}",
        "TEACHER": adapted, "--input docstrings": "--input my_documents/", "checkpoints/10": "checkpoints/2",
        "--truncate_dim 128": "--truncate_dim 8", "--blocks 3": "--blocks 1",
        "--config.model.name_or_path=xlm-roberta-base": "", "intfloat/e5-small-v2": adapted,
    }  # fmt: skip
    workspace = Workspace(folder, commands, renamed)
    workspace.run_command(
        "diffcse train --config adapt --workdir runs/mine --config.data.train_file=my_documents/"
    )
    for name in ("quickstart", "seed-1", "seed-2"):
        shutil.copytree(folder / "runs/mine", folder / "runs" / name)
    return workspace


@pytest.fixture
def workspace(prepared, tmp_path, monkeypatch) -> Workspace:
    """Return a copy of the folder, in which trainings from Python are short as well."""
    shutil.copytree(prepared.folder, tmp_path / "copy")
    train, settings = (
        diffcse_jax.train,
        dict(SHORT, **{"model.name_or_path": str(prepared.folder / "tiny")}),
    )

    def short_train(*arguments, **options):
        return train(
            *arguments, **{**options, "overrides": {**options.get("overrides", {}), **settings}}
        )

    monkeypatch.setattr(diffcse_jax, "train", short_train)
    # as Ctrl-C
    monkeypatch.setattr(
        ThreadingHTTPServer, "serve_forever", mock.Mock(side_effect=KeyboardInterrupt)
    )
    documents = [
        path.read_text(encoding="utf-8") for path in (prepared.folder / "my_documents").iterdir()
    ]
    return dataclasses.replace(prepared, folder=tmp_path / "copy", names={"documents": documents})


def write_texts(folder: Path) -> None:
    """Write the files that the pages name."""
    sentences = [
        f"Sentence {i} tells about number {i * i} and about {i % 7} more things." for i in range(60)
    ]
    pairs = [(f"question {i}?", f"The answer to {i} is {i * i}.") for i in range(30)]
    for name in ("my_documents", "documents", "more"):
        write_documents(folder / name)
    files = {
        "sentences.txt": "\n".join(sentences),
        "text.txt": "\n".join(sentences),
        "queries.tsv": "\n".join("\t".join(pair) for pair in pairs),
        "faq.tsv": "\n".join("\t".join(pair) for pair in pairs),
        "questions.tsv": "\n".join(f"{a}\t{b}\t{i % 2}" for i, (a, b) in enumerate(pairs)),
        "questions.txt": "\n".join(a for a, _ in pairs),
        "tickets.csv": "ticket,message,urgency\n"
        + "".join(f"{i},{s},{i % 2}\n" for i, s in enumerate(sentences)),
        "new.csv": "ticket,message\n"
        + "".join(f"{i},{text}\n" for i, text in enumerate(sentences[:5])),
        "pairs.jsonl": "".join(
            json.dumps({"one": a, "other": b, "same": len(a) % 2}) + "\n" for a, b in pairs
        ),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "shards").mkdir()
    for name in ("text.txt.gz", "shards/1.txt.gz", "shards/2.txt.gz"):
        (folder / name).write_bytes(gzip.compress(files["sentences.txt"].encode()))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page, workspace):
    blocks = [block for block in blocks_of(page) if not block.needs]
    for block in blocks:
        printed = workspace.run(block)
        assert "Traceback" not in printed
    assert all(block.needs.startswith("needs ") for block in blocks_of(page) if block not in blocks)
