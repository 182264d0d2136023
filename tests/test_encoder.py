import concurrent.futures
import copy
import inspect
import pickle
import re
import runpy

import jax
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import HIDDEN, MAX_LENGTH, random_params, write_tiny_model

from diffcse_jax import SentenceEncoder
from diffcse_jax.errors import CheckpointError, ConfigError, DataError
from diffcse_jax.evaluation.backends import TorchEncoder
from diffcse_jax.io import write_tensors
from diffcse_jax.models import files, hf
from diffcse_jax.models.poolers import check_pooler
from diffcse_jax.models.sentence_folder import Prompts
from diffcse_jax.models.transformer import Transformer
from diffcse_jax.search.texts import checked_sentences

SENTENCES = [
    "a dog runs in the park",
    "the cat",
    "stock markets fell sharply on monday , analysts said",
    "no",
    "the cat",
]


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory, minilm_dir):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), minilm_dir)


@pytest.fixture(scope="module")
def tiny(tiny_dir):
    return SentenceEncoder.from_pretrained(tiny_dir, pooler="avg")


def test_weights_that_only_transformers_does_not_find_are_not_random(
    tmp_path, minilm_dir, monkeypatch
):
    checkpoint = hf.read(str(write_tiny_model(tmp_path, minilm_dir)))
    tensors = files.read_tensors(tmp_path)
    lost = "encoder.layer.0.output.dense.bias"
    write_tensors(
        tmp_path / "model.safetensors", {name: tensors[name] for name in tensors if name != lost}
    )
    monkeypatch.setattr(hf, "read_encoders", lambda _: hf.Encoders(checkpoint))
    with pytest.raises(CheckpointError, match=f"transformers does not find the weights {lost}"):
        TorchEncoder(str(tmp_path), "avg")


def test_vectors_are_cut_before_they_are_normalised(tiny, tiny_dir):
    cut = SentenceEncoder.from_pretrained(tiny_dir, pooler="mean", truncate_dim=5)
    np.testing.assert_array_equal(cut.encode(SENTENCES), tiny.encode(SENTENCES)[:, :5])
    np.testing.assert_allclose(
        np.linalg.norm(cut.encode(SENTENCES, normalize=True), axis=1), 1.0, rtol=1e-6
    )
    assert (cut.dimension, tiny.dimension) == (5, HIDDEN)
    assert cut.fingerprint() != tiny.fingerprint()
    np.testing.assert_allclose(
        TorchEncoder(str(tiny_dir), "avg", 5).encode(SENTENCES), cut.encode(SENTENCES), atol=1e-5
    )
    for size in (0, HIDDEN + 1):
        with pytest.raises(
            ConfigError, match=rf"truncate_dim={size}: the embedding size is {HIDDEN}"
        ):
            SentenceEncoder.from_pretrained(tiny_dir, pooler="avg", truncate_dim=size)


def test_one_text_an_iterator_and_no_text(tiny):
    one, many = tiny.encode("a dog"), tiny.encode(iter(SENTENCES))
    assert (one.shape, many.shape, tiny.encode([]).shape) == ((HIDDEN,), (5, HIDDEN), (0, HIDDEN))
    unit = one / np.linalg.norm(one)
    for name in ("normalize", "normalize_embeddings"):  # the name in sentence-transformers
        np.testing.assert_allclose(tiny.encode("a dog", **{name: True}), unit, rtol=1e-6)
    expected = many @ unit / np.linalg.norm(many, axis=1)
    np.testing.assert_allclose(tiny.similarity(iter(SENTENCES), "a dog"), expected, atol=1e-6)
    np.testing.assert_allclose(tiny.similarity(many, one), expected, atol=1e-6)
    assert tiny.similarity(SENTENCES, ["a dog", "no"]).shape == (5, 2)
    assert tiny.similarity([], "a dog").shape == (0,)
    for rows in (torch.from_numpy(many), [*many], many.tolist()):
        np.testing.assert_allclose(tiny.similarity(rows, one), expected, atol=1e-6)
    with pytest.raises(ConfigError, match="of 5 and of 16 dimensions cannot be compared"):
        tiny.similarity(many[:, :5], many)
    tiny.build_index(iter(SENTENCES))
    assert [hits[0][0] for hits in tiny.search(iter(SENTENCES), top_k=1)] == SENTENCES


