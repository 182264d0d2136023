"""Recorded behaviour: short runs, token stores, embeddings, keys and exported folders.

The recorded values are in `tests/golden/*.json`. To record them again after a deliberate change,
run

    RECORD_GOLDEN=1 python -m pytest tests/test_golden.py

and explain the differences in the commit message. Recording happens inside pytest because
`conftest.py` changes how XLA compiles, which changes the last digits.
"""

import dataclasses
import gzip
import hashlib
import importlib.util
import json
import lzma
import math
import os
import runpy
import shutil
import sys
import sysconfig
import typing
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import tensorflow_datasets as tfds
import transformers

from diffcse_jax import Callback, Config, SentenceEncoder, train

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).with_name("golden")
# Relative and absolute tolerance. Another CPU or JAX sums float32 numbers in another order, which
# changes metrics by less than this: values recorded under the XLA flags of `conftest.py` also pass
# under XLA's defaults.
TOLERANCE = (1e-4, 1e-6)
# Adam divides each gradient by its own size, so it amplifies the rounding of small gradients.
TOLERANCE_OF = {
    "change_norms": (1e-3, 0.0),
    "change_directions": (0.0, 1e-3),
    "embedding": (1e-3, 1e-4),
}


def token_store(model: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Summarise the token store of a source of text.

    This is the only function that knows internal names. A whole run for each source would take
    minutes.
    """
    from diffcse_jax.data.pairs import stored_length
    from diffcse_jax.data.sources import open_corpus
    from diffcse_jax.data.token_store import build_or_open

    data = Config.from_dict(settings).data
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    store = build_or_open(open_corpus(data), tokenizer, stored_length(data), data.cache_dir)
    # Sentences and passages follow one another. Pairs and crops only share a document.
    starts = np.flatnonzero(~store.follows)
    if data.pairs in ("lead", "crops"):
        starts = np.flatnonzero(np.diff(store.documents, prepend=-1))
    return {
        "columns": store.columns,
        "rows": len(store),
        "token_ids": hashlib.sha256(np.asarray(store.token_ids, "<u4").tobytes()).hexdigest(),
        "offsets": hashlib.sha256(np.asarray(store.offsets, "<i8").tobytes()).hexdigest(),
        "document_starts": starts.tolist() if data.reads_documents else None,
    }


# Recording and comparing.


def check(file: str, found: Mapping[str, Any]) -> None:
    """Compare values with the recorded ones, or record them."""
    path = GOLDEN / f"{file}.json"
    recorded = json.loads(path.read_text()) if path.exists() else {}
    found = json.loads(json.dumps(rounded(found)))
    if os.environ.get("RECORD_GOLDEN"):
        path.write_text(as_lines({**recorded, **found}) + "\n")
        return
    different = list(
        differences({name: recorded.get(name) for name in found}, found, file, TOLERANCE)
    )
    if different:
        shown = "\n".join(different[:20])
        pytest.fail(
            f"{len(different)} values differ from {path.relative_to(ROOT)}:\n{shown}\nIf this change is intended, "
            "record again: RECORD_GOLDEN=1 python -m pytest tests/test_golden.py",
            pytrace=False,
        )


def as_lines(value: Any, depth: int = 0) -> str:
    """Write JSON with a line for each entry of the two outer levels."""
    if depth == 2 or not isinstance(value, dict):
        return json.dumps(value, sort_keys=True)
    entries = (f"{json.dumps(name)}: {as_lines(value[name], depth + 1)}" for name in sorted(value))
    return "{\n" + ",\n".join(entries) + "\n}"


def rounded(value: Any) -> Any:
    """Round every float to seven significant digits."""
    if isinstance(value, float | np.floating):
        return float(f"{value:.7g}")
    if isinstance(value, Mapping):
        return {str(name): rounded(each) for name, each in value.items()}
    return (
        [rounded(each) for each in value] if isinstance(value, list | tuple | np.ndarray) else value
    )


def differences(
    recorded: Any, found: Any, place: str, tolerance: tuple[float, float]
) -> Iterator[str]:
    """Yield one line for each difference."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        for name in sorted({**recorded, **found}):
            pair = recorded.get(name, "nothing"), found.get(name, "nothing")
            yield from differences(*pair, f"{place} > {name}", TOLERANCE_OF.get(name, tolerance))
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for index, pair in enumerate(zip(recorded, found, strict=True)):
            yield from differences(*pair, f"{place}[{index}]", tolerance)
    elif isinstance(recorded, float) and isinstance(found, float):
        if not math.isclose(recorded, found, rel_tol=tolerance[0], abs_tol=tolerance[1]):
            yield f"{place}: recorded {recorded}, now {found}"
    elif recorded != found:
        yield f"{place}: recorded {str(recorded)[:200]}, now {str(found)[:200]}"


# Models, text and other fixtures.


def write_model(
    folder: Path, tokenizer_from: Path, family: str = "bert", seed: int = 0, blocks: int = 1
) -> Path:
    """Write a small checkpoint whose weights depend only on the names of the tensors and the seed."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": blocks,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    if family == "distilbert":
        sizes = {"dim": 32, "n_layers": blocks, "n_heads": 2, "hidden_dim": 64}
    sizes |= {"vocab_size": 30522, "max_position_embeddings": 130}
    padding = 0 if family in ("bert", "distilbert") else 1
    config = transformers.AutoConfig.for_model(family, pad_token_id=padding, **sizes)
    kind = (
        transformers.AutoModelForPreTraining
        if family == "bert"
        else transformers.AutoModelForMaskedLM
    )
    network = kind.from_config(config)
    for name, tensor in network.named_parameters():  # a tied tensor once
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        values = rng.normal(name.lower().endswith("norm.weight"), 0.2, tuple(tensor.shape))
        tensor.data.copy_(tensor.new_tensor(values))
    network.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(tokenizer_from / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory, minilm_dir) -> Path:
    pytest.importorskip("torch")
    return write_model(tmp_path_factory.mktemp("model"), minilm_dir)


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    """Hide from the package what only some machines have: data sets, caches and optional packages."""
    monkeypatch.delenv("DIFFCSE_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    find_spec = importlib.util.find_spec

    def hidden(name, package=None):
        caller = sys._getframe(1).f_globals["__name__"]
        return None if caller.startswith("diffcse_jax.") else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", hidden)


WORDS = (
    "river",
    "stone",
    "market",
    "garden",
    "window",
    "letter",
    "winter",
    "harbour",
    "engine",
    "painter",
)


def sentence(number: int) -> str:
    first, second, third = (WORDS[place % 10] for place in (number, 3 * number + 1, 7 * number + 2))
    return f"The {first} near the {second} changed its colour {number} times before the {third} closed."


SENTENCES = [sentence(number) for number in range(40)]
DOCUMENTS = [
    {
        "title": f"Notes on the {WORDS[d % 10]} of {d}",
        "text": " ".join(map(sentence, range(100 + 7 * d, 107 + 7 * d))),
    }
    for d in range(20)
]
PAIRS = [
    {"sentence": sentence(2 * i), "positive": sentence(2 * i + 1), "hard_negative": sentence(i)}
    for i in range(20)
]


class Prepared(tfds.core.GeneratorBasedBuilder):
    """Pairs as an ArrayRecord data set."""

    VERSION = tfds.core.Version("1.0.0")
    code_path = None

    def _info(self):
        features = tfds.features.FeaturesDict(dict.fromkeys(PAIRS[0], tfds.features.Text()))
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield from enumerate(PAIRS)


def write_sources(folder: Path) -> dict[str, dict[str, Any]]:
    """Write text in every kind of file, and return the settings that read it, by name."""
    lines = "".join(f"{text}\n" for text in SENTENCES)
    jsonl = "".join(json.dumps(row) + "\n" for row in PAIRS)
    documents = "".join(json.dumps(document) + "\n" for document in DOCUMENTS)
    sections = "".join(
        f"# {each['title']}\n\n{each['text']} See [it](a.html).\n\n- *item*\n\n"
        for each in DOCUMENTS
    )
    function = 'def f{0}():\n    """Return the colour of the {1}.\n\n    {2} {3}\n    """\n\n\n'
    module = "".join(
        function.format(i, WORDS[i % 10], sentence(i), sentence(i + 50)) for i in range(60)
    )
    table = {
        sep: "\n".join(sep.join(row) for row in (PAIRS[0], *(row.values() for row in PAIRS)))
        for sep in ",\t"
    }
    contents = {
        "a.txt": lines.encode(), "bad.txt": b"\n \nnot \xff UTF-8\nnul \0\n" + lines.encode(),
        "a.csv": table[","].encode(), "a.tsv": table["\t"].encode(), "a.jsonl": jsonl.encode(),
        "a.json": json.dumps(PAIRS).encode(), "a.txt.gz": gzip.compress(lines.encode()),
        "a.jsonl.xz": lzma.compress(jsonl.encode()), "d.jsonl": documents.encode(),
        "d.txt": "\n\n".join(each["text"] for each in DOCUMENTS).encode(), "d.md": sections.encode(),
        "blank.txt": "\n".join([*SENTENCES[:9], "", *SENTENCES[9:]]).encode(),
        "many/a/b.txt": DOCUMENTS[0]["text"].encode(), "many/c.txt": DOCUMENTS[1]["text"].encode(),
        "many/d.md": sections.encode(), "shards/1.txt": lines.encode(), "shards/2.txt": lines.upper().encode(),
        "code/module.py": module.encode(),
    }  # fmt: skip
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    pq.write_table(pa.Table.from_pylist(PAIRS), folder / "a.parquet")
    Prepared(data_dir=str(folder / "records"), file_format="array_record").download_and_prepare(
        download_config=tfds.download.DownloadConfig(try_download_gcs=False)
    )
    plain = (
        "a.txt",
        "bad.txt",
        "a.csv",
        "a.tsv",
        "a.jsonl",
        "a.json",
        "a.parquet",
        "a.txt.gz",
        "a.jsonl.xz",
        "shards",
    )
    found = {name: {"train_file": name} for name in (*plain, "records")}
    for pairs in ("dropout", "lead", "neighbours", "passages", "crops"):
        found |= {
            f"{name} {pairs}": {"train_file": name, "pairs": pairs, "max_length": 60}
            for name in ("d.jsonl", "d.txt", "d.md", "many")
        }
    found["blank.txt"] = {"train_file": "blank.txt", "pairs": "neighbours"}
    found["chosen columns"] = {"train_file": "a.csv", "columns": ("hard_negative", "sentence")}
    found["held out"] = {"train_file": "d.jsonl", "pairs": "lead", "held_out": 0.3}
    found |= {
        f"docstrings {pairs}": {"train_file": "docstrings", "pairs": pairs}
        for pairs in ("columns", "lead")
    }
    return found


# The tests.


def test_token_stores(tmp_path, model, monkeypatch):
    found = {}
    sources = write_sources(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "code")})
    empty_caches()
    for name, data in sources.items():
        settings = {"data": {"max_length": 16, "cache_dir": str(tmp_path / "stores"), **data}}
        found[name] = token_store(model, settings)
    empty_caches()
    check("token_stores", {"sources": found})


def empty_caches() -> None:
    """Empty every `functools.cache` of the package: one of them keeps the docstrings that were read before."""
    for name, module in [*sys.modules.items()]:
        for value in vars(module).values() if name.startswith("diffcse_jax") else ():
            getattr(value, "cache_clear", lambda: None)()


class StopsAt(Callback):
    """Keep the metrics of two steps, then end the run before it is evaluated and exported."""

    def __init__(self):
        self.rows = []

    def on_step(self, step, metrics):
        self.rows.append({"step": step, **comparable(metrics)})
        if step == 2:
            raise ZeroDivisionError


def comparable(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if "per_second" not in name}


def short_run(model: Path, folder: Path) -> dict[str, Any]:
    return {
        "model.name_or_path": str(model), "data.max_length": 16, "data.cache_dir": str(folder / "stores"),
        "train.batch_size": 4, "train.steps": 6, "train.log_every": 1, "train.packing": "off", "train.recompute": "off",
        "optim.learning_rate": 1e-3, "eval.metric": "halves_retrieval", "eval.every": 0, "mesh.data": 1,
        "precision": "float32",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["strings", "tuples", "crops"])
def test_text_in_memory_and_batches(tmp_path, model, kind):
    """Text in memory becomes a file, which the configuration of the run names. Losses depend on the batches."""
    text: Any = {"strings": SENTENCES, "tuples": [tuple(row.values()) for row in PAIRS]}.get(
        kind, DOCUMENTS
    )
    run, stop = tmp_path / "run", StopsAt()
    pairs = {"data.pairs": kind if text is DOCUMENTS else "columns"}
    settings = {"model.projector": "none", "model.pooler": "avg", "difference.weight": 0.0, **pairs}
    with pytest.raises(ZeroDivisionError):
        train(text, short_run(model, tmp_path) | settings, workdir=run, callbacks=[stop])
    file = json.loads((run / "config.json").read_text())["data"]["train_file"]
    store = token_store(model, {"data.train_file": file, **pairs})
    check("token_stores", {f"in memory, {kind}": {"store": store, "metrics": stop.rows}})


PRESETS: dict[str, dict[str, Any]] = {
    "diffcse_minilm": {"generator.head_steps": 3, "generator.head_batch_size": 4},
    "simcsepp_base": {"model.projector_train_only": False},
    "adapt": {
        "eval.metric": "lead_retrieval", "eval.keep_start": False, "train.chunk_size": 2, "train.packing": "on",
        "train.recompute": "on", "data.held_out": 0.3,
    },
    "rankcse_base": {"model.pooler": "avg_first_last", "model.projector": "none", "train.packing": "on"},
    "infocse_base": {"reconstruction.layer": 1, "reconstruction.blocks": 1},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_short_runs_and_their_exports(tmp_path, model, minilm_dir, preset):
    overrides = short_run(model, tmp_path) | PRESETS[preset]
    if preset == "rankcse_base":
        teachers = (
            write_model(tmp_path / f"teacher{seed}", minilm_dir, seed=seed) for seed in (1, 2)
        )
        overrides["distillation.teachers"] = tuple(map(str, teachers))
    text = DOCUMENTS if preset == "adapt" else SENTENCES
    trained = train(text, preset, workdir=tmp_path / "run", overrides=overrides)
    export = trained.workdir / "export"
    before = safetensors.numpy.load_file(model / "model.safetensors")
    after = safetensors.numpy.load_file(export / "model.safetensors")
    # Some gradients are zero but for rounding, which Adam turns into steps: attention ignores the
    # bias of its keys, and the batch norm of DiffCSE's projector subtracts the last bias before it.
    has_batch_norm = preset in ("diffcse_minilm", "infocse_base")
    without = ("key.bias", *["encoder.layer.0.output.LayerNorm.bias"] * has_batch_norm)
    names = [name for name in after if not name.endswith(without)]
    changes = {name: after[name] - before.get(f"bert.{name}", 0) for name in names}
    norms = {name: np.linalg.norm(change) for name, change in changes.items()}
    found = {
        "metrics": [*map(comparable, trained.history)],
        "embedding": SentenceEncoder.from_pretrained(trained.workdir).encode(SENTENCES[:2])[:, :5],
        "change_norms": norms,
        "change_directions": {
            name: changes[name].sum() / max(norm, 1e-30) / changes[name].size ** 0.5
            for name, norm in norms.items()
        },
    }
    check("runs", {preset: found})
    files = sorted(
        file.relative_to(export).as_posix() for file in export.rglob("*") if file.is_file()
    )
    contents = {
        name: {
            key: value
            for key, value in entries(export / name)
            if (key, value) not in entries(model / name)
        }
        for name in files
        if name.endswith(".json") and name not in ("tokenizer.json", "export_check.json")
    }
    tensors = {name: [*after[name].shape, np.linalg.norm(after[name])] for name in names}
    check("exports", {preset: {"files": files, "contents": contents, "tensors": tensors}})


def entries(file: Path) -> list[tuple[str, Any]]:
    """Return the entries of a JSON object or list."""
    content = json.loads(file.read_text()) if file.exists() else {}
    return (
        [*content.items()]
        if isinstance(content, dict)
        else [(str(i), each) for i, each in enumerate(content)]
    )


FAMILIES = ("bert", "camembert", "distilbert", "mpnet", "roberta", "xlm-roberta")
POOLERS = ("cls", "cls_before_pooler", "avg_top2", "avg_first_last", "avg_first_block_last")


@pytest.mark.slow
def test_embeddings(tmp_path, minilm_dir):
    folders = {
        f"{family}, avg": write_model(tmp_path / family, minilm_dir, family, blocks=2)
        for family in FAMILIES
    }
    folders |= {f"bert, {pooler}": tmp_path / "bert" for pooler in POOLERS}
    found = {
        name: SentenceEncoder.from_pretrained(folder, pooler=name.split(", ")[1]).encode(
            SENTENCES[:2]
        )[:, :5]
        for name, folder in folders.items()
    }
    check("embeddings", {"first numbers of two sentences": found})


def keys_of(group: type, default: Any, prefix: str = "") -> dict[str, tuple[str, Any]]:
    """Return every dotted key with its type and default."""
    types, keys = typing.get_type_hints(group), {}
    for field in dataclasses.fields(group):
        kind, value = types[field.name], getattr(default, field.name)
        if field.name == "installed":  # losses of other packages; not a key
            continue
        if dataclasses.is_dataclass(kind):
            keys |= keys_of(kind, value, f"{prefix}{field.name}.")
        else:
            name = kind.__name__ if type(kind) is type else str(kind)
            keys[prefix + field.name] = ("table" if isinstance(value, Mapping) else name, value)
    return keys


def values_of(config: Any) -> dict[str, Any]:
    """Return the value of every dotted key; a table becomes a dict of dicts."""
    values = {key: value for key, (_, value) in keys_of(Config, Config.from_dict(config)).items()}
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    return values | {
        key: {name: vars(group) for name, group in value.items()} for key, value in tables.items()
    }


def changed(values: Mapping[str, Any], from_values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value != from_values[key]}


def test_configuration():
    defaults, shipped = values_of({}), {}
    files = sorted((ROOT / "configs").rglob("*.py"))
    functions = {
        file.relative_to(ROOT / "configs").with_suffix("").as_posix(): runpy.run_path(str(file))
        for file in files
    }
    for name, defined in functions.items():
        if "get_config" in defined:
            shipped[name] = changed(values_of(defined["get_config"]().to_dict()), defaults)
            continue
        study = defined["get_study"]()
        base = functions[study.base]["get_config"]() if isinstance(study.base, str) else study.base
        base_values = values_of(base.to_dict())
        shipped[name] = {
            field.name: getattr(study, field.name) for field in dataclasses.fields(study)
        }
        shipped[name]["base"] = changed(base_values, defaults)
        shipped[name]["variants"] = {
            variant: changed(values_of({**base.to_dict(), **settings}), base_values)
            for variant, settings in study.variants.items()
        }
        del shipped[name]["published"], shipped[name]["source"]
    relative = json.loads(json.dumps(rounded(shipped)).replace(f"{ROOT}/", ""))
    check("configuration", {"keys": keys_of(Config, Config()), "shipped": relative})
