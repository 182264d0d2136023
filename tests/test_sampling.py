"""Neighbours and crops: from a token store to the batches of a step."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_run import environment, overrides, run_settings

from diffcse_jax.config import Config, DataConfig
from diffcse_jax.data.batches import BatchSource, Packing, Shards
from diffcse_jax.data.sampling import Crops, Neighbours, examples_of
from diffcse_jax.data.token_store import TokenStore
from diffcse_jax.errors import ConfigError, DataError

ROOT = Path(__file__).parents[1]
PAD, LONGEST = 9999, 32


def store_of(folder: Path, documents: list[int]) -> TokenStore:
    """Write documents with these numbers of sentences. Each token of sentence `i` is `i`; lengths vary from 3 to 32."""
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
    """Return the next sentence of each sentence that has one."""
    numbers = iter(range(sum(documents)))
    of_documents = [list(itertools.islice(numbers, size)) for size in documents]
    return {a: b for sentences in of_documents for a, b in itertools.pairwise(sentences)}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6).filter(lambda sizes: max(sizes) > 1))
def test_neighbours_are_inside_a_document(tmp_path, documents):
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
    with pytest.raises(DataError, match=r"none of the 3 documents has two sentences.*data\.documents"):
        Neighbours(store_of(tmp_path, [1, 1, 1]))


DOCUMENTS = [1, 9, 4, 1, 7, 2, 12]


def test_a_next_sentence_is_drawn_from_the_following_ones(tmp_path):
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
def test_next_sentences_come_with_the_views(tmp_path, devices, chunks):
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


PASSAGES = (17, 18, 40, 400, 1000)  # tokens, [CLS] and [SEP] included; the first is too short


@pytest.fixture(scope="module")
def passages(tmp_path_factory) -> TokenStore:
    """Write passages. Passage `i` has the tokens `1000 * (i + 1)`, its [CLS], and the following numbers."""
    folder = tmp_path_factory.mktemp("passages")
    np.save(folder / "token_ids.npy", np.concatenate([1000 * (i + 1) + np.arange(n) for i, n in enumerate(PASSAGES)]))
    np.save(folder / "offsets.npy", np.cumsum([0, *PASSAGES]))
    (folder / "meta.json").write_text(json.dumps({"columns": ["passage"], "max_length": 1024, "note": ""}))
    return TokenStore(folder)


def test_crops_are_two_spans_of_a_passage(passages):
    crops = Crops(passages, max_length=64)
    generator, shares, places = np.random.default_rng(0), [], []
    for _ in range(500):
        order = crops.order(generator)
        input_ids, lengths = crops.gather(order, 64, PAD)
        np.testing.assert_array_equal(crops.lengths(order), lengths)
        np.testing.assert_array_equal((input_ids != PAD).sum(axis=-1), lengths)
        passage = input_ids[:, 0, 0] // 1000 - 1
        assert sorted(passage) == [1, 2, 3, 4]
        size = np.array(PASSAGES)[passage]
        for column in (0, 1):
            ids, length = input_ids[:, column], lengths[:, column]
            last = ids[np.arange(4), length - 1]
            np.testing.assert_array_equal(ids[:, 0], 1000 * (passage + 1))
            np.testing.assert_array_equal(last, ids[:, 0] + size - 1)
            inside = ids[:, 1:-1][np.arange(62) < (length - 2)[:, None]]
            assert np.isin(inside, passages.token_ids).all()
            assert np.all(ids[np.arange(4), length - 2] - ids[:, 1] == length - 3)  # no gap
            assert np.all((ids[:, 1] > ids[:, 0]) & (ids[np.arange(4), length - 2] < last))
        assert lengths.min() == 10  # of the passage of 16 tokens, eight are half
        assert lengths.max() <= 64
        row = np.flatnonzero(passage == 3)[0]
        shares.append((lengths[row] - 2) / 398)
        places.append((input_ids[row, :, 1] - 4001) / (398 - (lengths[row] - 2)))
    shares, places = np.array(shares), np.array(places)
    np.testing.assert_allclose(np.quantile(shares, [0, 0.125, 1]), [0.1, 0.15, 62 / 398], atol=0.01)  # then cut
    np.testing.assert_allclose(places.mean(axis=0), 0.5, atol=0.05)
    assert abs(np.corrcoef(places.T)[0, 1]) < 0.15  # two draws, not one


def test_crops_of_a_batch_are_a_function_of_seed_and_step(passages):
    def source(**options) -> BatchSource:
        settings = {"batch_size": 4, "steps": 30, "seed": 3, "pad_token_id": PAD, "packing": Packing()} | options
        return BatchSource(Crops(passages, 32), **settings)

    one, halves = source(), [source(shards=Shards(range(i, i + 1), 2)) for i in range(2)]
    for step in range(10):
        parts = [half[step] for half in halves]
        whole = np.concatenate([part.input_ids for part in parts])
        np.testing.assert_array_equal(one[step].input_ids, whole)
        np.testing.assert_array_equal(one[step].attention_mask, whole != PAD)
        assert one[step].next is None
    spans = {one[step].input_ids.tobytes() for step in range(30)} | {source(seed=4)[0].input_ids.tobytes()}
    assert len(spans) == 31  # 30 epochs of one batch


def test_short_passages_without_two_crops_are_refused(tmp_path):
    store = store_of(tmp_path, [1])
    store.offsets = np.array([0, 17])  # with [CLS] and [SEP]
    with pytest.raises(DataError, match="no document has the 16 tokens that two crops need"):
        Crops(store, 32)


def test_examples_need_one_column_and_documents(tmp_path):
    data = DataConfig(pairs="dropout")
    store = store_of(tmp_path, [2, 2])
    assert examples_of(store, data, next_sentence=False) is store
    assert isinstance(examples_of(store, data, next_sentence=True), Neighbours)
    store.document_starts = None
    with pytest.raises(ConfigError, match=r"wiki1m has no documents, but a loss needs next sentences"):
        examples_of(store, data, next_sentence=True)
    store.columns = ("sentence", "positive")
    with pytest.raises(ConfigError, match=r"data\.pairs='dropout' uses each sentence twice.* 2 columns"):
        examples_of(store, data, next_sentence=False)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"difference": {"sentence": "next"}}, r"difference\.weight > 0 needs documents\. .*data\.documents='blank"),
        (
            {"data": {"pairs": "lead", "documents": "none"}},
            r"data\.pairs='lead' needs documents\. .*data\.documents='bl",
        ),
        ({"data": {"held_out": 0.1}}, r"data\.held_out=0\.1 is a share of the documents.*Use data\.pairs='dropout'"),
        ({"eval": {"metric": "lead_retrieval"}}, r"eval\.metric='lead_retrieval' needs held-out documents"),
        (
            {"difference": {"sentence": "both"}, "data": {"pairs": "crops"}},
            r"data\.pairs='crops' makes another span the positive, but difference\.weight > 0",
        ),
        (
            {"difference": {"sentence": "both"}, "data": {"pairs": "neighbours", "documents": "blank_lines"}},
            r"data\.pairs='neighbours' makes the next sentence the positive, but difference\.weight > 0",
        ),
        (
            {"data": {"pairs": "neighbours", "documents": "blank_lines", "augmentation": "crop"}},
            r"data\.augmentation='crop' changes the second view of single sentences.*data\.pairs='neighbours'",
        ),
        ({"data": {"augmentation": "synonyms"}}, r"data\.augmentation='synonyms' needs data\.synonyms_file"),
    ],
)
def test_contradictory_options_are_refused(parts, message):
    with pytest.raises(ConfigError, match=message):
        Config.from_dict(parts)


@pytest.mark.slow
def test_a_run_over_documents(tmp_path, minilm_dir):
    """Train from the file to the metrics, with all options that read the text."""
    lines = [f"Sentence {i} has {i % 7} small words more." for i in range(60)]
    text, synonyms = tmp_path / "documents.txt", tmp_path / "synonyms.tsv"
    text.write_text("".join(f"{line}\n" + "\n" * (i % 9 == 8) for i, line in enumerate(lines)))
    synonyms.write_text("small\tlittle\ttiny\n")
    settings = run_settings(
        tmp_path,
        minilm_dir,
        data={
            "train_file": text, "pairs": "dropout", "held_out": 0.3,
            "augmentation": "synonyms", "synonyms_file": synonyms,
        },
        difference={"sentence": "next", "edit": "delete"},
        train={"steps": 3},
        eval={"every": 0, "metric": "neighbours_retrieval"},
    )  # fmt: skip
    run = subprocess.run(
        [sys.executable, "train.py", "--config", "configs/diffcse_minilm.py", "--workdir", tmp_path / "run",
         *overrides(settings)],
        cwd=ROOT, env=environment(tmp_path / "xla"), capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    sentences, held_out = re.search(r"(\d+) rows of sentence.*7 documents, (\d) of them held out", run.stderr).groups()
    ends = 7 - int(held_out)
    assert f"skipped {ends} of {sentences} sentences: the last one of a document has no next one" in run.stderr
    assert "generator" not in run.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 3
    assert all(0 < row["rtd_share_kept"] < 1 for row in steps)
