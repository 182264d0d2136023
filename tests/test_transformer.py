"""The encoder's own properties. That its numbers are PyTorch's is shown in test_hf.py."""

import dataclasses
import runpy
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
from diffcse_jax.config import SHIPPED, Config
from diffcse_jax.errors import ConfigError
from diffcse_jax.models import hf, layers
from diffcse_jax.models.heads import BatchNorm
from diffcse_jax.models.layers import Dense, Embedding, LayerNorm, dropout
from diffcse_jax.models.transformer import Transformer, TransformerConfig
from diffcse_jax.training.networks import describe_equal_views, sizes_for_run

PAD = 1
IDS = jnp.array([[5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [9, 8, PAD, PAD, PAD]])
MASK = jnp.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
ROWS = TokenRows(IDS, MASK)


def sizes(family: str = "bert", hidden_dropout: float = 0.1) -> TransformerConfig:
    config = hf.transformer_config(hf_config_of(family), source="test")
    config = dataclasses.replace(config, vocab_size=20, max_positions=12, pad_token_id=PAD)
    return config.with_dropout(hidden=(hidden_dropout,), attention=(0.1,))


def random_params(config: TransformerConfig) -> layers.Params:
    """Weights of a trained network's size, biases included: initial ones are too small to tell anything apart."""
    shapes = layers.shapes(partial(Transformer, config))
    random = np.random.default_rng(0)
    return {
        name: jnp.asarray(random.normal(0.0, 0.3, shape.shape), shape.dtype)
        for name, shape in shapes.items()
    }


def row_keys(seed: int, rows: int = len(IDS)) -> jax.Array:
    return jax.random.split(jax.random.key(seed), rows)


def apply(
    config: TransformerConfig, params: layers.Params, rows=ROWS, *, dtype=jnp.float32, **options
):
    definition = layers.definition(partial(Transformer, config, dtype=dtype))
    return layers.bind(definition, params)(rows, **options)


run = jax.jit(apply, static_argnames=("config", "dtype", "last_positions"))


@partial(jax.jit, static_argnums=0, static_argnames=("dtype", "last_positions"))
def gradients_and_states(
    config: TransformerConfig, params: layers.Params, rows: TokenRows, **options
):
    """Of a sum of the last states at real tokens, each times another number."""
    positions = options.get("last_positions")

    def loss(params: layers.Params):
        states = apply(config, params, rows, **options)
        real = jnp.where(
            rows.attention_mask[:, :positions, None] == 1, states[-1].astype(jnp.float32), 0.0
        )
        return (real * jnp.sin(jnp.arange(16.0))[None, None]).sum(), (*states[:-1], real)

    return jax.grad(loss, has_aux=True)(params)


def changed_states(config: TransformerConfig, params: layers.Params) -> list[bool]:
    """For the embedding output and each block, whether dropout changes it."""
    plain, dropped = (
        run(config.with_dropout((0.0,), (0.0,)), params),
        run(config, params, keys=row_keys(0)),
    )
    return [not np.array_equal(*states) for states in zip(plain, dropped, strict=True)]


def test_what_padding_sees_does_not_depend_on_its_length():
    """DiffCSE's loss reads padding. The last padding of the third sentence is outside the windows of its tokens."""
    config = sizes("modernbert")
    params = random_params(config)
    padded = partial(jnp.pad, pad_width=((0, 0), (0, 4)))
    longer = TokenRows(padded(IDS, constant_values=PAD), padded(MASK))
    for states, expected in zip(run(config, params, longer), run(config, params), strict=True):
        np.testing.assert_allclose(states[:, :5], expected, atol=1e-5)


# --- dropout ---


@given(rate=st.floats(0.01, 0.99), seed=st.integers(0, 2**32 - 1))
def test_dropout_zeroes_its_share_and_keeps_the_mean(rate, seed):
    count = 10_000
    dropped = np.asarray(dropout(jnp.ones((4, count // 4)), rate, row_keys(seed, rows=4)))
    kept = dropped != 0.0
    assert abs(kept.mean() - (1.0 - rate)) < 5.0 * np.sqrt(rate * (1.0 - rate) / count)
    # 16-bit draws
    np.testing.assert_allclose(dropped[kept], 2**16 / round((1.0 - rate) * 2**16), rtol=1e-6)


@pytest.mark.parametrize("kind", ["hidden", "attention"])
def test_each_rate_reaches_its_block_if_there_are_keys(kind):
    config = sizes(hidden_dropout=0.0).with_dropout(
        **({"hidden": (0.0,), "attention": (0.0,)} | {kind: (0.0, 0.9, 0)})
    )
    params = random_params(config)
    assert changed_states(config, params) == [False, False, True, True]
    assert not any(changed_states(config.with_dropout((0.0,), (0.0,)), params))


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_only_distilbert_has_no_dropout_after_the_attention_output(family):
    config = sizes(family).with_dropout(hidden=(0.9, 0.0, 0.0), attention=(0.0,))
    config = dataclasses.replace(config, embedding_dropout=0.0)
    params = random_params(config)
    silent = {
        name: jnp.zeros_like(params[name])
        for name in ("blocks.0.output.kernel", "blocks.0.output.bias")
    }
    # With a feed-forward network of zeros, only the attention's output is left to drop.
    assert changed_states(config, params | silent)[1] == (family != "distilbert")


def scheduled(blocks: int, **model) -> tuple:
    config = dataclasses.replace(sizes(), num_blocks=blocks, embedding_dropout=0.15)
    config = sizes_for_run(config, Config.from_dict({"model": model}))
    return config.embedding_dropout, config.hidden_dropout, config.attention_dropout


# The table of the report: which of 12 blocks have which rate, all others 0.1.
FOUR, SIX = (1, 2, 3, 4), (1, 2, 3, 4, 5, 6)
REPORT = {
    1: {0.2: FOUR}, 2: {0.3: FOUR}, 3: {0.4: FOUR}, 4: {0.5: FOUR}, 5: {0.2: SIX}, 6: {0.3: SIX}, 7: {0.4: SIX},
    8: {0.5: SIX}, 9: {0.5: (1,), 0.4: (2,), 0.3: (3,), 0.2: (4,)}, 10: {0.4: (1,), 0.3: (2,), 0.2: (3,)},
    11: {0.3: (1,), 0.2: (2,)}, 12: {0.2: (1,)},
}  # fmt: skip


VARIANTS = runpy.run_path(str(SHIPPED / "studies/dropout_masks.py"))["get_study"]().variants


def test_dropout_masks_follow_the_report():
    for number, rates_of_blocks in REPORT.items():
        of_block = {block: rate for rate, blocks in rates_of_blocks.items() for block in blocks}
        expected = tuple(of_block.get(block, 0.1) for block in range(1, 13))
        variant = VARIANTS[f"SimCSE, mask {number}"]
        rates = {key: variant[f"model.{key}"] for key in ("hidden_dropout", "attention_dropout")}
        assert scheduled(12, **rates) == (0.15, expected, expected)
    # A single rate applies to every layer, embeddings included.
    assert scheduled(3, hidden_dropout=(0.2,), attention_dropout=(0.3,)) == (
        0.2,
        (0.2,) * 3,
        (0.3,) * 3,
    )


@pytest.mark.parametrize("key", ["hidden_dropout", "attention_dropout"])
def test_rates_that_do_not_fit_the_blocks_are_refused(key):
    with pytest.raises(
        ConfigError, match=f"{key}.*: 2 rates for 3 blocks. Give 1 rate, or 3, one for each block"
    ):
        scheduled(3, **{key: (0.1, 0.1)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "only dropout could make them differ"),
        ({"contrast.weight": 0.0, "consistency.weight": 1.0}, "only dropout"),
        (
            {
                "contrast.weight": 0.0,
                "edited_contrast.weight": 1.0,
                "edited_contrast.role": "negative",
            },
            "only dropout",
        ),
        ({"data.augmentation": "crop"}, ""),
    ],
)
def test_equal_views_cause_a_warning(changes, message):
    model = {"hidden_dropout": (0.0,), "attention_dropout": (0.0,)}
    config = Config.from_dict({"model": model, "difference.weight": 0.0, **changes})
    about = describe_equal_views(sizes_for_run(sizes(), config), config)
    assert message in about if message else not about


# --- ways to compute that change nothing ---


@pytest.mark.parametrize(("family", "positions"), [("mpnet", 1), ("modernbert", 3)])
def test_few_positions_and_packed_tokens_have_the_states_of_the_full_output(family, positions):
    config = sizes(family)
    params = random_params(config)
    *inner, last = run(config, params)
    layout = lay_out(np.asarray(MASK).sum(axis=1)[None], length=5, capacity=13)
    for rows in (ROWS, ROWS._replace(layout=layout)):
        ours = run(config, params, rows, last_positions=positions)
        for states, expected in zip(ours, [*inner, last[:, :positions]], strict=True):
            real = np.asarray(MASK[:, : states.shape[1]]) == 1
            np.testing.assert_allclose(
                np.asarray(states)[real], np.asarray(expected)[real], rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize(
    ("family", "options"),
    [("modernbert", {"num_blocks": 2, "windows": (0, 2)}), ("mpnet", {"num_blocks": 2})],
)
def test_heads_that_share_registers_and_recomputed_activations_have_the_same_gradients(
    family, options
):
    config = dataclasses.replace(sizes(family), **options)
    outputs = partial(gradients_and_states, rows=ROWS, keys=row_keys(0), last_positions=2)
    expected = outputs(dataclasses.replace(config, recompute=False), random_params(config))
    for lanes in (1, 16):  # two heads of 8 features fill 16 lanes
        ours = outputs(dataclasses.replace(config, lanes=lanes), random_params(config))
        jax.tree.map(partial(np.testing.assert_allclose, atol=2e-5), ours, expected)


# Four parts of three queries, the last one with padding. The second sentence has padding that sees
# no token.
LONG_MASK = (np.arange(11) < np.array([11, 3])[:, None]).astype(np.int32)
LONG_ROWS = TokenRows(
    jnp.asarray(np.where(LONG_MASK == 1, np.arange(5, 16), PAD)), jnp.asarray(LONG_MASK)
)
LONG_LAYOUT = lay_out(np.array([[11, 3]]), length=11, capacity=16)


@pytest.mark.parametrize(
    ("family", "options", "layout", "positions"),
    [
        ("modernbert", {"windows": (2, 0, 5), "lanes": 16}, LONG_LAYOUT, None),
        ("mpnet", {}, None, 5),
    ],
)
def test_attention_in_parts_has_the_states_and_gradients_of_the_whole(
    family, options, layout, positions
):
    config = dataclasses.replace(sizes(family), **options)
    both, rows = (
        (config, dataclasses.replace(config, most_queries=3)),
        LONG_ROWS._replace(layout=layout),
    )
    outputs = partial(
        gradients_and_states, params=random_params(config), rows=rows, last_positions=positions
    )
    expected, ours = map(outputs, both)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), ours, expected)


def test_dropout_of_attention_in_parts_depends_on_the_key_of_the_row_and_on_the_part():
    config = dataclasses.replace(
        sizes().with_dropout((0.0,), (0.5,)), embedding_dropout=0.0, most_queries=3
    )
    params, keys = random_params(config), row_keys(0, rows=2)
    together = run(config, params, LONG_ROWS, keys=keys)[-1]
    alone = run(config, params, TokenRows(*(each[1:] for each in LONG_ROWS[:2])), keys=keys[1:])[-1]
    np.testing.assert_allclose(together[1:], alone, atol=1e-5)
    # Without positions, equal tokens have equal states, and only the masks tell them apart.
    params["embeddings.position.embedding"] = jnp.zeros((config.max_positions, 16))
    equal = LONG_ROWS._replace(input_ids=jnp.full((2, 11), 5))
    plain, dropped = (
        np.asarray(run(config, params, equal, keys=each)[1][0]) for each in (None, keys)
    )
    np.testing.assert_allclose(plain[:3], plain[3:6], atol=1e-5)
    assert not np.isclose(dropped[:3], dropped[3:6]).all(axis=1).any()


def test_a_kernel_for_attention_has_the_states_and_gradients_of_parts(monkeypatch):
    """On a CPU, XLA takes the place of cuDNN's kernel, with the same arguments."""
    calls, attention, on_gpu = [], jax.nn.dot_product_attention, jax.default_backend() == "gpu"

    def counted(*arguments, implementation: str, **options):
        calls.append(implementation)
        return attention(*arguments, implementation="cudnn" if on_gpu else "xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", counted)
    config = dataclasses.replace(sizes("modernbert"), windows=(0, 5, 0), most_queries=3)
    even = TokenRows(*(jnp.pad(each, ((0, 0), (0, 1))) for each in LONG_ROWS[:2]))
    both = config, dataclasses.replace(config, fused=True)
    outputs = partial(gradients_and_states, params=random_params(config), dtype=jnp.bfloat16)
    # JAX's own attention needs both
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        (expected, (*_, last)), (ours, (*_, our_last)) = (outputs(each, rows=even) for each in both)
    jax.eval_shape(partial(outputs, both[1]), rows=LONG_ROWS)
    for name, one, other in (
        ("states", our_last, last),
        *((name, ours[name], expected[name]) for name in expected),
    ):
        assert np.linalg.norm(one - other) <= 0.03 * np.linalg.norm(other), name
    assert calls == ["cudnn"] * 2  # blocks with a window have none, nor have odd lengths


def test_memory_of_attention_in_parts_holds_no_logits_of_all_pairs():
    length = 1024
    config = dataclasses.replace(
        sizes("modernbert"), num_blocks=1, windows=(0,), max_positions=length
    )
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def planned(config: TransformerConfig) -> int:
        gradient = jax.grad(lambda params, *rows: apply(config, params, TokenRows(*rows))[-1].sum())
        shapes = layers.shapes(partial(Transformer, config))
        return (
            jax.jit(gradient).lower(shapes, ids, ids).compile().memory_analysis().temp_size_in_bytes
        )

    logits = config.num_heads * length**2 * 4
    whole, in_parts = (
        planned(dataclasses.replace(config, most_queries=count)) for count in (length, 64)
    )
    assert in_parts < logits / 2 < logits < whole


# --- conditioning ---


def test_the_condition_has_no_dropout():
    config = sizes(hidden_dropout=0.5)
    params = random_params(config)
    condition = jnp.asarray(np.random.default_rng(1).normal(size=(3, 16)), jnp.float32)
    dropped = run(config, params, condition=condition, keys=row_keys(0))
    np.testing.assert_array_equal(dropped[0][:, 0], condition)


# --- numerics ---


@pytest.mark.parametrize(
    ("norm", "axis"),
    [(BatchNorm(16, affine=False), 0), (LayerNorm(16, 1e-5, dtype=jnp.float32), 1)],
)
def test_norms_keep_their_digits_far_from_zero(norm, axis):
    """Mean 100, deviation 0.01: E[x^2] - E[x]^2 in float32 would be noise."""
    rows = np.random.default_rng(0).normal(100.0, 0.01, (16, 16)).astype(np.float32)
    deviation = np.float64(rows) - rows.mean(axis, dtype=np.float64, keepdims=True)
    expected = deviation / np.sqrt(rows.var(axis, dtype=np.float64, keepdims=True) + 1e-5)
    np.testing.assert_allclose(norm(jnp.asarray(rows)), expected, atol=4e-3)


def test_gradients_in_bfloat16_are_summed_in_float32():
    """They come from many tokens, and from all devices after that: 8 bits of a sum would lose most of the tokens."""
    x = jnp.asarray(np.random.default_rng(0).normal(1.0, 0.1, (4096, 3)), jnp.bfloat16)
    options = {"dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}

    def gradients(layer, inputs):
        return nnx.grad(lambda layer: layer(inputs).astype(jnp.float32).sum())(layer)

    dense, table = (
        gradients(Dense(3, 2, **options), x),
        gradients(Embedding(5, 2, **options), jnp.zeros(4096, int)),
    )
    expected = np.repeat(np.float64(x).sum(axis=0)[:, None], 2, axis=1)
    np.testing.assert_allclose(dense["kernel"][...], expected, rtol=1e-5)
    np.testing.assert_array_equal(dense["bias"][...], [4096.0, 4096.0])
    np.testing.assert_array_equal(table["embedding"][0], [4096.0, 4096.0])
