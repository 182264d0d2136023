"""The shapes that encoding compiles: how many there are, and that later processes load them."""

import os
import subprocess
import sys

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import MAX_LENGTH, write_tiny_model

from diffcse_jax import SentenceEncoder, hosts
from diffcse_jax.models.forward import compiled_forward
from diffcse_jax.models.shapes import Shapes


def shapes_of(**options) -> Shapes:
    return Shapes(**{"batch_size": 64, "max_length": 512, "on_cpu": True, "devices": 1} | options)


def possible(shapes: Shapes) -> set[tuple[int, int]]:
    """All shapes of batches: of equal texts, and of texts that become shorter."""
    found = set()
    for count in (1, 2, 5, 64, 73):
        for longest in range(3, shapes.max_length + 1, max(1, shapes.max_length // 128)):
            found |= {*shapes.of([longest] * count)}
            found |= {*shapes.of([max(3, longest * row // count) for row in range(count, 0, -1)])}
    return found


@pytest.mark.parametrize(("max_length", "most"), [(128, 33), (512, 57), (8192, 102)])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_shapes_are_few(max_length, most, on_cpu):
    assert len(possible(shapes_of(max_length=max_length, on_cpu=on_cpu))) <= most


@given(
    st.lists(st.integers(3, 512), min_size=1, max_size=200),
    st.integers(1, 70),
    st.booleans(),
    st.sampled_from([1, 3, 8]),
)
def test_batches_hold_all_texts(lengths, batch_size, on_cpu, devices):
    lengths = sorted(lengths, reverse=True)
    shapes = shapes_of(batch_size=batch_size, on_cpu=on_cpu, devices=devices)
    start = 0
    for rows, length in shapes.of(lengths):
        assert start < len(lengths)
        assert lengths[start] <= length <= 512
        assert rows % devices == 0
        assert rows < batch_size + devices
        start += rows
    assert start >= len(lengths)
    if on_cpu and devices == 1:  # less than half of a small last batch is padding
        assert start - len(lengths) <= 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, minilm_dir):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), minilm_dir, blocks=1)


def test_encode_compiles_each_shape_once(tiny):
    encoder = SentenceEncoder.from_pretrained(tiny, pooler="avg")
    modules = encoder.sentence_head.layers
    forward = compiled_forward(encoder.config, "avg", encoder.dtype, encoder._mesh, modules)
    jax.clear_caches()  # another test may have compiled some of the shapes
    before = forward._cache_size()
    texts = [f"{number} " + "word " * (number % 38) for number in range(70)]
    for count in (1, 2, 5, 70, 3, 69, 9):
        encoder.encode(texts[:count])
    devices = jax.device_count()
    most = possible(shapes_of(max_length=MAX_LENGTH, devices=devices))
    assert 1 < forward._cache_size() - before <= len(most)
    before = forward._cache_size()
    for count in (4, 8, 66):
        encoder.encode(texts[:count])
    assert forward._cache_size() == before


COUNTED = """
import collections, sys, jax
from diffcse_jax import SentenceEncoder
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.rpartition("/")[2]]))
SentenceEncoder.from_pretrained(sys.argv[1], pooler="avg").encode(["a dog", "a cat " * 9])
print(counts["compile_requests_use_cache"], counts["cache_hits"])
"""


@pytest.mark.slow
def test_the_second_process_compiles_nothing(tiny, tmp_path):
    environment = dict(os.environ, XDG_CACHE_HOME=str(tmp_path))
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    del environment["JAX_COMPILATION_CACHE_DIR"]  # of conftest.py: empty

    def run() -> tuple[int, ...]:
        command = [sys.executable, "-c", COUNTED, str(tiny)]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return tuple(map(int, done.stdout.split()))

    requests, hits = run()
    assert requests > hits == 0
    assert any((tmp_path / "diffcse_jax/compiled").iterdir())
    assert run() == (requests, requests)


def test_the_users_choice_of_a_folder_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    before = jax.config.jax_compilation_cache_dir
    assert before  # of conftest.py
    hosts.keep_compiled()
    assert jax.config.jax_compilation_cache_dir == before
    assert not [*tmp_path.iterdir()]
