import errno
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file
from tiny_model import write_tiny_model

from diffcse_jax import SentenceEncoder, cli
from diffcse_jax.apps import embed as app
from diffcse_jax.errors import DataError, InUseError
from diffcse_jax.search.vector_store import find_store


@pytest.fixture
def shards(tmp_path) -> dict[str, list[str]]:
    """Four files of different sizes; their sentences by name."""
    files = {
        f"shard-{index}.txt": [f"sentence {row} of file {index}" for row in range(rows)]
        for index, rows in enumerate((7, 25, 1, 12))
    }
    (tmp_path / "shards").mkdir()
    for name, sentences in files.items():
        (tmp_path / "shards" / name).write_text("\n".join(sentences) + "\n")
    return files


@pytest.fixture
def model(tmp_path, minilm_dir) -> str:
    return str(write_tiny_model(tmp_path / "model", minilm_dir))


def arguments(tmp_path, model, **changed):
    options = {
        "model": model,
        "input": f"{tmp_path}/shards/shard-*",
        "output": str(tmp_path / "out"),
        "pooler": "avg",
        "rows_per_file": "10",
    } | changed
    return [text for name, value in options.items() for text in (f"--{name}", value)]


def read(output: Path) -> dict[str, list[dict]]:
    """Rows by input file, from all its output files in order."""
    rows = {}
    for path in sorted(output.glob("*.parquet")):
        rows.setdefault(path.name.rsplit(".", 2)[0], []).extend(pq.read_table(path).to_pylist())
    return rows


def check(output: Path, shards: dict[str, list[str]], model: str) -> None:
    """Every sentence is there once, under its line, with its vector."""
    rows = read(output)
    assert {name: [row["sentence"] for row in found] for name, found in rows.items()} == shards
    encoder = SentenceEncoder.from_pretrained(model, pooler="avg")
    for name, sentences in shards.items():
        assert [row["line"] for row in rows[name]] == list(range(1, len(sentences) + 1))
        vectors = np.array([row["embedding"] for row in rows[name]], np.float32)
        np.testing.assert_allclose(vectors, encoder.encode(sentences), atol=1e-5)


def test_every_sentence_is_embedded_once(tmp_path, shards, model, capsys):
    cli.main(["embed", *arguments(tmp_path, model)])
    check(tmp_path / "out", shards, model)
    assert "process 0 of 1: 45 sentences of 4 files embedded" in capsys.readouterr().err
    assert len(list((tmp_path / "out").glob("shard-1.txt.*.parquet"))) == 3
    cli.main(["embed", *arguments(tmp_path, model)])
    assert "process 0 of 1: 0 sentences" in capsys.readouterr().err


