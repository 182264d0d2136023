from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.data.shapes import BatchShape, bucket_lengths, choose_lengths, choose_shapes, smallest, smallest_shape


@given(st.integers(3, 600))
def test_buckets_end_at_the_maximal_length(max_length):
    buckets = bucket_lengths(max_length)
    assert buckets[-1] == max_length
    assert list(buckets) == sorted(set(buckets))


@given(st.lists(st.integers(3, 64), min_size=1), st.integers(64, 600))
def test_lengths_are_few_and_hold_everything(longest, max_length):
    lengths = choose_lengths(longest, max_length)
    assert lengths[-1] == max_length
    assert len(lengths) <= 2
    assert all(smallest(lengths, length) >= length for length in longest)


def test_a_length_is_added_where_batches_would_be_padding():
    assert choose_lengths([30] * 9 + [100], 128) == (32, 128)
    assert choose_lengths([100] * 10, 128) == (128,)
    assert choose_lengths([128] * 10, 128) == (128,)


@given(st.lists(st.tuples(st.sampled_from([16, 32]), st.floats(0.01, 1.0)), min_size=1))
def test_shapes_are_few_and_hold_everything(needed):
    needed = [BatchShape.of(*shape) for shape in needed]
    shapes = choose_shapes(needed, (16, 32))
    assert len(shapes) <= 4
    for shape in needed:
        chosen = smallest_shape(shapes, shape)
        assert chosen.length == shape.length
        assert chosen.sixteenths >= shape.sixteenths
        assert chosen in shapes


def test_shapes_are_those_that_compute_the_least():
    needed = [BatchShape(32, 12)] * 50 + [BatchShape(32, 13)] * 49 + [BatchShape(32, 14)] * 20 + [BatchShape(32, 5)]
    assert choose_shapes(needed, (32,)) == tuple(BatchShape(32, share) for share in (12, 13, 14, 16))


def test_a_capacity_holds_the_share():
    shape = BatchShape.of(10, 0.7)
    assert shape.packed
    assert shape.capacity(80) == 60  # 12 sixteenths
    assert not BatchShape.of(10, 0.99).packed
    assert BatchShape.of(10, 1.0).capacity(80) == 80
