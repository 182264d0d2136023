"""One transformer encoder that is BERT, RoBERTa or DistilBERT by configuration.

The three families share their arithmetic: post-norm blocks of self-attention and a two-layer feed-forward network.
They differ in position numbering (RoBERTa starts behind its padding id), in token types (DistilBERT has none) and in
one dropout (DistilBERT has none behind the attention output). Inputs are single sentences, so token type 0 is added
everywhere.

Dropout is a function of explicit keys, one per row, so that a row is the same whatever it is computed together with; a
call without keys is deterministic. Modules hold no random state.

Hidden states are rows, (batch, length, hidden), or packed tokens, (tokens, hidden), of which `packing` tells.
Norms and activations are computed again in the backward pass: they cost less than keeping what their derivatives need.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key, Shaped

from diffcse_jax.models.packing import Packing, pack, pack_ids, token_positions, token_rows, unpack


def _gelu(x: jax.Array) -> jax.Array:
    """The product x Phi(x) by erf, as PyTorch computes it; jax.nn.gelu's erfc takes twice the time on a CPU."""
    return 0.5 * x * (1.0 + jax.lax.erf(x * 0.5**0.5))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": _gelu,
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
}


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes of an encoder. Dropout rates are tuples with one rate per block."""

    family: str  # "bert", "roberta" or "distilbert"
    vocab_size: int
    hidden_size: int
    num_blocks: int
    num_heads: int
    intermediate_size: int
    max_positions: int  # rows of the position table
    type_vocab_size: int  # 0: no token types
    norm_epsilon: float
    activation: str
    pad_token_id: int
    embedding_dropout: float
    hidden_dropout: tuple[float, ...]
    attention_dropout: tuple[float, ...]

    @property
    def position_offset(self) -> int:
        """The position number of the first token."""
        return self.pad_token_id + 1 if self.family == "roberta" else 0

    @property
    def max_length(self) -> int:
        """Longest sentence, in tokens, that has positions."""
        return self.max_positions - self.position_offset

    def without_dropout(self) -> "TransformerConfig":
        """The same encoder with every rate 0."""
        return self.with_dropout((0.0,), (0.0,))

    def with_dropout(self, hidden: tuple[float, ...], attention: tuple[float, ...]) -> "TransformerConfig":
        """The same encoder with one rate for all blocks, or one per block ("adjusting dropout").

        A single hidden rate is that of the embedding layer too, as in the originals; a list names blocks only, and
        the embedding layer keeps the checkpoint's rate.

        Raises:
            ValueError: a list whose length is neither 1 nor the number of blocks.
        """
        for name, rates in (("hidden", hidden), ("attention", attention)):
            if len(rates) not in (1, self.num_blocks):
                raise ValueError(f"{len(rates)} {name} dropout rates for {self.num_blocks} blocks; give 1 or one each")
        return dataclasses.replace(
            self,
            embedding_dropout=hidden[0] if len(hidden) == 1 else self.embedding_dropout,
            hidden_dropout=hidden * (self.num_blocks // len(hidden)),
            attention_dropout=attention * (self.num_blocks // len(attention)),
        )


class Transformer(nnx.Module):
    """Token ids to hidden states."""

    def __init__(self, config: TransformerConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.embeddings = Embeddings(config, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(Block(config, index, dtype=dtype, rngs=rngs) for index in range(config.num_blocks))

    def __call__(
        self,
        input_ids: Int[Array, "batch length"],
        attention_mask: Int[Array, "batch length"],
        *,
        condition: Float[Array, "batch hidden"] | None = None,
        keys: Key[Array, " batch"] | None = None,
        last_positions: int | None = None,
        packing: Packing | None = None,
    ) -> dict[str, tuple[jax.Array, ...] | jax.Array]:
        """Runs the encoder.

        Args:
            input_ids: token ids.
            attention_mask: 1 for real tokens, 0 for padding.
            condition: vectors to put in place of position 0 of the embedding layer's output, behind its norm and
                dropout (DiffCSE Section 3).
            keys: one dropout key per row; None: no dropout.
            last_positions: the last block computes this many positions only, the first ones; None: all.
            packing: of the attention mask; None: padding is computed too.

        Returns:
            `hidden_states`, a tuple of the embedding output and each block's output, shapes (batch, length, hidden),
            and `last_hidden_state`, the last of them, (batch, last_positions, hidden).
        """
        embedding_keys, *keys_of_blocks = _split(keys, 1 + len(self.blocks))
        states = self.embeddings(input_ids, keys=embedding_keys, packing=packing)
        hidden_states = [unpack(states, packing)]
        if condition is not None:
            hidden_states[0] = hidden_states[0].at[:, 0].set(condition.astype(states.dtype))
            states = pack(hidden_states[0], packing)
        for index, (block, block_keys) in enumerate(zip(self.blocks, keys_of_blocks, strict=True), start=1):
            positions = last_positions if index == len(self.blocks) else None
            states = block(states, attention_mask, keys=block_keys, packing=packing, positions=positions)
            hidden_states.append(states if positions else unpack(states, packing))
        return {"hidden_states": tuple(hidden_states), "last_hidden_state": hidden_states[-1]}


class Embeddings(nnx.Module):
    """Sum of word, position and token-type embeddings, normalised."""

    def __init__(self, config: TransformerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        embed = partial(_embed, features=config.hidden_size, dtype=dtype, rngs=rngs)
        self.word = embed(config.vocab_size)
        self.position = embed(config.max_positions)
        self.token_type = embed(config.type_vocab_size) if config.type_vocab_size else None
        self.norm = layer_norm(config, dtype=dtype, rngs=rngs)
        self.config = config

    def __call__(
        self, input_ids: Int[Array, "batch length"], *, keys: Key[Array, " batch"] | None, packing: Packing | None
    ) -> Float[Array, "*tokens hidden"]:
        pad = self.config.pad_token_id
        positions = pack_ids(self._positions(input_ids), packing, fill=pad)
        input_ids = pack_ids(input_ids, packing, fill=pad)
        is_token = (input_ids != pad)[..., None]
        # The padding row is not trained (PyTorch's padding_idx), though padding has a loss in DiffCSE.
        words = _trained_where(is_token, self.word(input_ids))
        # Nor is RoBERTa's position of padding.
        places = self.position(positions)
        embedded = words + (_trained_where(is_token, places) if self.config.family == "roberta" else places)
        if self.token_type is not None:
            embedded += self.token_type(jnp.zeros_like(input_ids))
        keys = _token_keys(keys, input_ids.shape, packing)
        return dropout(jax.checkpoint(self.norm)(embedded), self.config.embedding_dropout, keys)

    def _positions(self, input_ids: Int[Array, "batch length"]) -> Int[Array, "batch length"]:
        """The position number of every token."""
        if self.config.family != "roberta":
            return jnp.broadcast_to(jnp.arange(input_ids.shape[1]), input_ids.shape)
        # RoBERTa numbers its real tokens from pad + 1; padding has the padding id as position.
        is_token = (input_ids != self.config.pad_token_id).astype(jnp.int32)
        return jnp.cumsum(is_token, axis=1) * is_token + self.config.pad_token_id


class Block(nnx.Module):
    """Self-attention and feed-forward network, each with a residual connection and a norm behind it."""

    def __init__(self, config: TransformerConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.attention = SelfAttention(config, config.attention_dropout[index], dtype=dtype, rngs=rngs)
        self.attention_norm = layer_norm(config, dtype=dtype, rngs=rngs)
        self.intermediate = dense(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)
        self.output = dense(config.intermediate_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.output_norm = layer_norm(config, dtype=dtype, rngs=rngs)
        self.activation = config.activation
        self.output_dropout = config.hidden_dropout[index]
        self.attention_output_dropout = 0.0 if config.family == "distilbert" else self.output_dropout

    def __call__(
        self,
        hidden_states: Float[Array, "*tokens hidden"],
        attention_mask: Int[Array, "batch length"],
        *,
        keys: Key[Array, " batch"] | None,
        packing: Packing | None = None,
        positions: int | None = None,
    ) -> Float[Array, "*outputs hidden"]:
        """The output at all tokens; with `positions` as rows of the first positions, which attend to all."""
        probabilities_keys, attention_keys, output_keys = _split(keys, 3)
        attention = partial(self.attention, hidden_states, attention_mask, keys=probabilities_keys, packing=packing)
        if positions is not None:
            hidden_states, packing = unpack(hidden_states, packing)[:, :positions], None
        attended = attention(queries=hidden_states, query_packing=packing)
        attention_keys, output_keys = (
            _token_keys(part, hidden_states.shape[:-1], packing) for part in (attention_keys, output_keys)
        )
        attended = dropout(attended, self.attention_output_dropout, attention_keys)
        hidden_states = jax.checkpoint(self.attention_norm)(hidden_states + attended)
        transformed = self.output(jax.checkpoint(ACTIVATIONS[self.activation])(self.intermediate(hidden_states)))
        transformed = dropout(transformed, self.output_dropout, output_keys)
        return jax.checkpoint(self.output_norm)(hidden_states + transformed)


class SelfAttention(nnx.Module):
    """Multi-head attention over the real tokens of a sentence, with dropout on the probabilities."""

    def __init__(self, config: TransformerConfig, rate: float, *, dtype: DTypeLike, rngs: nnx.Rngs):
        project = partial(dense, config.hidden_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.query, self.key, self.value, self.output = project(), project(), project(), project()
        self.num_heads = config.num_heads
        self.rate = rate

    def __call__(
        self,
        hidden_states: Float[Array, "*tokens hidden"],
        attention_mask: Int[Array, "batch length"],
        *,
        queries: Float[Array, "*outputs hidden"],
        keys: Key[Array, " batch"] | None,
        packing: Packing | None,
        query_packing: Packing | None,
    ) -> Float[Array, "*outputs hidden"]:
        query = self._heads(self.query(queries), query_packing)
        key, value = (self._heads(part(hidden_states), packing) for part in (self.key, self.value))
        # Softmax in float32 whatever the computation type. It is divided by its sum behind the product with the values,
        # which are fewer, and masked by a sum, which XLA fuses: both halve the time of the forward pass on a CPU.
        logits = jnp.einsum("BHTD,BHSD->BHTS", query, key, preferred_element_type=jnp.float32)
        logits = logits / jnp.sqrt(jnp.float32(query.shape[-1])) + _mask_bias(attention_mask)
        exponentials = jnp.exp(logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True)))
        kept = dropout(exponentials.astype(value.dtype), self.rate, keys)
        attended = jnp.einsum("BHTS,BHSD->BHTD", kept, value, preferred_element_type=jnp.float32)
        attended = (attended / exponentials.sum(axis=-1, keepdims=True)).astype(value.dtype)
        rows = attended.transpose(0, 2, 1, 3)
        return self.output(pack(rows.reshape(*rows.shape[:2], -1), query_packing))

    def _heads(self, states: jax.Array, packing: Packing | None) -> Float[Array, "batch heads length size"]:
        rows = unpack(states, packing)
        return rows.reshape(*rows.shape[:2], self.num_heads, -1).transpose(0, 2, 1, 3)


def _mask_bias(attention_mask: Int[Array, "batch length"]) -> Float[Array, "batch 1 1 length"]:
    """What is added to logits: nothing at real tokens, and what leaves nothing of them at padding."""
    return jnp.where(attention_mask > 0, 0.0, jnp.finfo(jnp.float32).min)[:, None, None, :]


def dropout(x: Shaped[Array, "*shape"], rate: float, keys: Key[Array, "*leading"] | None) -> Shaped[Array, "*shape"]:
    """Zeroes elements with probability `rate` (to 1/65536) and rescales the rest; the identity without keys.

    An element takes 16 random bits, half of what `jax.random.bernoulli` draws, which takes half the time.

    Args:
        x: values.
        keys: a key for each index of the leading axes: for each row, say, or each token.
    """
    if keys is None or rate == 0.0:
        return x
    kept = round((1.0 - rate) * 2**16)  # of 2^16 draws
    pairs = -(-x.shape[-1] // 2)
    shape = (*x.shape[keys.ndim : -1], pairs)
    words = jax.vmap(lambda key: jax.random.bits(key, shape, jnp.uint32))(keys.reshape(-1))
    draws = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(*x.shape[:-1], 2 * pairs)[..., : x.shape[-1]]
    return jnp.where(draws < kept, x / (kept / 2**16), 0.0)


def _token_keys(
    keys: Key[Array, " batch"] | None, shape: tuple[int, ...], packing: Packing | None
) -> Key[Array, "*tokens"] | None:
    """A key for each token, from its row's key and its position; `shape` is that of the tokens."""
    if keys is None:
        return None
    if packing is None:
        keys, positions = jnp.broadcast_to(keys[:, None], shape), jnp.broadcast_to(jnp.arange(shape[1]), shape)
    else:
        keys, positions = token_rows(keys, packing), token_positions(packing)
    return jax.vmap(jax.random.fold_in)(keys.reshape(-1), positions.reshape(-1)).reshape(shape)


