"""The page of the quickstart from top to bottom, with the encoder it names and the package's own documentation as text.

The training lasts 3 steps of 8 pairs from some docstrings of numpy. The pages of `docs/` stand for
`my_documents/`, and one of them for `docstrings` where a command would encode 20,000 sentences.
"""

import concurrent.futures
import dataclasses
import json
import queue
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from http.server import ThreadingHTTPServer

import pytest
from html_pages import Page, checked
from huggingface_hub import metadata_load
from matplotlib.image import imread
from tiny_model import HIDDEN, write_tiny_model
from tiny_run import overrides

from diffcse_jax.documents import docstrings
from diffcse_jax.models import sentence_folder
from diffcse_jax.run_folder.records import read_metrics
from journeys.pages import Block, Workspace, blocks_of, write_documents

pytestmark = pytest.mark.filterwarnings("default")  # a warning does not end a command of a user
PAGE = "docs/quickstart.md"
STEPS = 3
SHORT = {"train.steps": STEPS, "train.batch_size": 8, "data.max_length": 32, "mesh.data": 1}
SHORT |= {"eval.hold": (), "eval.guard": False, "train.packing": "off", "train.recompute": "off"}


@pytest.fixture(scope="module", autouse=True)
def of_numpy():
    """Let few modules be documented: reading all packages takes half a minute, and scoring their functions as long."""
    files = [
        each
        for each in docstrings._source_files()
        if each[0].startswith(("numpy.lib.", "numpy.polynomial."))
    ]
    docstrings._docstrings.cache_clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(docstrings, "_source_files", lambda: iter(files))
        yield
    docstrings._docstrings.cache_clear()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    folder = tmp_path_factory.mktemp("quickstart")
    write_documents(folder / "my_documents")
    write_documents(folder / "few_documents", "training.md")
    short = SHORT | {"data.cache_dir": str(folder / "cache")}
    return Workspace(
        folder, {"train": overrides(short)}, {"--input docstrings": "--input few_documents/"}
    )


@pytest.fixture(scope="module")
def trained(workspace) -> str:
    """Run the first command of the page and return what it printed."""
    return workspace.run(block("diffcse train --config quickstart"))


def block(beginning: str) -> Block:
    (found,) = (each for each in blocks_of(PAGE) if each.text.startswith(beginning))
    return found


def test_training_ends_with_a_verdict_and_curves(workspace, trained):
    run = workspace.folder / "runs/quickstart"
    verdict = r"^Training .*\n  pairs_retrieval \d+\.\d\d after training, \d+\.\d\d before .*\n  Exported "
    assert re.search(verdict, trained, flags=re.MULTILINE)
    assert [row["step"] for row in read_metrics(run) if "loss" in row] == [*range(1, STEPS + 1)]
    picture = imread(run / "report/curves.png")
    assert picture.std() > 0.05


def test_the_report_shows_the_numbers_of_the_run(workspace, trained):
    run = workspace.folder / "runs/quickstart"
    workspace.run(block("diffcse report"))
    page = checked((run / "report/index.html").read_text(encoding="utf-8"))
    rows = read_metrics(run)
    scores = [row["dev/pairs_retrieval"] for row in rows if "dev/pairs_retrieval" in row]
    for score in (rows[0]["start/pairs_retrieval"], max(scores)):
        assert f"{score:.2f}" in page.text


def test_evaluation_and_search(workspace, trained):
    table = workspace.run(block("diffcse evaluate"))
    recorded = json.loads((workspace.folder / "runs/quickstart/results.json").read_text())
    scores = [each["tasks"]["pairs_retrieval:docstrings"]["mrr"] for each in recorded["models"]]
    assert len(scores) == 2
    assert all(f"{score:.2f}" in table for score in scores)
    hits = workspace.run(block("diffcse search --model runs/quickstart"))
    again = workspace.run(block("diffcse search --input runs/quickstart/index"))
    for printed, queries in ((hits, 1), (again, 2)):
        # By words alone, which so short a run may recommend, documents without them are no hits.
        number = len(re.findall(r"^ *-?\d+\.\d{3}  ", printed, re.MULTILINE))
        assert queries <= number <= 5 * queries, printed


def test_the_search_page_in_a_browser(workspace, trained, monkeypatch):
    """The page is read by Chromium where it is installed, and as it is sent in any case."""
    servers, serve = queue.Queue(), ThreadingHTTPServer.serve_forever
    monkeypatch.setattr(
        ThreadingHTTPServer,
        "serve_forever",
        lambda server: (servers.put(server), serve(server, 0.01)),
    )
    (line,) = block("diffcse demo").commands
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        printed = thread.submit(workspace.run_command, f"{line} --port 0")
        server = servers.get(timeout=300)
        address = f"http://127.0.0.1:{server.server_port}/?{urllib.parse.urlencode({'q': 'how do I resume a run?'})}"
        with urllib.request.urlopen(address, timeout=60) as response:
            shown = [checked(response.read().decode()).text]
        if browser := shutil.which("chromium") or shutil.which("google-chrome"):
            flags = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
            seen = subprocess.run(
                [browser, *flags, address], capture_output=True, text=True, check=True, timeout=120
            )
            shown.append(Page(seen.stdout).text)
        server.shutdown()
    assert address.partition("?")[0] in printed.result()
    for text in shown:
        assert "minilm" in text
        assert len(re.findall(r"\b0\.\d{3}\b", text)) >= 10  # five hits of each model


def test_the_export_goes_to_other_libraries(workspace, trained):
    pytest.importorskip("sentence_transformers")
    workspace.run(block("from sentence_transformers"))
    assert workspace.names["embeddings"].shape == (2, 384)
    workspace.run(block("diffcse export"))
    card = workspace.folder / "quickstart-model/README.md"
    assert metadata_load(card)["license"] == "apache-2.0"
    scores = json.loads((workspace.folder / "runs/quickstart/results.json").read_text())["models"]
    assert f"{scores[-1]['tasks']['pairs_retrieval:docstrings']['mrr']:.2f}" in card.read_text(
        encoding="utf-8"
    )


def test_own_documents(workspace, minilm_dir):
    """With a tiny encoder, for the other tests are about MiniLM."""
    tiny = write_tiny_model(workspace.folder / "tiny", minilm_dir, blocks=1)
    sentence_folder.write(
        tiny, sentence_folder.RecordedPooler("avg"), num_blocks=1, hidden_size=HIDDEN
    )
    short = SHORT | {
        "data.cache_dir": str(workspace.folder / "cache"),
        "model.name_or_path": str(tiny),
    }
    renamed = {'workdir="runs/mine"': f'workdir="runs/mine", overrides={short}'}
    workspace = dataclasses.replace(
        workspace, overrides={"train": overrides(short)}, renamed=renamed
    )
    workspace.run(block("diffcse train --config adapt"))
    workspace.run(block("from diffcse_jax import train"))
    assert workspace.names["encoder"].search("how do I resume a run?", top_k=3)
