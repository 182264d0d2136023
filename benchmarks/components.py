"""Time parts of a network and their alternatives: the reasons why the parts are built as they are.

    python -m benchmarks.components --output benchmarks/results/NAME.json

All variants of a part compute the same result (dropout draws from the same distribution). They run
in this process and take turns. A ratio above 1 means that the alternative takes longer than the
part.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import measure, workload
from diffcse_jax.batch import TokenRows
from diffcse_jax.errors import reported_to_user
from diffcse_jax.losses.diffcse import TOKENS_AT_ONCE
from diffcse_jax.models import layers, transformer
from diffcse_jax.models.heads import MaskedLMHead
from diffcse_jax.models.hf import transformer_config

AS_IS = "as it is"
# Each variant computes once, and may return before it has finished.
Variants = Mapping[str, Callable[[], Any]]


class LibraryAttention(transformer.SelfAttention):
    """Attention by `jax.nn.dot_product_attention`, which has no dropout."""

    def __call__(
        self, hidden_states: jax.Array, rows: TokenRows, bias: jax.Array, **_: Any
    ) -> jax.Array:
        del bias
        shape = (*rows.input_ids.shape, self.num_heads, -1)
        query, key, value = (
            part(hidden_states).reshape(shape) for part in (self.query, self.key, self.value)
        )
        mask = (rows.attention_mask > 0)[:, None, None, :]
        attended = jax.nn.dot_product_attention(query, key, value, mask=mask)
        return self.output(attended.reshape(hidden_states.shape))


def attention(size: str, rows: int, length: int, backward: bool) -> Variants:
    """Compare attention without dropout, including its dense layers."""
    config = transformer_config(workload.ENCODERS[size], source=size)
    states, sentences = _normal(rows * length, config.hidden_size), _sentences(rows, length)
    real = sentences.attention_mask.reshape(-1, 1) > 0

    def of(module: type[transformer.SelfAttention]) -> Callable[[], Any]:
        layer = module(config, 0, dtype=jnp.float32, rngs=nnx.Rngs(0))
        definition, params = nnx.split(layer)

        def apply(params: nnx.State, states: jax.Array) -> jax.Array:
            apply, bias = (
                nnx.merge(definition, params),
                transformer.logit_bias(sentences.attention_mask),
            )
            attended = apply(states, sentences, bias, keys=None, positions=None)
            return jnp.where(real, attended, 0.0).sum()

        return partial(
            jax.jit(jax.grad(apply, argnums=(0, 1)) if backward else apply), params, states
        )

    return {
        AS_IS: of(transformer.SelfAttention),
        "jax.nn.dot_product_attention": of(LibraryAttention),
    }


def block(size: str, rows: int, length: int) -> Variants:
    """Compare the gradients of a block without dropout."""
    config = transformer_config(workload.ENCODERS[size], source=size)
    states, sentences = _normal(rows * length, config.hidden_size), _sentences(rows, length)

    def of(recompute: bool) -> Callable[[], Any]:
        sizes = dataclasses.replace(config, recompute=recompute)
        definition, params = nnx.split(
            transformer.Block(sizes, 0, dtype=jnp.float32, rngs=nnx.Rngs(0))
        )

        def apply(params: nnx.State, states: jax.Array) -> jax.Array:
            bias = transformer.logit_bias(sentences.attention_mask)
            return jnp.square(
                nnx.merge(definition, params)(states, sentences, bias, keys=None)
            ).sum()

        return partial(jax.jit(jax.grad(apply, argnums=(0, 1))), params, states)

    return {AS_IS: of(recompute=True), "train.recompute=off": of(recompute=False)}


def dropout(size: str, tokens: int) -> Variants:
    """Compare ways to compute dropout of hidden states, with a key for each token."""
    states = _normal(tokens, workload.ENCODERS[size]["hidden_size"])

    def keys(impl: str) -> jax.Array:
        return jax.vmap(jax.random.fold_in, (None, 0))(
            jax.random.key(0, impl=impl), jnp.arange(tokens)
        )

    def full_words(states: jax.Array, keys: jax.Array) -> jax.Array:
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, states.shape[1:]))(keys)
        return jnp.where(kept, states / 0.9, 0.0)

    def bitcast(states: jax.Array, keys: jax.Array) -> jax.Array:
        words = jax.vmap(lambda key: jax.random.bits(key, (states.shape[1] // 2,), jnp.uint32))(
            keys
        )
        draws = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(states.shape)
        return jnp.where(draws < round(0.9 * 2**16), states / 0.9, 0.0)

    halves = jax.jit(partial(layers.dropout, rate=0.1))
    variants = {AS_IS: partial(halves, states, keys=keys("threefry2x32"))}
    variants["halves by a bitcast"] = partial(jax.jit(bitcast), states, keys("threefry2x32"))
    variants["a word for each element"] = partial(jax.jit(full_words), states, keys("threefry2x32"))
    for impl in ("rbg", "unsafe_rbg", "philox2x32", "philox4x32"):
        variants[impl] = partial(halves, states, keys=keys(impl))
    return variants


def dense(size: str, rows: int, length: int) -> Variants:
    """Compare ways to compute the gradients of a dense layer."""
    hidden, inner = (workload.ENCODERS[size][name] for name in ("hidden_size", "intermediate_size"))
    states, kernel = _normal(rows, length, hidden), _normal(hidden, inner)

    def gradients(product: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[[], Any]:
        loss = lambda states, kernel: jnp.square(product(states, kernel)).sum()  # noqa: E731
        return partial(jax.jit(jax.grad(loss, argnums=(0, 1))), states, kernel)

    return {AS_IS: gradients(layers.matmul), "left to differentiation": gradients(jnp.dot)}


def gelu(size: str, tokens: int) -> Variants:
    """Compare ways to compute the activation of the feed-forward network."""
    states = _normal(tokens, workload.ENCODERS[size]["intermediate_size"])
    exact = partial(jax.nn.gelu, approximate=False)
    return {
        AS_IS: partial(jax.jit(layers.ACTIVATIONS["gelu"]), states),
        "jax.nn.gelu": partial(jax.jit(exact), states),
    }


def vocabulary(size: str, tokens: int) -> Variants:
    """Compare ways to choose the generator's tokens."""
    config = transformer_config(workload.GENERATORS[size], source=size)
    head = MaskedLMHead(config, rngs=nnx.Rngs(0))
    states, words = (
        _normal(tokens, config.hidden_size),
        _normal(config.vocab_size, config.hidden_size),
    )

    def at_once(count: int) -> Callable[[], Any]:
        choose = lambda state, words: jnp.argmax(head(state, words))  # noqa: E731
        return partial(
            jax.jit(
                lambda states, words: jax.lax.map(
                    partial(choose, words=words), states, batch_size=count
                )
            ),
            states,
            words,
        )

    return {AS_IS: at_once(TOKENS_AT_ONCE), "all tokens at once": at_once(tokens)}


