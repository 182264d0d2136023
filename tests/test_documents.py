"""Next sentences: from blank lines in a text to the batches of a step."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_run import environment, overrides, run_settings

from diffcse_jax.config import Config
from diffcse_jax.data.batches import BatchSource, Packing, Shards
from diffcse_jax.data.documents import Neighbours
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.data.tokens import TokenStore
from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.groups import DataConfig

ROOT = Path(__file__).parents[1]
PAD, LONGEST = 9999, 32


def store_of(folder: Path, documents: list[int]) -> TokenStore:
    """Documents of so many sentences; every token of sentence `i` is `i`, and lengths vary from 3 to 32."""
    folder.mkdir(exist_ok=True)
    sentences = sum(documents)
    lengths = np.random.default_rng(0).integers(3, LONGEST + 1, sentences) // (1 + np.arange(sentences) % 3)
    lengths = np.maximum(lengths, 3)
    np.save(folder / "token_ids.npy", np.arange(sentences).repeat(lengths).astype(np.uint16))
    np.save(folder / "offsets.npy", np.concatenate([[0], lengths.cumsum()]))
    np.save(folder / "document_starts.npy", np.cumsum([0, *documents[:-1]]))
    (folder / "meta.json").write_text(json.dumps({"columns": ["sentence"], "max_length": LONGEST, "note": ""}))
    return TokenStore(folder)


def next_of(documents: list[int]) -> dict[int, int]:
    """Every sentence that has a next one, and that."""
    numbers = iter(range(sum(documents)))
    of_documents = [list(itertools.islice(numbers, size)) for size in documents]
    return {a: b for sentences in of_documents for a, b in itertools.pairwise(sentences)}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6).filter(lambda sizes: max(sizes) > 1))
def test_neighbours_are_those_inside_a_document(tmp_path, documents):
    store, pairs = store_of(tmp_path / "store", documents), next_of(documents)
    neighbours = Neighbours(store)
    assert neighbours.left_out == len(documents)
    rows = np.arange(len(neighbours))
    input_ids, lengths = neighbours.gather(rows, LONGEST, PAD)
    assert dict(input_ids[:, :, 0].tolist()) == pairs
    sentences = np.array(list(pairs.items()))
    np.testing.assert_array_equal(lengths, store.lengths(sentences.ravel()).reshape(-1, 2))
    np.testing.assert_array_equal(neighbours.lengths(rows), lengths)
    padding = np.arange(LONGEST) >= lengths[..., None]
    np.testing.assert_array_equal(input_ids, np.where(padding, PAD, sentences[..., None]))


def test_documents_of_single_sentences_have_no_neighbours(tmp_path):
    with pytest.raises(DataError, match=r"3 documents and none has two sentences.*data\.documents"):
        Neighbours(store_of(tmp_path, [1, 1, 1]))


DOCUMENTS = [1, 9, 4, 1, 7, 2, 12]


def test_a_next_sentence_is_drawn_from_those_that_follow(tmp_path):
    neighbours = Neighbours(store_of(tmp_path, [1, 6, 2]), within=3)
    rng, drawn = np.random.default_rng(0), []
    for _ in range(600):
        order = neighbours.order(rng)
        input_ids, lengths = neighbours.gather(order, LONGEST, PAD)
        pairs = input_ids[:, :, 0].tolist()
        assert sorted(sentence for sentence, _ in pairs) == [1, 2, 3, 4, 5, 7]  # every example once
        np.testing.assert_array_equal(lengths, (input_ids != PAD).sum(axis=-1))
        np.testing.assert_array_equal(neighbours.lengths(order), lengths)
        drawn += pairs
    for sentence, choices in {1: [2, 3, 4], 2: [3, 4, 5], 3: [4, 5, 6], 4: [5, 6], 5: [6], 7: [8]}.items():
        counts = [drawn.count([sentence, choice]) for choice in choices]
        assert sum(counts) == 600
        assert all(abs(count - 600 / len(choices)) < 5 * np.sqrt(600 / len(choices)) for count in counts)


def source_of(folder: Path, **options) -> BatchSource:
    settings = {"batch_size": 4, "steps": 30, "seed": 3, "pad_token_id": PAD}
    return BatchSource(Neighbours(store_of(folder, DOCUMENTS)), **settings | options)


def test_neighbours_as_positives_are_two_columns(tmp_path):
    pairs, source = next_of(DOCUMENTS), source_of(tmp_path)
    for step in range(len(source)):
        views = source[step]
        assert views.next is None
        assert views.per_example == 2
        for sentence, positive in views.input_ids[:, :, 0].tolist():
            assert pairs[sentence] == positive


@pytest.mark.parametrize(("devices", "chunks"), [(1, 1), (2, 2)])
def test_next_sentences_beside_the_views(tmp_path, devices, chunks):
    pairs, padded = next_of(DOCUMENTS), source_of(tmp_path, next_sentence=True)
    source = source_of(
        tmp_path, next_sentence=True, shards=Shards(range(devices), devices), packing=Packing(chunks=chunks)
    )
    slots = set()
    for step in range(len(source)):
        views = source[step]
        jax.tree.map(np.testing.assert_array_equal, views.padded(), padded[step])
        np.testing.assert_array_equal(views.input_ids[:, 0], views.input_ids[:, 1])
        sentences, following = views.rows, views.next.rows
        assert [pairs[i] for i in sentences.input_ids[:, 0].tolist()] == following.input_ids[:, 0].tolist()
        assert following.input_ids.shape == sentences.input_ids.shape
        np.testing.assert_array_equal(following.attention_mask > 0, following.input_ids != PAD)
        for rows in (sentences, following):
            if rows.layout is not None:
                assert (rows.layout.positions < rows.layout.slots.shape[1]).sum() == rows.attention_mask.sum()
                slots.add(rows.layout.positions.shape[1])
    assert slots


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.csv", "sentence\none\n", r"a \.csv file has no blank lines"),
        ("a.jsonl", '{"x": "one"}\n', r"a \.jsonl file has no blank lines"),
    ],
)
def test_sources_without_documents_are_refused(tmp_path, name, content, reason):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=rf"{reason}.*data\.documents='blank_lines' is for txt files"):
        open_corpus(DataConfig(train_file=str(tmp_path / name), documents="blank_lines"))


@pytest.mark.parametrize(("name", "reason"), [("wiki1m", "in no order"), ("docstrings", "know no documents")])
def test_named_corpora_have_no_documents(name, reason):
    with pytest.raises(DataError, match=rf"{name}: .*{reason}"):
        open_corpus(DataConfig(train_file=name, documents="blank_lines"))


def test_blank_lines_are_no_bad_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n\n \nthree\n")
    corpus = open_corpus(DataConfig(train_file=str(path), documents="blank_lines", on_bad_line="error"))
    assert list(corpus.numbered()) == [(1, ("one",)), (2, ("two",)), (5, ("three",))]
    assert corpus.skipped_summary() == ""


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"difference": {"sentence": "next"}}, r"difference\.weight > 0 needs next sentences.*data\.documents='blank"),
        ({"data": {"pairs": "neighbours"}}, r"data\.pairs='neighbours' needs next sentences.*data\.documents='blank"),
        (
            {"difference": {"sentence": "both"}, "data": {"pairs": "neighbours", "documents": "blank_lines"}},
            r"data\.pairs='neighbours' makes the next sentence the positive, while difference\.weight > 0",
        ),
        (
            {"data": {"pairs": "neighbours", "documents": "blank_lines", "augmentation": "crop"}},
            r"data\.augmentation='crop' makes second views of single sentences.*data\.pairs='neighbours'",
        ),
        ({"data": {"augmentation": "synonyms"}}, r"data\.augmentation='synonyms' needs data\.synonyms_file"),
    ],
)
def test_data_that_cannot_be(parts, message):
    with pytest.raises(ConfigError, match=message):
        Config.from_dict(parts)


@pytest.mark.slow
def test_a_run_over_documents(tmp_path, minilm_dir):
    """From the file to the metrics, with everything that reads the text in its own way."""
    lines = [f"Sentence {i} has {i % 7} small words more." for i in range(60)]
    text, synonyms = tmp_path / "documents.txt", tmp_path / "synonyms.tsv"
    text.write_text("".join(f"{line}\n" + "\n" * (i % 9 == 8) for i, line in enumerate(lines)))
    synonyms.write_text("small\tlittle\ttiny\n")
    settings = run_settings(
        tmp_path,
        minilm_dir,
        data={
            "train_file": text, "documents": "blank_lines", "augmentation": "synonyms", "synonyms_file": synonyms
        },
        difference={"sentence": "next", "edit": "delete"},
        train={"steps": 3},
        eval={"every": 0},
    )  # fmt: skip
    run = subprocess.run(
        [sys.executable, "train.py", "--config", "configs/diffcse_minilm.py", "--workdir", tmp_path / "run",
         *overrides(settings)],
        cwd=ROOT, env=environment(tmp_path / "xla"), capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "in 7 documents" in run.stderr
    assert "7 of 60 sentences are the last of a document: no next one, left out" in run.stderr
    assert "generator" not in run.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 3
    assert all(0 < row["rtd_share_kept"] < 1 for row in steps)
