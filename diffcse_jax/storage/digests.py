"""Digests of what a checkpoint holds, computed when it is saved and again when it is read.

An array's digest is a sum over its elements of a mixture of an element's bits and its position. It is computed where
the array lives: it depends neither on how devices share the array nor on their number, and no array has to be gathered.
A change of one element always changes it, other damage goes unnoticed once in 2^32.
"""

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped, UInt32


def of_arrays(tree: Any) -> dict[str, str]:
    """The digest of each array of a tree, as 8 hexadecimal digits, by its path (`1/mu/encoder.embeddings.word`)."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    sums = jax.device_get([_checksum(array) for _, array in leaves])
    return {_name(path): f"{int(value):08x}" for (path, _), value in zip(leaves, sums, strict=True)}


def of_json(content: Any) -> str:
    """SHA-256 of a JSON document, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _name(path: tuple) -> str:
    """The same for named tuples and for the dicts and lists that they are on disk."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


@jax.jit
def _checksum(array: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    position = jnp.zeros(array.shape, jnp.uint32)
    for axis, size in enumerate(array.shape):
        position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
    mixed = _bits(array) ^ (position * jnp.uint32(0x9E3779B1))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # MurmurHash3's finalizer: one to one
        mixed = (mixed ^ (mixed >> jnp.uint32(shift))) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> jnp.uint32(16)), dtype=jnp.uint32)


def _bits(array: jax.Array) -> jax.Array:
    """The elements' bits as uint32, of types of up to 32 bits."""
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}").astype(jnp.uint32)
