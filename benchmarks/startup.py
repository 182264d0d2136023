"""Time cold processes: an import, the first vector, and the first hits of a saved index.

    python -m benchmarks.startup --text SENTENCES.txt --output FILE.json

Each turn starts one process of ours and one of sentence-transformers for each task, with the same
folder, text and embeddings. Ratios are of medians; those of processor time hold on a busy machine.
Before the first turn each of ours runs once, which keeps its compiled programs. `first vector,
compiled` compiles in each process. Embeddings of the text are random, because a search takes as
long with those.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import measure
from diffcse_jax import SentenceEncoder
from diffcse_jax.documents.document import Document, Section
from diffcse_jax.models.files import find_folder
from diffcse_jax.models.pooling import normalize
from diffcse_jax.search.contents import Contents, documents_table, passages_table
from diffcse_jax.search.embeddings import StoredEmbeddings
from diffcse_jax.search.folder import Stored
from diffcse_jax.search.index import Index
from diffcse_jax.search.lexical import LexicalIndex
from diffcse_jax.search.passages import Passage
from diffcse_jax.search.settings import IndexSettings

QUERY = "how are rivers named in the north?"
COMMAND = (sys.executable, "-m", "diffcse_jax.cli")
ENCODE = """
import sys
from sentence_transformers import SentenceTransformer
print(SentenceTransformer(sys.argv[1], device="cpu").encode(["text"])[0, :3])
"""
SEARCH = """
import sys
import numpy as np
from sentence_transformers import SentenceTransformer, util
model = SentenceTransformer(sys.argv[1], device="cpu")
texts = open(sys.argv[2], encoding="utf-8").read().splitlines()
hits = util.semantic_search(model.encode(sys.argv[4]), np.load(sys.argv[3]), top_k=5)
print([texts[hit["corpus_id"]] for hit in hits[0]])
"""
NOT_KEPT = {"JAX_COMPILATION_CACHE_DIR": ""}


class Program(NamedTuple):
    """What a process runs: a command line, its input, and variables of its environment."""

    arguments: tuple[str, ...]
    text: str = ""
    environment: Mapping[str, str] = {}


def write_index(model: str, text: Path, index: Path, vectors: Path) -> None:
    """Write an index of the lines of a text, and its embeddings alone."""
    encoder = SentenceEncoder.from_pretrained(model)
    lines = text.read_text(encoding="utf-8").splitlines()
    size = (len(lines), encoder.dimension)
    embeddings = normalize(np.random.default_rng(0).normal(size=size).astype(np.float32))
    np.save(vectors, embeddings)
    documents = documents_table(
        (Document(str(row), (Section("", (line,)),)) for row, line in enumerate(lines, 1)),
        input_number=0,
    )
    passages = passages_table([Passage(row, "", line) for row, line in enumerate(lines)])
    stored = StoredEmbeddings.of(embeddings)
    contents = Contents(documents, passages, stored, LexicalIndex.build(lines))
    Index.of(Stored(IndexSettings("hybrid"), contents, encoder.record())).save(index)


def programs(model: str, text: Path, folder: Path) -> dict[str, dict[str, Program]]:
    """Return the programs of each side by task. Write an index of the text into the folder."""
    index, vectors = folder / "index", folder / "vectors.npy"
    write_index(model, text, index, vectors)
    theirs = (sys.executable, "-c")
    searched = Program((*theirs, SEARCH, model, str(text), str(vectors), QUERY))
    encode = (*COMMAND, "encode", "--model", model)
    encoded = Program((*theirs, ENCODE, model))
    search = (*COMMAND, "search", "--input", str(index), QUERY, "--mode")
    return {
        "import": {
            "ours": Program((*theirs, "import diffcse_jax")),
            "sentence_transformers": Program((*theirs, "import sentence_transformers")),
        },
        "first vector": {"ours": Program(encode, "text"), "sentence_transformers": encoded},
        "first vector, compiled": {"ours": Program(encode, "text", NOT_KEPT)},
        "first hits, dense": {
            "ours": Program((*search, "dense")),
            "sentence_transformers": searched,
        },
        "first hits, hybrid": {"ours": Program((*search, "hybrid"))},
    }


def _run(program: Program) -> tuple[float, float]:
    """Run a process and return its seconds, of processors and on the clock."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as text:
        text.write(program.text.encode())
        text.seek(0)
        process = subprocess.Popen(
            program.arguments,
            stdin=text,
            stdout=output,
            stderr=output,
            env={**os.environ, **program.environment},
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise RuntimeError(output.read().decode(errors="replace"))
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - start


def main() -> None:
    """Start the processes in turns, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=10_000, help="the first lines of the text")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    measured: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with tempfile.TemporaryDirectory() as name, options.text.open(encoding="utf-8") as lines:
        text = Path(name) / "text.txt"
        text.write_text("".join(line for line, _ in zip(lines, range(options.rows), strict=False)))
        tasks = programs(str(find_folder(options.model)), text, Path(name))
        for turn in range(options.turns + 1):
            for task, sides in tasks.items():
                for side, program in sides.items():
                    if not turn and side != "ours":
                        continue
                    taken = _run(program)
                    print(turn, task, side, *taken, file=sys.stderr, flush=True)
                    if turn:
                        measured.setdefault(task, {}).setdefault(side, []).append(taken)
    measure.write_record(
        options.output,
        "benchmarks.startup",
        sys.argv[1:],
        {"tasks": {task: _summary(sides) for task, sides in measured.items()}},
    )


def _summary(sides: Mapping[str, list[tuple[float, float]]]) -> dict[str, object]:
    """Return the times of each side, and theirs divided by ours."""
    record: dict[str, dict[str, dict[str, float]]] = {
        side: {
            name: measure.spread(seconds)
            for name, seconds in zip(("processor", "clock"), zip(*taken, strict=True), strict=True)
        }
        for side, taken in sides.items()
    }
    ours = record["ours"]
    ratios = {
        side: {name: times[name]["median"] / ours[name]["median"] for name in times}
        for side, times in record.items()
        if side != "ours"
    }
    return {**record, "ratios": ratios}


if __name__ == "__main__":
    main()
