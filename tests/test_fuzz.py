"""Readers of what anybody may have written: a result or a `UserError`, whatever the bytes.

Each reader ends in bounded time and memory.

`make fuzz` runs 2,000 new examples of each; the suite 20, the same every time.
"""

import gzip
import json
import lzma
import os
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from test_formats import HTML_PAGE, RST_PAGE, pdf
from tiny_model import HIDDEN, random_params, write_smallest_model

from diffcse_jax.config import Config, DataConfig
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import UserError
from diffcse_jax.evaluation import sts
from diffcse_jax.evaluation.runner import TASKS
from diffcse_jax.evaluation.senteval_data import LabelledColumns
from diffcse_jax.models import hf, poolers, sentence_folder
from diffcse_jax.models.heads import MlpProjector
from diffcse_jax.models.tokenizer import load_tokenizer, tokenise, unlimited_tokenizer
from diffcse_jax.run_folder.finding import find_run
from diffcse_jax.run_folder.start import read_config

EXAMPLES = int(os.environ.get("DIFFCSE_FUZZ_EXAMPLES", "0"))

fuzzed = settings(
    max_examples=EXAMPLES or 20,
    derandomize=not EXAMPLES,
    deadline=10_000,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module", autouse=True)
def bounded_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in kilobytes
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024


def result_or_user_error(read: Callable, *arguments, **options):
    """Return what a reader returns, or None if it raises an error for people."""
    try:
        return read(*arguments, **options)
    except UserError as error:
        message = str(error)
    assert 0 < len(message) < 20_000


# Values and bytes near to those that are meant, and others.
json_values = st.recursive(
    st.sampled_from(
        [None, False, True, 0, 1, -1, 2, 10**9, 10**400, float("nan"), float("inf"), 1e308]
    )
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(["", "bert", "gelu", "cls", "mean", "..", "/etc", "a" * 300, "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
spoiled_bytes = st.sampled_from(
    [b"\0", b"\xff", b"\n", b"\t", b'"', b"[" * 5000, b"{", b"}", b"1_0", b"\r", b"\x85", b"-"]
)


@st.composite
def spoiled(draw, original: bytes) -> bytes:
    """The bytes with a few places replaced, removed or repeated."""
    content = bytearray(original)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.sampled_from([0, 1, 1, 8, 1000])))
        content[start:end] = draw(
            spoiled_bytes | st.binary(max_size=4) | st.just(bytes(content[start:end]) * 2)
        )
    return bytes(content)


def places(document: dict | list) -> Iterator[tuple[dict | list, int | str]]:
    """Every place of a JSON document: a container and a key."""
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        yield document, key
        if isinstance(value, dict | list):
            yield from places(value)


@st.composite
def changed(draw, original: dict | list) -> object:
    """A JSON document in which a few values are other ones, or gone."""
    document = json.loads(json.dumps(original))
    for _ in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from([*places(document)] or [([None], 0)]))
        if draw(st.integers(0, 3)):
            container[key] = draw(json_values)
        else:
            del container[key]
    return draw(json_values) if draw(st.integers(0, 30)) == 0 else document


def write(path: Path, content: bytes | object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, bytes):
        content = json.dumps(content).encode(errors="surrogatepass")
    path.write_bytes(content)
    return path


ROWS = [{"sentence": "a", "positive": "b"}, {"sentence": "\u00e9", "positive": "d"}]
CORPORA = {
    ".txt": b"one sentence\nand another\n\n\xc3\xa9t\xc3\xa9\n",
    ".csv": b'sent0,sent1\na,"b ""c"" d"\n"two\nlines",e\n',
    ".tsv": b"sentence\na b\nc d\n",
    ".jsonl": "\n".join(map(json.dumps, ROWS)).encode(),
    ".json": json.dumps(ROWS, indent=1).encode(),
    ".parquet": pd.DataFrame(ROWS).to_parquet(),
}
MARKDOWN = b"""---
title: "One"
---
# A `<b>` [c](d "e") ![f](g)

It is *here*, <https://example.org>. And [there][1] &amp; {% x %} it is.

[1]: <a b>
::: note
> [!NOTE] 1. - [x] two
| a | b |
~~~
<div>all of it is here</div>
"""
DOCUMENTS = {
    ".md": MARKDOWN,
    ".html": HTML_PAGE,
    ".rst": RST_PAGE,
    ".pdf": pdf(["A page. It has two sentences."]),
}


@pytest.mark.parametrize("extension", [*CORPORA, *DOCUMENTS])
@fuzzed
@given(data=st.data())
def test_corpora(tmp_path, extension, data):
    content = data.draw(spoiled((CORPORA | DOCUMENTS)[extension]) | st.binary(max_size=200))
    compression = data.draw(st.sampled_from(["", "", ".gz", ".xz"])) if extension in CORPORA else ""
    if compression:
        content = (
            gzip.compress(content) if compression == ".gz" else lzma.compress(content, preset=0)
        )
        content = data.draw(st.just(content) | spoiled(content))
    path = write(tmp_path / f"a{extension}{compression}", content)
    options = {"on_bad_line": data.draw(st.sampled_from(["skip", "error"]))}
    options |= {"pairs": "lead"} if extension in DOCUMENTS else {}
    rows = result_or_user_error(
        lambda: [
            row.texts for row in open_corpus(DataConfig(train_file=str(path), **options)).rows()
        ]
    )
    for row in rows or []:
        assert all(text.strip() and text.encode() for text in row)
        assert extension in DOCUMENTS or row == tuple(text.strip() for text in row)


RATED = {
    "STSBenchmark": b"m\tf\ty\t1\t5.000\ta dog\ta cat\nm\tf\ty\t2\t0.5\tb\tc\td\nm\tf\ty\t3\t4.2\te\tf\n",
    "CR": b"good film\ncaf\xe9\n\n",
    "SST2": b"a film\t1\nbad\t0\n",
    "TREC": b"NUM:dist How far ?\nABBR:exp What ?\n",
    "MRPC": b"Quality\tid\tid\ts\ts\n1\t7\t8\ta\tb\n0\t7\t8\tc\td\n",
}


@pytest.mark.parametrize("task", RATED)
@fuzzed
@given(data=st.data())
def test_evaluation_data(tmp_path, task, data):
    path = write(
        tmp_path / "custrev.pos", data.draw(spoiled(RATED[task]) | st.binary(max_size=100))
    )
    files = next(iter(TASKS[task].splits.values()))  # of a split
    result_or_user_error(TASKS[task].read, *[path] * len(files))


@fuzzed
@given(data=st.data())
def test_pairs_with_scores(tmp_path, data):
    sentences = write(tmp_path / "a.txt", data.draw(spoiled(b"a\tb\nc\td\n")))
    golds = write(tmp_path / "b.txt", data.draw(spoiled(b"1\n\n3.5\n")))
    pairs = result_or_user_error(sts.read_parallel_pairs, sentences, golds)
    assert pairs is None or all(0 <= gold <= 5 for gold in pairs.gold)
    table = write(tmp_path / "pairs.tsv", data.draw(spoiled(b"a dog\ta cat\t3.5\nb c\td\t0\n")))
    pairs = result_or_user_error(
        sts.read_pairs, table, LabelledColumns(2, (0, 1), labels=(-1e9, 1e9))
    )
    assert pairs is None or np.isfinite(pairs.gold).all()


@fuzzed
@given(data=st.data())
def test_configurations(tmp_path, data):
    document = data.draw(changed(Config().to_dict()))
    config = result_or_user_error(
        Config.from_dict, document if isinstance(document, dict) else {"model": document}
    )
    assert config is None or Config.from_dict(config.to_dict()) == config
    write(
        tmp_path / "run/config.json",
        data.draw(st.just(document) | spoiled(json.dumps(document).encode())),
    )
    (tmp_path / "run/checkpoints").mkdir(exist_ok=True)
    result_or_user_error(find_run, tmp_path / "run")
    result_or_user_error(read_config, tmp_path / "run")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A sentence-transformers folder with the fewest bytes."""
    folder = tmp_path_factory.mktemp("model")
    write_smallest_model(folder, ["a", "b", "##c", "dog"])
    head = random_params(MlpProjector, hf.read(str(folder)).config)
    sentence_folder.write(
        folder, sentence_folder.RecordedPooler("cls", head, 8), num_blocks=1, hidden_size=HIDDEN
    )
    return folder


def pooler_of(folder: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        pooler = SentenceEncoder.from_pretrained(folder).pooler
    # A layer with another activation than BERT's own is applied after the pooling.
    assert poolers.is_pooler(pooler.removesuffix(" + Dense"))


def tokens_of(folder: Path) -> None:
    backend = unlimited_tokenizer(load_tokenizer(folder))
    backend.enable_truncation(8)
    tokenise(backend, ["a dog", ""])


READERS = {
    "config.json": hf.read,
    "model.safetensors": hf.read,
    "model.safetensors.index.json": hf.read,
    "modules.json": pooler_of,
    "config_sentence_transformers.json": pooler_of,
    "1_Pooling/config.json": pooler_of,
    "2_Dense/config.json": pooler_of,
    "2_Dense/model.safetensors": pooler_of,
    "tokenizer.json": tokens_of,
    "tokenizer_config.json": tokens_of,
}


@pytest.mark.parametrize("name", READERS)
@fuzzed
@given(data=st.data())
def test_files_of_models(model, tmp_path, name, data):
    folder = tmp_path / "model"
    shutil.rmtree(folder, ignore_errors=True)
    path = shutil.copytree(model, folder) / name
    if name.endswith("index.json"):
        names = list(load_file(folder / "model.safetensors"))[:3]
        write(path, {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")})
    content = path.read_bytes()
    other = (
        spoiled(content) | changed(json.loads(content))
        if path.suffix == ".json"
        else spoiled(content)
    )
    write(path, data.draw(other))
    result_or_user_error(READERS[name], str(folder) if READERS[name] is hf.read else folder)