def _sentences(rows: int, length: int) -> TokenRows:
    """Return rows of increasing lengths, from half of `length`. Their tokens do not matter."""
    lengths = jnp.linspace(length // 2, length, rows).astype(jnp.int32)
    mask = (jnp.arange(length)[None] < lengths[:, None]).astype(jnp.int32)
    return TokenRows(jnp.ones_like(mask), mask)


def _normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(len(shape)), shape)


def measured(variants: Variants, rounds: int) -> dict[str, Any]:
    """Return the median seconds of each variant, and the ratios of the alternatives to the part."""
    for compute in variants.values():
        jax.block_until_ready(compute())
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, compute in variants.items():
            start = time.perf_counter()
            jax.block_until_ready(compute())
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {name: median / medians[AS_IS] for name, median in medians.items() if name != AS_IS}
    return {"seconds": medians, "ratios": ratios}


def main(argv: list[str]) -> dict[str, Any]:
    """Measure all parts, write the record and return it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=workload.ENCODERS, default="minilm")
    parser.add_argument("--sentences", type=int, default=64)
    parser.add_argument(
        "--rounds", type=int, default=15, help="turns of each variant (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=0, help="number of cores; 0: all")
    parser.add_argument("--output", type=Path, help="JSON file for the record (default: print it)")
    options = parser.parse_args(argv)
    if options.sentences < 1 or options.rounds < 1:
        parser.error("--sentences and --rounds must be at least 1")
    measure.use_cores(options.threads)
    size, rows = options.size, options.sentences
    parts = {
        f"attention, {length} tokens, {'backward' if backward else 'forward'}": partial(
            attention, size, rows, length, backward
        )
        for length in (32, 64)
        for backward in (False, True)
    } | {
        "block, backward": partial(block, size, rows, 32),
        "dropout": partial(dropout, size, 32 * rows),
        "dense layer, backward": partial(dense, size, rows, 32),
        "gelu": partial(gelu, size, 32 * rows),
        "vocabulary": partial(vocabulary, size, 56 * rows),
    }
    results = {name: measured(build(), options.rounds) for name, build in parts.items()}
    settings = {"size": size, "sentences": rows, "rounds": options.rounds}
    record = {"device": jax.devices()[0].device_kind, "settings": settings, "parts": results}
    return measure.write_record(options.output, "benchmarks.components", argv, record)


if __name__ == "__main__":
    with reported_to_user():
        main(sys.argv[1:])
