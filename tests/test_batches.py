import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.data.batches import Batch, BatchSource, batches_per_epoch, bucket_lengths, make_batches
from diffcse_jax.data.tokens import TokenStore
from diffcse_jax.errors import ConfigError, DataError

EXAMPLES, BATCH, PAD = 21, 4, 9999
PER_EPOCH = 5


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> TokenStore:
    """Two columns; every token of example `i` is `i`, and lengths vary from 3 to 32."""
    lengths = np.random.default_rng(0).integers(3, 33, (EXAMPLES, 2)) // np.array([1 + np.arange(EXAMPLES) % 3] * 2).T
    return written_store(tmp_path_factory.mktemp("store"), np.maximum(lengths, 3))


def written_store(folder: Path, lengths: np.ndarray) -> TokenStore:
    examples = np.arange(len(lengths)).repeat(lengths.shape[1])
    np.save(folder / "token_ids.npy", examples.repeat(lengths.ravel()).astype(np.uint16))
    np.save(folder / "offsets.npy", np.concatenate([[0], lengths.ravel().cumsum()]))
    meta = {"columns": ["sentence", "positive"][: lengths.shape[1]], "max_length": 32, "note": ""}
    (folder / "meta.json").write_text(json.dumps(meta))
    return TokenStore(folder)


def source_of(store: TokenStore, **options) -> BatchSource:
    return BatchSource(store, **{"batch_size": BATCH, "steps": 40, "seed": 3, "pad_token_id": PAD, **options})


def examples_of(batch: Batch) -> list[int]:
    return batch["input_ids"][:, 0, 0].tolist()


def epoch_order(source: BatchSource, epoch: int) -> tuple[int, ...]:
    steps = range(epoch * PER_EPOCH, (epoch + 1) * PER_EPOCH)
    return tuple(example for step in steps for example in examples_of(source[step]))


def assert_same(left: Batch, right: Batch) -> None:
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])


@given(st.integers(3, 600))
def test_buckets_are_few_and_end_at_the_maximal_length(max_length):
    buckets = bucket_lengths(max_length)
    assert buckets[-1] == max_length
    assert list(buckets) == sorted(set(buckets))
    assert len(buckets) <= 6


def test_buckets_of_the_default_length():
    assert bucket_lengths(32) == (8, 16, 24, 32)


@pytest.mark.parametrize("epoch", [0, 1, 6])
def test_an_epoch_visits_examples_at_most_once(store, epoch):
    visited = epoch_order(source_of(store), epoch)
    assert len(set(visited)) == PER_EPOCH * BATCH == len(visited)


def test_order_depends_on_seed_and_epoch_alone(store):
    orders = {epoch_order(source_of(store, seed=seed), epoch) for seed in (3, 4) for epoch in (0, 1)}
    assert len(orders) == 4
    assert_same(source_of(store)[17], source_of(store, steps=100)[17])


def test_every_example_has_the_same_chance_to_be_left_out(store):
    source = source_of(store, steps=0)
    visits = np.zeros(EXAMPLES)
    for step in range(200 * PER_EPOCH):
        visits[examples_of(source[step])] += 1
    assert visits.min() >= 175  # 200 epochs, each leaves 1 of 21 out: 190.5 expected, standard deviation 3
    assert visits.max() <= 200


def test_batches_are_padded_to_the_smallest_bucket(store):
    source = source_of(store)
    widths = set()
    for step in range(len(source)):
        batch = source[step]
        rows, width = np.array(examples_of(batch)), batch["input_ids"].shape[-1]
        longest = store.lengths(rows).max()
        assert width == min(bucket for bucket in bucket_lengths(32) if bucket >= longest)
        np.testing.assert_array_equal(batch["attention_mask"].sum(-1), store.lengths(rows))
        expected = np.where(batch["attention_mask"] == 1, rows[:, None, None], PAD)
        np.testing.assert_array_equal(batch["input_ids"], expected)
        assert np.all(np.diff(batch["attention_mask"], axis=-1) <= 0)  # padding comes last
        assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}
        widths.add(width)
    assert len(widths) > 1


@pytest.mark.parametrize("process_count", [2, 4])
def test_processes_hold_slices_of_the_global_batch(store, process_count):
    whole = source_of(store)
    parts = [source_of(store, process_index=i, process_count=process_count) for i in range(process_count)]
    for step in range(12):
        slices = [part[step] for part in parts]
        for name in ("input_ids", "attention_mask"):
            np.testing.assert_array_equal(np.concatenate([part[name] for part in slices]), whole[step][name])
        for part in slices:
            np.testing.assert_array_equal(part["lengths"], whole[step]["lengths"])
    np.testing.assert_array_equal(whole[0]["lengths"], whole[0]["attention_mask"].sum(axis=-1))


@given(st.integers(0, 40))
def test_a_resumed_iterator_continues_identically(store, delivered):
    batches = make_batches(source_of(store))
    for _ in range(delivered):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    resumed = make_batches(source_of(store))
    next(resumed)
    resumed.set_state(state)
    rest, again = list(batches), list(resumed)
    assert len(rest) == len(again) == 40 - delivered
    for left, right in zip(rest, again, strict=True):
        assert_same(left, right)


def test_the_iterator_delivers_the_sources_batches_in_order(store):
    source = source_of(store)
    for step, batch in enumerate(make_batches(source_of(store))):
        assert_same(batch, source[step])
    assert step == len(source) - 1


def test_batches_per_epoch_leaves_the_rest_out():
    assert [batches_per_epoch(examples, 4) for examples in (4, 7, 8)] == [1, 1, 2]


def test_fewer_examples_than_a_batch_are_refused(store):
    with pytest.raises(DataError, match=r"data\.train_file holds 21 examples, fewer than train\.batch_size=32"):
        source_of(store, batch_size=32)


def test_a_batch_that_processes_cannot_share_is_refused(store):
    with pytest.raises(ConfigError, match=r"train\.batch_size=4 cannot be split evenly over 3 processes"):
        source_of(store, process_count=3)