def test_processes_share_the_files(tmp_path, shards, model, monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
    done = []  # files, where a process waits for the others
    monkeypatch.setattr(app.hosts, "wait_for_all", lambda: done.append(len(read(tmp_path / "out"))))
    for index in range(3):
        monkeypatch.setenv("JAX_PROCESS_ID", str(index))
        cli.main(["embed", *arguments(tmp_path, model)])
    assert done == [2, 3, 4]
    check(tmp_path / "out", shards, model)


def test_lines_without_a_sentence_keep_the_numbers_right(tmp_path, model, capsys):
    (tmp_path / "shards").mkdir()
    with gzip.open(tmp_path / "shards/shard-0.txt.gz", "wb") as file:
        file.write(b"one\n\n\xff\xfe\nfour\n")
    cli.main(["embed", *arguments(tmp_path, model, dtype="float16", truncate_dim="5")])
    assert "shard-0.txt.gz: skipped 2 lines: 1 empty, 1 not UTF-8" in capsys.readouterr().err
    (rows,) = read(tmp_path / "out").values()
    assert [(row["line"], row["sentence"]) for row in rows] == [(1, "one"), (4, "four")]
    schema = pq.read_schema(next((tmp_path / "out").glob("*.parquet")))
    assert str(schema.field("embedding").type) == "fixed_size_list<element: halffloat>[5]"


def test_a_folder_holds_nothing_but_its_files(tmp_path, shards, model):
    """Polars and Hugging Face's data sets take whatever is there; each file tells who wrote it."""
    cli.main(["embed", *arguments(tmp_path, model), "--normalize"])
    out = tmp_path / "out"
    assert {path.suffix for path in out.iterdir()} == {".parquet"}
    assert pyarrow.dataset.dataset(out).count_rows() == 45
    store = find_store(str(out))
    assert store.record() == SentenceEncoder.from_pretrained(model, pooler="avg").record()
    lengths = np.concatenate([np.linalg.norm(vectors, axis=1) for _, vectors in store.blocks()])
    np.testing.assert_allclose(lengths, np.ones(45), rtol=1e-6)


def test_named_columns_and_ids_are_kept(tmp_path, model, capsys):
    (tmp_path / "shards").mkdir()
    lines = [{"key": 7, "title": "one", "body": "two", "n": 1}, {"key": "b", "title": "three", "body": "four", "n": 2}]
    file = tmp_path / "shards/shard-0.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SystemExit):
        cli.main(["embed", *arguments(tmp_path, model)])
    assert "name one or more of its 4 columns in --columns: key, title, body, n" in capsys.readouterr().err
    wanted = ["--columns", "title", "body", "--id_column", "key"]
    cli.main(["embed", *arguments(tmp_path, model, output=f"{tmp_path}/named"), *wanted])
    rows = pyarrow.dataset.dataset(tmp_path / "named").to_table().drop_columns("embedding").to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        (1, "7", "title", "one"), (1, "7", "body", "two"), (2, "b", "title", "three"), (2, "b", "body", "four")
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        cli.main(["embed", *arguments(tmp_path, model, output=f"{tmp_path}/named"), *wanted[:2]])
    assert "columns: ['title', 'body'] then, ['title'] now; id_column: 'key' then, '' now" in capsys.readouterr().err


def test_other_settings_are_refused(tmp_path, shards, model, capsys):
    cli.main(["embed", *arguments(tmp_path, model)])
    assert json.loads((tmp_path / "out.state/settings.json").read_text())["pooler"] == "avg"
    with pytest.raises(SystemExit) as stopped:
        cli.main(["embed", *arguments(tmp_path, model, pooler="cls_before_pooler")])
    assert stopped.value.code == 2
    assert "pooler avg there, cls_before_pooler here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["embed", *arguments(tmp_path, model, dtype="float16")])
    assert "begun with other settings: dtype: 'float32' then, 'float16' now. Use the earlier" in capsys.readouterr().err


def test_inputs_that_cannot_be_told_apart_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"nothing matches .*none-\*"):
        app.find_inputs([f"{tmp_path}/none-*"])
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.txt").write_text("x\n")
    with pytest.raises(DataError, match="have the same name"):
        app.find_inputs([f"{tmp_path}/*/same.txt"])
    assert app.find_inputs([f"{tmp_path}/a/*", f"{tmp_path}/a/same.txt"]) == [f"{tmp_path}/a/same.txt"]


def test_a_file_whose_name_is_a_pattern_is_that_file(tmp_path):
    for name in ("data1.txt", "data[1].txt"):
        (tmp_path / name).write_text("x\n")
        assert app.find_inputs([f"{tmp_path}/data[1].txt"]) == [f"{tmp_path}/{name}"]


def test_files_without_a_sentence_stop_nothing(tmp_path, shards, model, capsys):
    (tmp_path / "shards/shard-0.txt").write_bytes(b"")
    (tmp_path / "shards/shard-00.txt").write_bytes(b"\n\xff\n \n")
    (tmp_path / "shards/shard-000.jsonl").write_bytes(b"")
    for _ in range(2):
        cli.main(["embed", *arguments(tmp_path, model)])
        assert {name: len(rows) for name, rows in read(tmp_path / "out").items()} == {
            "shard-1.txt": 25, "shard-2.txt": 1, "shard-3.txt": 12
        }  # fmt: skip
    err = capsys.readouterr().err
    note = "shard-00.txt: no usable line (skipped 3 lines: 2 empty, 1 not UTF-8)"
    assert err.count(note) == 1  # the second time it is complete and not read again
    assert "process 0 of 1: 38 sentences of 6 files embedded" in err


def test_an_edit_that_keeps_the_size_is_refused(tmp_path, shards, model, capsys):
    cli.main(["embed", *arguments(tmp_path, model)])
    file = tmp_path / "shards/shard-1.txt"
    text = file.read_text()
    file.write_text(text.replace("sentence 7", "sentence 8"))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["embed", *arguments(tmp_path, model)])
    assert stopped.value.code == 2
    assert "shard-1.txt is not the text that" in (err := capsys.readouterr().err)
    assert "its SHA-256 has changed. Give another --output, or remove" in err
    file.write_text(text)
    cli.main(["embed", *arguments(tmp_path, model)])


