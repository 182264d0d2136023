"""The README's second command against a stand-in for the Hugging Face hub, with tiny weights.

The stand-in answers as the hub does: short names are redirected, files have a commit and an ETag,
and the checkpoints have the old names `LayerNorm.gamma` and `LayerNorm.beta`.
"""

import hashlib
import io
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import transformers
from tiny_run import environment, overrides

from journeys.pages import ROOT, blocks_of

COMMIT = "0" * 40
RENAMED = {
    "bert-base-uncased": "google-bert/bert-base-uncased",
    "distilbert-base-uncased": "distilbert/distilbert-base-uncased",
}
DATA = "datasets/princeton-nlp/datasets-for-simcse"
# Runs the commands of its input in one process, which imports and compiles once.
SCRIPT = """
import json, runpy, sys
for sys.argv in json.load(sys.stdin):
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
"""
SHORT = {"train.steps": 2, "train.batch_size": 8, "data.max_length": 16, "generator.head_steps": 2}


class Hub(ThreadingHTTPServer):
    """Serves `files`, by repository (data sets begin with `datasets/`) and by name."""

    def __init__(self, files: dict[str, dict[str, bytes]]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.redirected: set[str] = set()


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urllib.parse.urlsplit(self.path).path
        for short, repository in RENAMED.items():
            if f"/{short}/" in path and f"/{repository}/" not in path:
                self.server.redirected.add(short)
                return self.answer(307, location=path.replace(short, repository, 1))
        found = re.fullmatch(r"/(?:api/models/)?(.+?)/(revision|tree|resolve)/(.*)", path)
        if not found:
            return self.answer(404)
        repository, what, rest = found.groups()
        files = self.server.files[repository]
        if what == "revision":
            names = [{"rfilename": name} for name in files]
            return self.answer(
                200, json.dumps({"id": repository, "sha": COMMIT, "siblings": names}).encode()
            )
        if what == "tree":
            rows = [
                {"type": "file", "path": name, "size": len(files[name]), "oid": COMMIT}
                for name in files
            ]
            return self.answer(200, json.dumps(rows).encode())
        content = files.get(rest.partition("/")[2])
        return self.answer(404) if content is None else self.answer(200, content)

    def answer(self, status: int, content: bytes = b"", location: str = "") -> None:
        self.send_response(status)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        if location:
            self.send_header("Location", location)
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture
def hub(tmp_path: Path, minilm_dir: Path) -> Iterator[Hub]:
    pytest.importorskip("torch")
    sentences = "".join(
        f"Sentence {i} has the number {i * i} and {i % 7} words more.\n" for i in range(60)
    ).encode()
    files = {DATA: {"wiki1m_for_simcse.txt": sentences, "senteval.tar": senteval_archive()}}
    sizes = {"vocab_size": 30522, "max_position_embeddings": 40}
    bert = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    distilbert = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
    networks = (
        transformers.BertForPreTraining(transformers.BertConfig(**sizes, **bert)),
        transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**sizes, **distilbert)),
    )
    for network, repository in zip(networks, RENAMED.values(), strict=True):
        folder = tmp_path / repository
        network.save_pretrained(folder)
        with_old_names(folder / "model.safetensors")
        for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
            shutil.copy(minilm_dir / name, folder / name)
        files[repository] = {path.name: path.read_bytes() for path in folder.iterdir()}
    with Hub(files) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def with_old_names(weights: Path) -> None:
    """Rename the norms' weights as TensorFlow called them, which the hub's first checkpoints still do."""
    old = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}
    tensors = {}
    for name, array in safetensors.numpy.load_file(weights).items():
        for new_name, old_name in old.items():
            name = name.replace(new_name, old_name)
        tensors[name] = array
    safetensors.numpy.save_file(tensors, weights)


def senteval_archive() -> bytes:
    """Return a `senteval.tar` with a small STS Benchmark and SICK."""
    rng = np.random.default_rng(0)
    rows = [
        (f"A man plays number {i}.", f"Somebody plays {i % 3}.", f"{rng.uniform(0, 5):.2f}")
        for i in range(12)
    ]
    stsb = "".join(
        f"main\tfile\t2012\t{i}\t{score}\t{a}\t{b}\n" for i, (a, b, score) in enumerate(rows)
    )
    sick = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n"
    sick += "".join(f"{i}\t{a}\t{b}\t{score}\tNEUTRAL\n" for i, (a, b, score) in enumerate(rows))
    files = {f"STS/STSBenchmark/sts-{split}.csv": stsb for split in ("train", "dev", "test")}
    files |= {f"SICK/SICK_{split}.txt": sick for split in ("train", "trial", "test_annotated")}
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"SentEval/data/downstream/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return content.getvalue()


def test_the_published_run_from_the_hub(hub, tmp_path):
    (block,) = (each for each in blocks_of("README.md") if each.text.startswith("python train.py"))
    train, evaluate = (shlex.split(line, comments=True)[1:] for line in block.commands)
    workdir = tmp_path / evaluate[2]
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    variables = environment(
        tmp_path / "xla", HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="1"
    )
    variables |= {"HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    variables.pop("DIFFCSE_DATA_DIR", None)

    export, tasks = tmp_path / "export", ("STSBenchmark", "SICKRelatedness")
    commands = [
        ["train.py", *train[1:], "--workdir", str(workdir), *overrides(SHORT)],
        ["diffcse_jax/cli.py", "export", "--model", str(workdir), "--output", str(export)],
        [
            "eval.py",
            "--model",
            str(export),
            "--tasks",
            ",".join(tasks),
            "--output",
            str(tmp_path / "results.json"),
        ],
    ]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env=variables,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert "Traceback" not in printed
    assert "downloading wiki1m_for_simcse.txt" in printed
    assert "stsb_spearman" in printed
    assert hub.redirected == set(RENAMED)
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    assert all(math.isfinite(row["difference"]) for row in rows if "difference" in row)
    # The weights were read by their old names: two steps at a small learning rate change them
    # little.
    before = safetensors.numpy.load(hub.files[RENAMED["bert-base-uncased"]]["model.safetensors"])
    after = safetensors.numpy.load_file(workdir / "export/model.safetensors")
    norms = [name for name in before if re.fullmatch(r"bert\..*LayerNorm\.gamma", name)]
    assert norms
    for name in norms:
        exported = after[name.removeprefix("bert.").replace("gamma", "weight")]
        np.testing.assert_allclose(exported, before[name], atol=1e-3)
    scores = json.loads((tmp_path / "results.json").read_text())["tasks"]
    assert all(math.isfinite(scores[task]["spearman"]) for task in tasks)
