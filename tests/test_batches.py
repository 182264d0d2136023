import json
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.batch import Batch
from diffcse_jax.data.batches import (
    BatchShape,
    BatchSource,
    Packing,
    Shards,
    batches_per_epoch,
    choose_lengths,
    choose_shapes,
    make_batches,
    smallest,
    smallest_shape,
)
from diffcse_jax.data.token_store import TokenStore
from diffcse_jax.errors import DataError

EXAMPLES, BATCH, PAD = 21, 4, 9999
PER_EPOCH = 5


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> TokenStore:
    """Write two columns. Each token of example `i` is `i`; lengths vary from 3 to 32."""
    lengths = np.random.default_rng(0).integers(3, 33, (EXAMPLES, 2)) // np.array([1 + np.arange(EXAMPLES) % 3] * 2).T
    return written_store(tmp_path_factory.mktemp("store"), np.maximum(lengths, 3))


def written_store(folder: Path, lengths: np.ndarray) -> TokenStore:
    examples = np.arange(len(lengths)).repeat(lengths.shape[1])
    np.save(folder / "token_ids.npy", examples.repeat(lengths.ravel()).astype(np.uint16))
    np.save(folder / "offsets.npy", np.concatenate([[0], lengths.ravel().cumsum()]))
    meta = {"columns": ["sentence", "positive"][: lengths.shape[1]], "max_length": 32, "note": ""}
    (folder / "meta.json").write_text(json.dumps(meta))
    return TokenStore(folder)


@pytest.fixture(scope="module")
def source(store) -> BatchSource:
    return source_of(store)


def source_of(store: TokenStore, **options) -> BatchSource:
    return BatchSource(store, **{"batch_size": BATCH, "steps": 40, "seed": 3, "pad_token_id": PAD, **options})


def examples_of(views: Batch) -> list[int]:
    return views.input_ids[:, 0, 0].tolist()


def epoch_order(source: BatchSource, epoch: int) -> tuple[int, ...]:
    steps = range(epoch * PER_EPOCH, (epoch + 1) * PER_EPOCH)
    return tuple(example for step in steps for example in examples_of(source[step]))


def assert_same(left: Batch, right: Batch) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("epoch", [0, 1, 6])
def test_an_epoch_visits_examples_at_most_once(store, epoch):
    visited = epoch_order(source_of(store), epoch)
    assert len(set(visited)) == PER_EPOCH * BATCH == len(visited)


def test_order_depends_only_on_seed_and_epoch(store):
    orders = {epoch_order(source_of(store, seed=seed), epoch) for seed in (3, 4) for epoch in (0, 1)}
    assert len(orders) == 4
    assert_same(source_of(store)[17], source_of(store, steps=100)[17])


def test_each_example_is_left_out_equally_often(store):
    source = source_of(store, steps=0)
    visits = np.zeros(EXAMPLES)
    for step in range(200 * PER_EPOCH):
        visits[examples_of(source[step])] += 1
    assert visits.min() >= 175  # 200 epochs, each leaves 1 of 21 out: 190.5 expected, standard deviation 3
    assert visits.max() <= 200


def test_batches_have_few_lengths_and_hold_their_sentences(store):
    source = source_of(store)
    lengths = sorted({shape.length for shape in source.shapes})
    assert lengths[-1] == 32
    assert len(lengths) <= 2
    for step in range(len(source)):
        views = source[step]
        rows, length = np.array(examples_of(views)), views.input_ids.shape[-1]
        longest = store.lengths(rows).max()
        assert length == min(candidate for candidate in lengths if candidate >= longest)
        np.testing.assert_array_equal(views.attention_mask.sum(-1), store.lengths(rows))
        expected = np.where(views.attention_mask == 1, rows[:, None, None], PAD)
        np.testing.assert_array_equal(views.input_ids, expected)
        assert np.all(np.diff(views.attention_mask, axis=-1) <= 0)  # padding comes last
        assert {array.dtype for array in jax.tree.leaves(views)} == {np.dtype(np.int32)}


def test_a_single_sentence_is_its_own_second_view(tmp_path):
    views = source_of(written_store(tmp_path, np.full((EXAMPLES, 1), 5)))[0]
    assert views.per_example == 2
    np.testing.assert_array_equal(views.input_ids[:, 0], views.input_ids[:, 1])
    np.testing.assert_array_equal(views.rows.input_ids, np.repeat(views.input_ids[:, 0], 2, axis=0))
    np.testing.assert_array_equal(views.anchors.input_ids, views.input_ids[:, 0])