def test_names_of_sentence_transformers_are_accepted_or_answered(tiny):
    usual = {
        "convert_to_numpy": True,
        "convert_to_tensor": False,
        "show_progress_bar": True,
        "device": None,
    }
    np.testing.assert_array_equal(tiny.encode(SENTENCES, **usual), tiny.encode(SENTENCES))
    assert tiny.get_sentence_embedding_dimension() == HIDDEN
    for name, value, instead in (
        ("convert_to_tensor", True, "torch.from_numpy"),
        ("convert_to_numpy", False, "list()"),
        ("device", "cuda", "JAX_PLATFORMS"),
        ("precision", "int8", "`storage`"),
        ("truncate_dim", 64, "from_pretrained"),
    ):
        with pytest.raises(ConfigError, match=rf"{name}=.*{re.escape(instead)}"):
            tiny.encode(SENTENCES, **{name: value})
    with pytest.raises(TypeError, match="unexpected keyword argument 'normalise'"):
        tiny.encode(SENTENCES, normalise=True)


@given(
    st.lists(st.text(alphabet="abc dé", max_size=MAX_LENGTH - 2), min_size=1, max_size=9),
    st.integers(1, 10),
)
def test_rows_follow_their_sentences_at_any_batch_size(tiny, sentences, batch_size):
    one_by_one = np.stack([tiny.encode(sentence) for sentence in sentences])
    np.testing.assert_allclose(tiny.encode(sentences, batch_size=batch_size), one_by_one, atol=1e-5)


@pytest.mark.parametrize(
    ("sentences", "message"),
    [
        (b"bytes", "expected a string or an iterable of strings, got bytes"),
        ({"a": "b"}, "got dict"),
        ({"a", "b"}, "a set has no order"),
        (["a", None], r"sentence 2 is None \(NoneType\), not a string"),
        ([("a", "b")], "an embedding of its own: give one flat list"),
        (["the cat", "caf\udce9"], r"sentence 2: 'caf\\udce9' contains a lone surrogate"),
    ],
)
def test_what_is_not_text_is_refused(sentences, message):
    with pytest.raises(DataError, match=message):
        # which `encode` calls: types at run time would refuse some before
        checked_sentences(sentences)


def test_columns_of_pyarrow_are_texts():
    table = pa.table({"text": ["a", "b"]})
    assert checked_sentences(table["text"]) == ["a", "b"]
    assert checked_sentences(pa.array(["a"])) == ["a"]
    with pytest.raises(DataError, match="Of a table, give one column"):
        checked_sentences(table)


def test_options_are_checked(tiny, tiny_dir):
    with pytest.raises(ConfigError, match="batch_size=0: expected a whole number of at least 1"):
        tiny.encode(["a dog"], batch_size=0)
    with pytest.raises(ConfigError, match=r"max_length=2: expected .*3 tokens"):
        tiny.encode(["a dog"], max_length=2)
    with pytest.raises(ConfigError, match=r"max_length=2: expected .*3 tokens"):
        tiny.max_length = 2
    # Versions of sentence-transformers differ in what the second argument is.
    with pytest.raises(TypeError, match="positional"):
        tiny.encode(["a dog"], 32, True)
    for dtype in ("float16", "nonsense"):
        with pytest.raises(ConfigError, match=f"dtype='{dtype}': use 'float32' or 'bfloat16'"):
            SentenceEncoder.from_pretrained(tiny_dir, pooler="avg", dtype=dtype)
    half = SentenceEncoder.from_pretrained(tiny_dir, pooler="avg", dtype="bfloat16")
    assert 0 < np.abs(half.encode(SENTENCES) - tiny.encode(SENTENCES)).max() < 0.05
    with pytest.raises(ConfigError, match="build_index"):
        half.search("a dog")
    # Types at run time would refuse these first.
    with pytest.raises(ConfigError, match="unknown pooler 5"):
        inspect.unwrap(check_pooler)(5)
    with pytest.raises(ConfigError, match="prompt=5: expected text"):
        inspect.unwrap(Prompts.choose)(tiny.prompts, 5)


