"""The encoder's own properties. That its numbers are PyTorch's is shown in test_hf.py."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import hf_config_of

from diffcse_jax.batch import TokenRows, lay_out
from diffcse_jax.config import Config
from diffcse_jax.errors import ConfigError
from diffcse_jax.models import hf, parameters
from diffcse_jax.models.layers import Dense, Embedding, LayerNorm, dropout
from diffcse_jax.models.transformer import Transformer, TransformerConfig
from diffcse_jax.training.networks import describe_equal_views, for_run

# The families that compute something of their own; others differ from these in names alone.
FAMILIES = ("bert", "roberta", "distilbert", "mpnet")
PAD = 1
IDS = jnp.array([[5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [9, 8, PAD, PAD, PAD]])
MASK = jnp.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])


def sizes(family: str = "bert", hidden_dropout: float = 0.1, attention_dropout: float = 0.1) -> TransformerConfig:
    config = hf.transformer_config(hf_config_of(family), source="test")
    config = dataclasses.replace(
        config,
        vocab_size=20,
        max_positions=12,
        pad_token_id=PAD,
        embedding_dropout=hidden_dropout,
        hidden_dropout=(hidden_dropout,) * 3,
        attention_dropout=(attention_dropout,) * 3,
    )
    assert (config.hidden_size, config.num_blocks) == (16, 3)
    return config


def random_params(config: TransformerConfig) -> parameters.Params:
    """Weights of a trained network's size, biases included: initial ones are too small to tell anything apart."""
    shapes = parameters.shapes(partial(Transformer, config))
    random = np.random.default_rng(0)
    return {name: jnp.asarray(random.normal(0.0, 0.3, shape.shape), shape.dtype) for name, shape in shapes.items()}


def row_keys(seed: int, rows: int = len(IDS)) -> jax.Array:
    return jax.random.split(jax.random.key(seed), rows)


def run(config: TransformerConfig, params: parameters.Params, ids=IDS, mask=MASK, *, dtype=jnp.float32, **options):
    definition = parameters.definition(partial(Transformer, config, dtype=dtype))
    return parameters.bind(definition, params)(TokenRows(ids, mask), **options)["hidden_states"]