def test_a_model_that_was_trained_on_is_refused(tmp_path, shards, model, capsys):
    """The path says nothing about the weights: a run's best checkpoint changes."""
    cli.main(["embed", *arguments(tmp_path, model)])
    file = Path(model) / "model.safetensors"
    tensors = load_file(file)
    tensors["embeddings.LayerNorm.bias"] = tensors["embeddings.LayerNorm.bias"] + 1
    save_file(tensors, file)
    with pytest.raises(SystemExit):
        cli.main(["embed", *arguments(tmp_path, model)])
    assert f"holds embeddings of {model}, but the encoder is {model}: their weights differ" in capsys.readouterr().err


def test_computation_in_bfloat16_is_near_float32(tmp_path, shards, model):
    cli.main(["embed", *arguments(tmp_path, model)])
    cli.main(["embed", *arguments(tmp_path, model, precision="bfloat16", output=str(tmp_path / "half"))])
    exact, half = (
        np.array([row["embedding"] for rows in read(tmp_path / name).values() for row in rows])
        for name in ("out", "half")
    )
    assert 0 < np.abs(exact - half).max() < 0.05


def test_vectors_that_were_removed_are_made_again(tmp_path, shards, model, capsys):
    cli.main(["embed", *arguments(tmp_path, model)])
    shutil.rmtree(tmp_path / "out")
    cli.main(["embed", *arguments(tmp_path, model)])
    next((tmp_path / "out").glob("shard-3*.parquet")).unlink()
    cli.main(["embed", *arguments(tmp_path, model)])
    check(tmp_path / "out", shards, model)


def test_damaged_state_files_are_named(tmp_path, shards, model, capsys):
    cli.main(["embed", *arguments(tmp_path, model)])
    for name in ("settings.json", "inputs/shard-1.txt.json"):
        path = tmp_path / "out.state" / name
        path.write_text("{")
        with pytest.raises(SystemExit):
            cli.main(["embed", *arguments(tmp_path, model)])
        assert f"{name} is not valid JSON" in (err := capsys.readouterr().err)
        assert "Remove that file and run the same command again" in err
        path.unlink()
        cli.main(["embed", *arguments(tmp_path, model)])
        check(tmp_path / "out", shards, model)


def test_settings_are_read_from_the_files_if_the_state_is_gone(tmp_path, shards, model, capsys):
    cli.main(["embed", *arguments(tmp_path, model)])
    shutil.rmtree(tmp_path / "out.state")
    cli.main(["embed", *arguments(tmp_path, model)[:-2]])  # without --rows_per_file
    check(tmp_path / "out", shards, model)
    with pytest.raises(SystemExit):
        cli.main(["embed", *arguments(tmp_path, model, rows_per_file="7")])
    assert "rows_per_file: 10 then, 7 now" in capsys.readouterr().err


def test_a_full_disk_loses_nothing(tmp_path, shards, model, monkeypatch, capsys):
    def write_table(table, path, **options):
        if "shard-3" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(table, path, **options)

    write = pq.write_table
    with monkeypatch.context() as full_disk:
        full_disk.setattr(pq, "write_table", write_table)
        with pytest.raises(SystemExit):
            cli.main(["embed", *arguments(tmp_path, model)])
    assert "No space left on device. Complete Parquet files are kept. Please make room" in capsys.readouterr().err
    cli.main(["embed", *arguments(tmp_path, model)])
    assert "process 0 of 1: 12 sentences of 4 files embedded" in capsys.readouterr().err
    check(tmp_path / "out", shards, model)


def test_a_second_process_on_the_same_files_is_refused(tmp_path, shards, model, monkeypatch):
    """It used to remove the first one's partial file."""
    encode, out = SentenceEncoder.encode, tmp_path / "out"
    options = {"rows_per_file": 10, "batch_size": 8, "dtype": "float32"}
    encoder, inputs = SentenceEncoder.from_pretrained(model, pooler="avg"), [f"{tmp_path}/shards/*"]
    refused = []

    def with_a_second_process(self, sentences, **keywords):
        monkeypatch.setattr(SentenceEncoder, "encode", encode)
        with pytest.raises(
            InUseError, match=r"is in use by process .* or share the inputs: give each process JAX_PROCESS"
        ):
            app.embed(inputs, out, lambda: encoder, **options)
        refused.append(True)
        return encode(self, sentences, **keywords)

    out.mkdir()
    monkeypatch.setattr(SentenceEncoder, "encode", with_a_second_process)
    assert app.embed(inputs, out, lambda: encoder, **options) == 45
    assert refused
    check(out, shards, model)