@pytest.mark.parametrize(("devices", "chunks"), [(1, 1), (2, 1), (2, 2)])
def test_layouts_hold_every_token_in_few_shapes(store, devices, chunks):
    source = source_of(store, shards=Shards(range(devices), devices), packing=Packing(chunks=chunks, anchors=True))
    assert len(source.shapes) <= 4
    slots, padded = set(), source_of(store)
    for step in range(len(source)):
        views = source[step]
        for rows in (views.rows, views.anchors):
            if rows.layout is not None:
                assert (rows.layout.positions < rows.layout.slots.shape[1]).sum() == rows.attention_mask.sum()
                slots.add(rows.layout.positions.shape[1])
        assert_same(views.padded(), padded[step])  # a layout changes nothing else
    assert len(slots) > 1


def test_batches_with_little_padding_are_not_packed(store):
    def shares(packing: Packing) -> set[int]:
        return {shape.sixteenths for shape in source_of(store, packing=packing).shapes_of(range(40))} - {16}

    emptiest, *_, fullest = sorted(shares(Packing()))
    assert emptiest < fullest
    assert max(shares(Packing(fullest=fullest - 1)), default=0) < fullest
    assert not shares(Packing(fullest=1))


def test_the_shapes_of_later_batches_are_known(store):
    source = source_of(store, packing=Packing())
    foreseen = source.shapes_of(range(3, 40))
    first = {}
    for step in range(3, 40):
        first.setdefault(str(jax.tree.map(np.shape, source[step])), step)
    assert list(foreseen.values()) == list(first.values())


@pytest.mark.parametrize("count", [2, 4])
def test_processes_hold_slices_of_the_global_batch(store, count):
    whole = source_of(store, shards=Shards(range(count), count), packing=Packing())
    parts = [source_of(store, shards=Shards(range(i, i + 1), count), packing=Packing()) for i in range(count)]
    for step in range(12):
        assert_same(jax.tree.map(lambda *slices: np.concatenate(slices), *(part[step] for part in parts)), whole[step])


@given(st.integers(0, 40))
def test_a_resumed_iterator_continues_identically(source, delivered):
    batches = make_batches(source)
    for _ in range(delivered):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    resumed = make_batches(source)
    next(resumed)
    resumed.set_state(state)
    rest, again = list(batches), list(resumed)
    assert len(rest) == len(again) == 40 - delivered
    for left, right in zip(rest, again, strict=True):
        assert_same(left, right)


def test_the_iterator_delivers_the_sources_batches_in_order(source):
    for step, batch in enumerate(make_batches(source)):
        assert_same(batch, source[step])
    assert step == len(source) - 1


@given(st.lists(st.integers(3, 64), min_size=1), st.integers(64, 600))
def test_lengths_are_few_and_hold_all_sentences(longest, max_length):
    lengths = choose_lengths(longest, max_length)
    assert lengths[-1] == max_length
    assert len(lengths) <= 2
    assert all(smallest(lengths, length) >= length for length in longest)
    assert choose_lengths([30] * 9 + [100], 128) == (32, 128)  # a length is added if batches would be padding
    assert choose_lengths([100] * 10, 128) == choose_lengths([128] * 10, 128) == (128,)


@given(st.lists(st.tuples(st.sampled_from([16, 32]), st.floats(0.01, 1.0)), min_size=1))
def test_shapes_are_few_and_hold_all_batches(needed):
    needed = [BatchShape.of(*shape) for shape in needed]
    shapes = choose_shapes(needed, (16, 32))
    assert len(shapes) <= 4
    for shape in needed:
        chosen = smallest_shape(shapes, shape)
        assert chosen.length == shape.length
        assert chosen.sixteenths >= shape.sixteenths


def test_shapes_compute_the_fewest_positions():
    needed = [BatchShape(32, 12)] * 50 + [BatchShape(32, 13)] * 49 + [BatchShape(32, 14)] * 20 + [BatchShape(32, 5)]
    assert choose_shapes(needed, (32,)) == tuple(BatchShape(32, share) for share in (12, 13, 14, 16))
    shape = BatchShape.of(10, 0.7)
    assert shape.packed
    assert shape.capacity(80) == 60  # 12 sixteenths
    assert not BatchShape.of(10, 0.99).packed


def test_batches_per_epoch_leaves_the_rest_out():
    assert [batches_per_epoch(examples, 4) for examples in (4, 7, 8)] == [1, 1, 2]


def test_fewer_examples_than_a_batch_are_refused(store):
    with pytest.raises(
        DataError, match=r"data\.train_file gives 21 examples, fewer than train\.batch_size=32\. .*batch_size=16$"
    ):
        source_of(store, batch_size=32)


def test_a_batch_that_shards_cannot_share_is_refused(store):
    with pytest.raises(ValueError, match="a batch of 4 does not split evenly over 3 shards"):
        source_of(store, shards=Shards(range(1), 3))
