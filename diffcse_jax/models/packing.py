"""Convert between rows of a batch, (rows, length, ...), and packed tokens, (tokens, ...).

If a batch has a layout, its packed tokens are the real tokens. Otherwise they are all positions, so that networks are
written once for both. Values at real tokens are the same in both cases, and nothing reads values at padding.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, Shaped

from diffcse_jax.batch import TokenRows


def pack_ids(ids: Int[Array, "rows length"], rows: TokenRows, fill: int) -> Int[Array, " tokens"]:
    """Return the integers of the tokens, and `fill` in unused slots."""
    if rows.layout is None:
        return ids.reshape(-1)
    ids = ids.reshape(rows.layout.slots.shape)
    packed = jax.vmap(lambda ids, where: ids.at[where].get(mode="fill", fill_value=fill))(ids, rows.layout.positions)
    return packed.reshape(-1)


def pack(states: Float[Array, "rows length hidden"], rows: TokenRows) -> Float[Array, "tokens hidden"]:
    """Return the states of the tokens."""
    if rows.layout is None:
        return states.reshape(-1, states.shape[-1])
    states = states.reshape(*rows.layout.slots.shape, states.shape[-1])
    return jax.vmap(_gather)(states, rows.layout.positions, rows.layout.slots).reshape(-1, states.shape[-1])


def unpack(states: Float[Array, "tokens hidden"], rows: TokenRows) -> Float[Array, "rows length hidden"]:
    """Return the states as rows, with zeros at padding that was left out. The inverse of `pack`."""
    if rows.layout is None:
        return states.reshape(*rows.input_ids.shape, states.shape[-1])
    states = states.reshape(*rows.layout.positions.shape, -1)
    unpacked = jax.vmap(_gather)(states, rows.layout.slots, rows.layout.positions)
    return unpacked.reshape(*rows.input_ids.shape, states.shape[-1])


def token_keys(keys: Key[Array, " rows"], rows: TokenRows, positions: int | None = None) -> Key[Array, "*tokens"]:
    """Return a key for each token. It depends on the row's key and the position, so it is the same in every layout.

    Args:
        keys: One key per row.
        rows: The rows.
        positions: Number of first positions to return keys for, as rows. None: all tokens.
    """
    if rows.layout is None or positions is not None:
        numbers = jnp.arange(positions or rows.input_ids.shape[1])
        by_row = jax.vmap(lambda key: jax.vmap(jax.random.fold_in, (None, 0))(key, numbers))(keys)
        return by_row if positions else by_row.reshape(-1)
    length, where = rows.input_ids.shape[1], rows.layout.positions
    of_rows = jax.vmap(lambda keys, rows: keys[rows])(keys.reshape(len(where), -1), where // length)
    return jax.vmap(jax.random.fold_in)(of_rows.reshape(-1), where.reshape(-1) % length)


@jax.custom_vjp
def _gather(
    values: Shaped[Array, "from hidden"], indices: Int[Array, " to"], inverse: Int[Array, " from"]
) -> Shaped[Array, "to hidden"]:
    """Return `values[indices]`, with zeros where an index is out of bounds.

    Each index occurs once, so the gradient is a gather by the inverse. Automatic differentiation would make it a
    scatter-add, which is slow.
    """
    del inverse
    return values.at[indices].get(mode="fill", fill_value=0)


def _gather_forward(values: jax.Array, indices: jax.Array, inverse: jax.Array) -> tuple[jax.Array, tuple]:
    return _gather(values, indices, inverse), (indices, inverse)


def _gather_backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None, None]:
    indices, inverse = saved
    return _gather(gradient, inverse, indices), None, None


_gather.defvjp(_gather_forward, _gather_backward)