def changed_states(config: TransformerConfig, params: parameters.Params | None = None) -> list[bool]:
    """For the embedding output and each block, whether dropout changes it."""
    params = params or random_params(config)
    plain, dropped = run(config, params), run(config, params, keys=row_keys(0))
    return [not np.array_equal(*states) for states in zip(plain, dropped, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_named_and_shaped_as_documented(family):
    config = sizes(family)
    module = parameters.bind(parameters.definition(partial(Transformer, config)), random_params(config))
    output = module(TokenRows(IDS, MASK))
    assert [states.shape for states in output["hidden_states"]] == [(3, 5, 16)] * 4
    assert output["last_hidden_state"] is output["hidden_states"][-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sentence_depends_neither_on_padding_nor_on_its_neighbours(family):
    config = sizes(family)
    params = random_params(config)
    together = run(config, params)[-1]
    np.testing.assert_allclose(run(config, params, IDS[2:, :2], MASK[2:, :2])[-1], together[2:, :2], atol=1e-5)


@pytest.mark.parametrize(("family", "offset", "longest"), [("bert", 0, 12), ("roberta", 2, 10)])
def test_robertas_positions_begin_after_the_padding_id(family, offset, longest):
    config = sizes(family)
    assert (config.position_offset, config.max_length) == (offset, longest)
    params = random_params(config)
    ids, mask = jnp.full((1, longest), 5), jnp.ones((1, longest), jnp.int32)
    plain = run(config, params, ids, mask)[0]
    for token in (0, longest - 1):
        table = params["embeddings.position.embedding"].at[offset + token].add(1.0 + jnp.arange(16.0))
        moved = run(config, params | {"embeddings.position.embedding": table}, ids, mask)[0]
        assert np.flatnonzero((moved != plain).any(axis=(0, 2))).tolist() == [token]


# --- dropout ---


@given(rate=st.floats(0.01, 0.99), seed=st.integers(0, 2**32 - 1))
def test_dropout_zeroes_its_share_and_keeps_the_mean(rate, seed):
    count = 10_000
    dropped = np.asarray(dropout(jnp.ones((4, count // 4)), rate, row_keys(seed, rows=4)))
    kept = dropped != 0.0
    assert abs(kept.mean() - (1.0 - rate)) < 5.0 * np.sqrt(rate * (1.0 - rate) / count)
    np.testing.assert_allclose(dropped[kept], 2**16 / round((1.0 - rate) * 2**16), rtol=1e-6)  # 16-bit draws


@pytest.mark.parametrize("shape", [(3, 2000, 7), (3, 500, 2, 8), (3, 1001)])
def test_dropout_of_a_row_depends_on_its_own_key(shape):
    x, keys = jnp.ones(shape), row_keys(0, rows=3)
    dropped = np.asarray(dropout(x, 0.5, keys))
    np.testing.assert_array_equal(dropped[1:2], dropout(x[1:2], 0.5, keys[1:2]))
    assert not np.array_equal(dropped[0], dropped[1])
    if len(shape) > 2:  # every element of the last axes is drawn anew
        assert (abs((dropped == 0).mean(axis=1) - 0.5) < 0.1).all()


@pytest.mark.parametrize("rows", [(5,), (2, 3), (2, 3, 4)])
def test_the_gradients_of_a_dense_layer_are_those_of_the_product(rows):
    graph, state = nnx.split(Dense(6, 4, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    x, weights = (jnp.asarray(rng.normal(size=(*rows, size)), jnp.float32) for size in (6, 4))

    def ours(x, state):
        return jnp.sum(nnx.merge(graph, state)(x) * weights)

    def plain(x, state):
        return jnp.sum(jnp.matmul(x, state["kernel"][...]) * weights)

    (ours_x, ours_state), (plain_x, plain_state) = (jax.grad(f, argnums=(0, 1))(x, state) for f in (ours, plain))
    np.testing.assert_allclose(ours_x, plain_x, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours_state["kernel"][...], plain_state["kernel"][...], rtol=1e-5, atol=1e-5)


def test_gradients_in_bfloat16_are_summed_in_float32():
    """They come from many tokens, and from all devices after that: 8 bits of a sum would lose most of the tokens."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(1.0, 0.1, (4096, 3)), jnp.bfloat16)
    ids = jnp.zeros(4096, jnp.int32)
    dense, table = (
        Dense(3, 2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)),
        Embedding(5, 2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)),
    )

    def loss(layer, inputs):
        return layer(inputs).astype(jnp.float32).sum()

    kernel, bias = (nnx.grad(loss)(dense, x)[name][...] for name in ("kernel", "bias"))
    np.testing.assert_allclose(kernel, np.repeat(np.float64(x).sum(axis=0)[:, None], 2, axis=1), rtol=1e-5)
    np.testing.assert_array_equal(bias, [4096.0, 4096.0])
    np.testing.assert_array_equal(nnx.grad(loss)(table, ids)["embedding"][0], [4096.0, 4096.0])


def test_dropout_without_key_or_rate_is_the_identity():
    x = jnp.arange(6.0)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, row_keys(0, rows=6)) is x


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_key_nothing_is_dropped(family):
    config = sizes(family, 0.5, 0.5)
    params = random_params(config)
    assert all(changed_states(config, params))
    assert not any(changed_states(config.without_dropout(), params))
    for states, expected in zip(run(config, params), run(config.without_dropout(), params), strict=True):
        np.testing.assert_array_equal(states, expected)


def test_dropout_is_a_function_of_the_key_and_differs_between_rows():
    config = sizes()
    params = random_params(config)
    first, again, other = (run(config, params, keys=row_keys(seed))[-1] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert jnp.array_equal(IDS[0], IDS[1])
    assert not np.array_equal(first[0], first[1])


@pytest.mark.parametrize("family", ["bert", "distilbert"])
@pytest.mark.parametrize("kind", ["hidden", "attention"])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_each_rate_of_a_schedule_reaches_its_block(family, kind, block):
    scheduled = tuple(0.9 * (index == block) for index in range(3))
    rates = {"hidden": (0.0,) * 3, "attention": (0.0,) * 3} | {kind: scheduled}
    config = sizes(family, hidden_dropout=0.0).with_dropout(**rates)
    assert changed_states(config) == [state > block for state in range(4)]


@pytest.mark.parametrize("family", FAMILIES)
def test_only_distilbert_has_no_dropout_after_the_attention_output(family):
    config = sizes(family).with_dropout(hidden=(0.9, 0.0, 0.0), attention=(0.0,))
    config = dataclasses.replace(config, embedding_dropout=0.0)
    params = random_params(config)
    silent = {name: jnp.zeros_like(params[name]) for name in ("blocks.0.output.kernel", "blocks.0.output.bias")}
    # With a feed-forward network of zeros, only the attention's output is left to drop.
    assert changed_states(config, params | silent)[1] == (family != "distilbert")


def test_one_rate_applies_to_every_layer_and_a_list_to_the_blocks():
    config = sizes(hidden_dropout=0.1)
    one = config.with_dropout((0.2,), (0.3,))
    assert (one.embedding_dropout, one.hidden_dropout, one.attention_dropout) == (0.2, (0.2,) * 3, (0.3,) * 3)
    each = config.with_dropout((0.2, 0.0, 0.4), (0.3,))
    assert (each.embedding_dropout, each.hidden_dropout, each.attention_dropout) == (0.1, (0.2, 0.0, 0.4), (0.3,) * 3)
    none = each.without_dropout()
    assert (none.embedding_dropout, none.hidden_dropout, none.attention_dropout) == (0.0, (0.0,) * 3, (0.0,) * 3)


@pytest.mark.parametrize("rates", [(), (0.1, 0.1), (0.1,) * 4])
@pytest.mark.parametrize("kind", ["hidden", "attention"])
def test_a_schedule_of_another_length_is_refused(kind, rates):
    message = f"{len(rates)} {kind} dropout rates for 3 blocks; give 1 or one each"
    with pytest.raises(ValueError, match=message):
        sizes().with_dropout(**({"hidden": (0.1,), "attention": (0.1,)} | {kind: rates}))
    config = Config.from_dict({"model": {f"{kind}_dropout": rates}})
    with pytest.raises(ConfigError, match=f"model.hidden_dropout / model.attention_dropout: {message}"):
        for_run(sizes(), config)


# The table of the report: which of 12 blocks have which rate, all others 0.1.
REPORT = {
    1: {0.2: (1, 2, 3, 4)}, 2: {0.3: (1, 2, 3, 4)}, 3: {0.4: (1, 2, 3, 4)}, 4: {0.5: (1, 2, 3, 4)},
    5: {0.2: (1, 2, 3, 4, 5, 6)}, 6: {0.3: (1, 2, 3, 4, 5, 6)}, 7: {0.4: (1, 2, 3, 4, 5, 6)},
    8: {0.5: (1, 2, 3, 4, 5, 6)}, 9: {0.5: (1,), 0.4: (2,), 0.3: (3,), 0.2: (4,)},
    10: {0.4: (1,), 0.3: (2,), 0.2: (3,)}, 11: {0.3: (1,), 0.2: (2,)}, 12: {0.2: (1,)},
}  # fmt: skip


@pytest.mark.parametrize("number", REPORT)
def test_dropout_masks_follow_the_report(number):
    of_block = {block: rate for rate, blocks in REPORT[number].items() for block in blocks}
    expected = tuple(of_block.get(block, 0.1) for block in range(1, 13))
    deep = dataclasses.replace(sizes(), num_blocks=12, embedding_dropout=0.15)
    scheduled = for_run(deep, Config.from_dict({"model": {"dropout_schedule": f"mask{number}"}}))
    assert (scheduled.hidden_dropout, scheduled.attention_dropout) == (expected, expected)
    assert scheduled.embedding_dropout == 0.15


def test_the_linear_schedule_interpolates_over_depth():
    rates = {"hidden_dropout": (0.3, 0.1), "attention_dropout": (0.0, 0.5), "dropout_schedule": "linear"}
    scheduled = for_run(sizes(), Config.from_dict({"model": rates}))
    np.testing.assert_allclose(scheduled.hidden_dropout, (0.3, 0.2, 0.1))
    np.testing.assert_allclose(scheduled.attention_dropout, (0.0, 0.25, 0.5))


@pytest.mark.parametrize(
    ("model", "blocks", "message"),
    [
        (
            {"dropout_schedule": "mask3"},
            3,
            "model.dropout_schedule='mask3': mask3 needs one rate, .* and 3 blocks",
        ),
        ({"dropout_schedule": "mask3", "hidden_dropout": (0.1,) * 12}, 12, "mask3 needs one rate"),
        ({"dropout_schedule": "linear"}, 3, "`linear` needs two rates, of the first block and of the last, not"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(model, blocks, message):
    with pytest.raises(ConfigError, match=message):
        for_run(dataclasses.replace(sizes(), num_blocks=blocks), Config.from_dict({"model": model}))


NO_DROPOUT = {"model.hidden_dropout": (0.0,), "model.attention_dropout": (0.0,)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, ""),
        (NO_DROPOUT, "it is off. Set model.hidden_dropout=(0.1,)"),
        ({"model.dropout_masks": "shared"}, "model.dropout_masks='shared' makes it the same"),
        ({**NO_DROPOUT, "model.hidden_dropout": (0.0, 0.0, 0.0)}, ""),  # the embedding layer keeps the checkpoint's
        ({**NO_DROPOUT, "data.augmentation": "crop"}, ""),
        ({**NO_DROPOUT, "contrast.positives": "noise"}, ""),
        ({**NO_DROPOUT, "contrast.weight": 0.0, "mlm.weight": 1.0}, ""),
    ],
)
def test_equal_views_cause_a_warning(values, message):
    config = Config.from_dict({"difference.weight": 0.0, **values})
    about = describe_equal_views(for_run(sizes(), config), config)
    assert message in about if message else not about


@pytest.mark.parametrize(("family", "positions"), [("bert", 1), ("bert", 2), ("mpnet", 2)])
def test_the_first_positions_alone_equal_the_full_output(family, positions):
    config = sizes(family)
    params = random_params(config)
    *inner, last = run(config, params)
    *inner_of_few, last_of_few = run(config, params, last_positions=positions)
    np.testing.assert_allclose(last_of_few, last[:, :positions], rtol=1e-5, atol=1e-5)
    for states, expected in zip(inner_of_few, inner, strict=True):
        np.testing.assert_array_equal(states, expected)


@pytest.mark.parametrize("positions", [None, 2])
def test_the_bias_of_relative_positions_does_not_depend_on_the_layout(positions):
    config = sizes("mpnet")
    module = parameters.bind(parameters.definition(partial(Transformer, config)), random_params(config))
    layout = lay_out(np.asarray(MASK).sum(axis=1)[None], length=5, capacity=13)
    padded, packed = (
        module(rows, last_positions=positions) for rows in (TokenRows(IDS, MASK), TokenRows(IDS, MASK, layout))
    )
    for states, expected in zip(packed["hidden_states"], padded["hidden_states"], strict=True):
        real = np.asarray(MASK[:, : states.shape[1]]) == 1
        np.testing.assert_allclose(np.asarray(states)[real], np.asarray(expected)[real], rtol=1e-5, atol=1e-5)


def test_recomputing_changes_no_gradient():
    params = random_params(sizes())

    def gradients(config: TransformerConfig) -> parameters.Params:
        return jax.jit(jax.grad(lambda params: run(config, params, keys=row_keys(0))[-1].sum()))(params)

    kept, again = (gradients(dataclasses.replace(sizes(), recompute=recompute)) for recompute in (False, True))
    for name, gradient in kept.items():
        np.testing.assert_allclose(again[name], gradient, rtol=1e-4, atol=1e-4, err_msg=name)


# --- conditioning ---


def test_every_token_sees_the_condition_without_dropout():
    config = sizes(hidden_dropout=0.5)
    params = random_params(config)
    condition = jnp.asarray(np.random.default_rng(1).normal(size=(3, 16)), jnp.float32)
    dropped = run(config, params, condition=condition, keys=row_keys(0))
    np.testing.assert_array_equal(dropped[0][:, 0], condition)
    plain, conditioned = run(config, params), run(config, params, condition=condition)
    assert ((plain[1] != conditioned[1]).any(axis=-1) == (MASK == 1))[MASK == 1].all()


def test_the_gradient_reaches_the_condition_instead_of_the_replaced_embedding():
    config = dataclasses.replace(sizes(), num_blocks=1)
    params = random_params(config)
    definition = parameters.definition(partial(Transformer, config))
    only_first = 11
    ids = IDS.at[:, 0].set(only_first)

    def loss(params: parameters.Params, condition: jax.Array) -> jax.Array:
        states = parameters.bind(definition, params)(TokenRows(ids, MASK), condition=condition)["last_hidden_state"]
        return (states[:, 1] ** 2).mean()

    gradients, condition_gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, jnp.ones((3, 16)))
    assert np.abs(condition_gradient).max(axis=1).min() > 0.0
    words = np.abs(gradients["embeddings.word.embedding"]).max(axis=1)
    assert words[only_first] == 0.0
    assert words[6] > 0.0


@pytest.mark.parametrize(("family", "positions"), [("bert", 1), ("mpnet", None)])
def test_heads_that_share_registers_compute_the_same(family, positions):
    """Two heads of 8 features fill 16 lanes."""
    config = dataclasses.replace(sizes(family), lanes=16)
    params, keys = random_params(config), row_keys(0)

    @partial(jax.jit, static_argnums=0)
    def outputs(config: TransformerConfig, params: parameters.Params):
        def loss(params: parameters.Params):
            states = run(config, params, keys=keys, last_positions=positions)[-1]
            weights = MASK.astype(jnp.float32)[:, : states.shape[1], None] * jnp.sin(jnp.arange(16.0))[None, None]
            return (states * weights).sum(), states

        return jax.grad(loss, has_aux=True)(params)

    alone, together = (outputs(dataclasses.replace(config, lanes=lanes), params) for lanes in (1, 16))
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-5), together, alone)


# --- numerics ---


def test_layer_norm_keeps_its_digits_far_from_zero():
    """Mean 100, deviation 0.01: E[x^2] - E[x]^2 in float32 would be noise."""
    rows = (100.0 + 0.01 * np.random.default_rng(0).normal(size=(4, 16))).astype(np.float32)
    exact = rows.astype(np.float64)
    expected = (exact - exact.mean(axis=1, keepdims=True)) / exact.std(axis=1, keepdims=True)
    norm = LayerNorm(16, 1e-12, dtype=jnp.float32)
    np.testing.assert_allclose(norm(jnp.asarray(rows)), expected, atol=2e-3)


def test_the_gradients_of_a_layer_norm_follow_its_formula():
    rng = np.random.default_rng(0)
    rows, weights = (jnp.asarray(rng.normal(size=(2, 3, 16)), jnp.float32) for _ in range(2))
    norm = LayerNorm(16, 1e-5, dtype=jnp.float32)
    definition, params = nnx.split(norm)
    params = jax.tree.map(lambda array: jnp.asarray(rng.normal(size=array.shape), jnp.float32), params)

    def written_out(params: nnx.State, rows: jax.Array) -> jax.Array:
        mean, variance = rows.mean(axis=-1, keepdims=True), rows.var(axis=-1, keepdims=True)
        scale, bias = (jnp.asarray(params[name].get_value())[None, None] for name in ("scale", "bias"))
        return ((rows - mean) / jnp.sqrt(variance + 1e-5) * scale + bias) * weights

    def ours(params: nnx.State, rows: jax.Array) -> jax.Array:
        return nnx.merge(definition, params)(rows) * weights

    ours, expected = (
        jax.grad(lambda *arguments, f=f: f(*arguments).sum(), argnums=(0, 1))(params, rows) for f in (ours, written_out)
    )
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), ours, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_close_to_float32(family):
    config = sizes(family)
    params = random_params(config)
    exact, rounded = run(config, params), run(config, params, dtype=jnp.bfloat16)
    for states, expected in zip(rounded, exact, strict=True):
        assert states.dtype == jnp.bfloat16
        error = np.abs(np.asarray(states, np.float32) - expected)[MASK == 1]
        assert 0.0 < error.mean() < 0.01 * np.abs(expected).mean()


def test_parameters_stay_float32():
    shapes = parameters.shapes(partial(Transformer, sizes(), dtype=jnp.bfloat16))
    assert {shape.dtype for shape in shapes.values()} == {jnp.dtype("float32")}