@pytest.mark.parametrize("option", ["batch_size", "rows_per_file"])
def test_sizes_below_one_are_refused(option, tmp_path, shards, capsys):
    """Files of no rows would pass for a finished input."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(["embed", *arguments(tmp_path, "no model is read", **{option: "0"})])
    assert stopped.value.code == 2
    assert f"--{option}: expected at least 1, got 0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_killed_process_is_made_good_by_a_restart(tmp_path, model):
    """Two processes, one killed in the middle; then one process finishes the work of both."""
    shards = {f"shard-{index}.txt": [f"sentence {row} of file {index}" for row in range(3000)] for index in range(2)}
    (tmp_path / "shards").mkdir()
    for name, sentences in shards.items():
        (tmp_path / "shards" / name).write_text("\n".join(sentences) + "\n")
    command = [sys.executable, "-m", "diffcse_jax.cli", "embed", *arguments(tmp_path, model, rows_per_file="20")]
    environment = os.environ | {"XLA_FLAGS": "", "JAX_NUM_PROCESSES": "2"}
    first, second = (
        subprocess.Popen(command, env=environment | {"JAX_PROCESS_ID": str(index)}, stderr=subprocess.DEVNULL)
        for index in range(2)
    )
    while len(list((tmp_path / "out").glob("shard-1.txt.*.parquet"))) < 5:
        assert second.poll() is None
        time.sleep(0.01)
    second.send_signal(signal.SIGKILL)
    second.wait()
    assert first.wait(timeout=120) == 0
    assert find_store(str(tmp_path / "out")).unfinished == ("shard-1.txt",)
    subprocess.run(command, env=os.environ | {"XLA_FLAGS": ""}, check=True, stderr=subprocess.DEVNULL)
    rows = read(tmp_path / "out")
    assert {name: [row["sentence"] for row in found] for name, found in rows.items()} == shards


def test_the_same_model_under_another_path_resumes(tmp_path, shards, model, capsys):
    cli.main(["embed", *arguments(tmp_path, model)])
    (tmp_path / "link").symlink_to(model)
    cli.main(["embed", *arguments(tmp_path, str(tmp_path / "link"))])
    err = capsys.readouterr().err
    assert f"resuming {tmp_path}/out: 4 of 4 inputs are complete, 7 Parquet files exist" in err
    assert "process 0 of 1: 0 sentences" in err


def test_an_interruption_names_the_command_and_search_warns(tmp_path, shards, model, monkeypatch, capsys):
    encode, calls = SentenceEncoder.encode, []

    def interrupted(self, sentences, **options):
        calls.append(len(sentences))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(self, sentences, **options)

    with monkeypatch.context() as patched:
        patched.setattr(SentenceEncoder, "encode", interrupted)
        with pytest.raises(SystemExit) as stopped:
            cli.main(["embed", *arguments(tmp_path, model)])
    assert stopped.value.code == 130
    message = "interrupted after 17 sentences; complete Parquet files are kept. To resume, run diffcse embed --model"
    assert message in capsys.readouterr().err
    assert find_store(str(tmp_path / "out")).unfinished == ("shard-1.txt", "shard-2.txt", "shard-3.txt")
    cli.main(["search", "--input", f"{tmp_path}/out", "--pooler", "avg", "a query"])
    assert f"warning: {tmp_path}/out is incomplete: `diffcse embed` has not finished 3" in capsys.readouterr().err
    encoder = SentenceEncoder.from_pretrained(model, pooler="avg")
    with pytest.warns(UserWarning, match="is incomplete"):
        encoder.load_index(tmp_path / "out")
    cli.main(["embed", *arguments(tmp_path, model)])
    assert find_store(str(tmp_path / "out")).unfinished == ()
    next((tmp_path / "out").glob("shard-3.txt.000001.parquet")).unlink()
    with pytest.raises(DataError, match=r"shard-3\.txt\.000001\.parquet is missing"):
        find_store(str(tmp_path / "out"))


def test_a_failure_leaves_no_empty_folder(tmp_path, shards, model, monkeypatch):
    def fail(self, sentences, **options):
        raise DataError("no embeddings")

    monkeypatch.setattr(SentenceEncoder, "encode", fail)
    with pytest.raises(SystemExit):
        cli.main(["embed", *arguments(tmp_path, model)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "shards"]


def test_a_total_is_shown(tmp_path, shards, model, monkeypatch, capsys):
    monkeypatch.setattr("diffcse_jax.hosts.SECONDS_BETWEEN_LINES", 0)
    cli.main(["embed", *arguments(tmp_path, model)])
    assert "embedding: 45 of 45 sentences" in capsys.readouterr().err
