"""Real tokens side by side, without the padding between them.

Nearly all of a transformer treats each token for itself: dense layers, norms, dropout. On packed tokens these cost what
the text costs, not what its longest sentence would; attention alone needs rows, and takes them from `unpack`.

Packing changes no result: the value at a real token is the same, and those at padding are read by nobody.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped


class Packing(NamedTuple):
    """Where the real tokens of padded rows lie in a packed array, (blocks * capacity, ...).

    Each block holds the tokens of a part of the rows.
    """

    positions: Int[Array, "blocks capacity"]  # in the block's rows, flattened; their size where a slot is unused
    slots: Int[Array, "blocks size"]  # the inverse: of each position of the rows; `capacity` where there is padding
    row_length: int


def blocks_of(rows: int) -> int:
    """The parts that rows are taken in, one per device, so that gathering tokens moves nothing between devices."""
    return math.gcd(rows, jax.device_count())


def pack_rows(attention_mask: Int[Array, "rows length"], real_share: float) -> Packing | None:
    """Lays out the real tokens of rows.

    Args:
        attention_mask: 1 for real tokens.
        real_share: the share of real positions in the fullest block, or more. Tokens beyond it would be lost.

    Returns:
        The layout; None where all positions may be real, so that nothing would be gained.
    """
    if real_share >= 1.0:
        return None
    rows, length = attention_mask.shape
    blocks = blocks_of(rows)
    size = rows // blocks * length
    capacity = math.ceil(real_share * size)
    real = attention_mask.reshape(blocks, size) > 0
    positions = jax.vmap(lambda real: jnp.nonzero(real, size=capacity, fill_value=size)[0])(real)
    slots = jnp.where(real, jnp.cumsum(real, axis=1) - 1, capacity)
    return Packing(positions, slots, length)


def pack_ids(ids: Int[Array, "rows length"], packing: Packing | None, fill: int) -> Int[Array, "*tokens"]:
    """Integers of the real tokens, and `fill` in unused slots; the rows themselves without a packing."""
    if packing is None:
        return ids
    ids = ids.reshape(packing.slots.shape)
    packed = jax.vmap(lambda ids, where: ids.at[where].get(mode="fill", fill_value=fill))(ids, packing.positions)
    return packed.reshape(-1)


def pack(states: Float[Array, "rows length hidden"], packing: Packing | None) -> Float[Array, "*tokens hidden"]:
    """The states of the real tokens; the rows themselves without a packing."""
    if packing is None:
        return states
    states = states.reshape(*packing.slots.shape, states.shape[-1])
    return jax.vmap(_gather)(states, packing.positions, packing.slots).reshape(-1, states.shape[-1])


def unpack(states: Float[Array, "*tokens hidden"], packing: Packing | None) -> Float[Array, "rows length hidden"]:
    """The states as rows, with zeros at padding; the inverse of `pack`."""
    if packing is None:
        return states
    states = states.reshape(*packing.positions.shape, -1)
    rows = jax.vmap(_gather)(states, packing.slots, packing.positions)
    return rows.reshape(-1, packing.row_length, states.shape[-1])


def token_rows(values: Shaped[Array, " rows"], packing: Packing) -> Shaped[Array, " tokens"]:
    """For each packed token the value of its row."""
    rows = packing.positions // packing.row_length
    return jax.vmap(lambda values, rows: values[rows])(values.reshape(len(rows), -1), rows).reshape(-1)


def token_positions(packing: Packing) -> Int[Array, " tokens"]:
    """For each packed token its position in its row."""
    return packing.positions.reshape(-1) % packing.row_length


@jax.custom_vjp
def _gather(
    values: Shaped[Array, "from hidden"], indices: Int[Array, " to"], inverse: Int[Array, " from"]
) -> Shaped[Array, "to hidden"]:
    """`values[indices]`, zeros where an index is out of bounds.

    An index occurs once, so the gradient is a gather too, by the inverse; left to differentiation it would be a
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