def test_long_sentences_are_not_cut_before_the_last_position(tiny):
    fits, before = " ".join(["dog"] * (MAX_LENGTH - 2)), tiny.tokenizer.backend_tokenizer.to_str()
    assert not np.allclose(tiny.encode(fits), tiny.encode(fits + " cat", max_length=MAX_LENGTH - 1))
    texts = [fits + " cat", "no", fits + " cat"]
    with pytest.warns(
        UserWarning, match="truncated 2 of 3 texts to 40 tokens, the most that the model reads"
    ) as caught:
        cut = tiny.encode(texts)
    assert len(caught) == 1
    np.testing.assert_allclose(cut[0], tiny.encode(fits), atol=1e-6)
    # the user's tokenizer is not changed
    assert tiny.tokenizer.backend_tokenizer.to_str() == before


def with_weights(encoder: SentenceEncoder, transformer: dict) -> SentenceEncoder:
    return SentenceEncoder(encoder.config, transformer, encoder.tokenizer, encoder.recorded)


@pytest.mark.parametrize("devices", [3, 8])
def test_threads_encode_at_once_on_several_devices(tiny, devices):
    """Each cuts at another length, which the tokenizer's backend holds; programs of all devices must not cross."""
    options = {"axis_types": (jax.sharding.AxisType.Auto,), "devices": jax.devices()[:devices]}
    mesh = jax.make_mesh((devices,), ("data",), **options)
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = random_params(Transformer, tiny.config, seed=2)
    encoder = with_weights(tiny, jax.device_put(params, replicated))
    np.testing.assert_allclose(
        encoder.encode(SENTENCES), with_weights(tiny, params).encode(SENTENCES), atol=1e-5
    )
    text, limits = [*SENTENCES, " ".join(["dog"] * 30)], (None, 6, 9, 12)
    expected = [encoder.encode(text, max_length=limit) for limit in limits]
    before = encoder.fingerprint()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda limit: encoder.encode(text, max_length=limit), limits * 5)]
    for vectors, single in zip(found, expected * 5, strict=True):
        np.testing.assert_array_equal(vectors, single)
    assert encoder.fingerprint() == before


def test_folders_that_lack_a_part_are_refused(tmp_path, minilm_dir):
    folder = write_tiny_model(tmp_path, minilm_dir, pooler=False)
    for pooler, message in (
        (None, "Choose one of: cls, cls_before_pooler, avg"),
        ("cls", "Use 'cls_before_pooler'"),
    ):
        with pytest.raises(CheckpointError, match=message):
            SentenceEncoder.from_pretrained(folder, pooler=pooler)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match="does not contain a tokenizer"):
        SentenceEncoder.from_pretrained(folder, pooler="avg")


def test_a_diverged_model_gives_no_vectors(tiny):
    params = random_params(Transformer, tiny.config)
    name = next(name for name in params if name.endswith("scale"))
    with jax.debug_nans(False):
        diverged = with_weights(tiny, params | {name: np.full_like(params[name], np.nan)})
        with pytest.raises(CheckpointError, match="returns embeddings that are NaN or infinite"):
            diverged.encode(SENTENCES)


def test_fingerprint_does_not_depend_on_names_in_the_code(tiny):
    before, kind = tiny.fingerprint(), type(tiny.config)
    name, module = kind.__qualname__, kind.__module__
    kind.__qualname__, kind.__module__ = "Renamed", "moved"
    try:
        assert tiny.fingerprint() == before
    finally:
        kind.__qualname__, kind.__module__ = name, module


def test_pickle_and_deepcopy_give_the_same_embeddings(tiny):
    tiny.build_index(SENTENCES)
    expected, found = tiny.encode(SENTENCES), tiny.search("a dog")
    for other in (pickle.loads(pickle.dumps(tiny)), copy.deepcopy(tiny)):
        np.testing.assert_array_equal(other.encode(SENTENCES), expected)
        assert other.search("a dog") == found
        assert other.fingerprint() == tiny.fingerprint()


def test_warnings_name_the_line_of_the_user(tmp_path, tiny_dir):
    script = tmp_path / "script.py"
    encoder = f'SentenceEncoder.from_pretrained({str(tiny_dir)!r}, pooler="avg")'
    script.write_text(
        f'from diffcse_jax import SentenceEncoder\nencoder = {encoder}\nencoder.encode("dog " * 50)\n'
    )
    with pytest.warns(UserWarning, match="truncated 1 of 1 texts") as caught:
        runpy.run_path(str(script))
    assert [(warning.filename, warning.lineno) for warning in caught] == [(str(script), 3)]