def _trained_where(mask: jax.Array, values: jax.Array) -> jax.Array:
    """The values, whose gradient is 0 outside the mask."""
    return jnp.where(mask, values, jax.lax.stop_gradient(values))


def dense(inputs: int, outputs: int, *, bias: bool = True, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Linear:
    """A dense layer with BERT's initialisation, N(0, 0.02)."""
    init = nnx.initializers.normal(0.02)
    return nnx.Linear(
        inputs, outputs, use_bias=bias, kernel_init=init, dtype=dtype, dot_general=_dot_general, rngs=rngs
    )


def _dot_general(x: jax.Array, kernel: jax.Array, dimension_numbers: tuple, **_: object) -> jax.Array:
    """What `nnx.Linear` asks for: the product over the last axis of x and the first of the kernel."""
    del dimension_numbers
    return _product(x, kernel)


@jax.custom_vjp
def _product(x: Float[Array, "*rows inputs"], kernel: Float[Array, "inputs outputs"]) -> Float[Array, "*rows outputs"]:
    """The product x @ kernel, whose backward pass is two plain matrix products.

    Left to differentiation, the gradient of the kernel is a contraction over several axes with a transposed result,
    which XLA computes slowly on a CPU: a SimCSE step takes a sixth longer.
    """
    return jnp.dot(x, kernel)


def _product_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, kernel), (x, kernel)


def _product_backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    flat_x, flat_gradient = (rows.reshape(-1, rows.shape[-1]) for rows in (x, gradient))
    return jnp.dot(flat_gradient, kernel.T).reshape(x.shape), jnp.dot(flat_x.T, flat_gradient)


_product.defvjp(_product_forward, _product_backward)


def layer_norm(config: TransformerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """A layer norm whose statistics are float32, by the two-pass variance: the fast one loses digits."""
    return nnx.LayerNorm(
        config.hidden_size, epsilon=config.norm_epsilon, dtype=dtype, use_fast_variance=False, rngs=rngs
    )


def _embed(rows: int, *, features: int, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Embed:
    return nnx.Embed(rows, features, embedding_init=nnx.initializers.normal(0.02), dtype=dtype, rngs=rngs)


def _split(keys: Key[Array, " batch"] | None, count: int) -> list[Key[Array, " batch"] | None]:
    """`count` new keys for each row."""
    return [None] * count if keys is None else list(jax.vmap(partial(jax.random.split, num=count), out_axes=1)(keys))
