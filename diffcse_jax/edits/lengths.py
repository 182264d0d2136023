"""Edits that change a sentence's length: tokens inserted, tokens dropped (DiffCSE Tables 4 and 15).

Edited sentences have no layout: theirs was made for other lengths, so that their padding is computed.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from diffcse_jax.batch import TokenRows, Vocabulary
from diffcse_jax.edits import Edited, Masked, generate
from diffcse_jax.edits.options import EditOptions
from diffcse_jax.groups import GeneratorConfig
from diffcse_jax.models.forward import Computation, row_keys


class Changed(NamedTuple):
    """Sentences with tokens inserted and dropped."""

    rows: TokenRows  # an inserted token is [MASK]
    inserted: Bool[Array, "rows length"]  # the inserted tokens
    labels: Bool[Array, "rows length"]  # these, and the tokens whose predecessor was dropped


def change_lengths(
    key: PRNGKeyArray, rows: TokenRows, options: EditOptions, *, vocabulary: Vocabulary, max_length: int
) -> Changed:
    """Drops and inserts a random share of tokens, as the edit says.

    Every ordinary token is dropped with probability `delete_ratio`, [CLS] and [SEP] never; every gap between two tokens
    of the original gets a new one with probability `insert_ratio`. A sentence that does not fit into `max_length` loses
    what comes last, and keeps its [SEP] at the end. The token after a dropped one has label 1, which may be [SEP], and
    also where a token was inserted between.

    Args:
        key: what happens to a row is a function of it, the row's number and the position, and not of the padding.
        rows: the sentences.
        options: what the edit does, and its shares.
        vocabulary: the tokenizer's.
        max_length: positions of an edited sentence.

    Returns:
        The sentences, with 0 as padding: of as many positions as before where nothing is inserted, else of twice as
        many, up to `max_length`. TokenRows that the edit leaves at their length are returned as they are.
    """
    insert, delete = options.inserted_share, options.deleted_share
    ids, length = rows.input_ids, rows.input_ids.shape[1]
    nothing = jnp.zeros(ids.shape, bool)
    if not (insert or delete):
        return Changed(rows, nothing, nothing)
    delete_keys, insert_keys = jax.vmap(jax.random.split, out_axes=1)(row_keys(key, len(ids)))

    def drawn(keys: jax.Array, share: float) -> jax.Array:
        return jax.vmap(lambda key: jax.random.bernoulli(key, share, (length,)))(keys)

    real = rows.attention_mask > 0
    has_next = jnp.pad(real[:, 1:], ((0, 0), (0, 1)))  # all real tokens but the last, [SEP]
    dropped = real & ~jnp.isin(ids, jnp.array(vocabulary.special_ids, ids.dtype)) & drawn(delete_keys, delete)
    after_dropped = jnp.pad(dropped[:, :-1], ((0, 0), (1, 0)))
    inserted = has_next & drawn(insert_keys, insert) if insert else nothing
    mask_id = 0 if vocabulary.mask_id is None else vocabulary.mask_id  # read only where something is inserted

    # Every token and the gap after it, in order; then those that are there, side by side.
    def interleaved(tokens: jax.Array, gaps: jax.Array) -> jax.Array:
        return jnp.stack([tokens, gaps], axis=2).reshape(len(ids), 2 * length)

    there = interleaved(real & ~dropped, inserted)
    last = interleaved(real & ~has_next, nothing)
    positions = min(2 * length, max_length) if insert else length
    place = partial(_placed, *_destinations(there, last, positions), positions)
    new_ids = place(interleaved(ids, jnp.full_like(ids, mask_id)))
    labels = place(interleaved(after_dropped, ~nothing))
    attention_mask = place(there.astype(rows.attention_mask.dtype))
    return Changed(TokenRows(new_ids, attention_mask), place(interleaved(nothing, ~nothing)), labels)


def fill(
    frozen: Computation,
    changed: Changed,
    masked: Masked,
    options: EditOptions,
    generator: GeneratorConfig,
    key: PRNGKeyArray,
) -> Edited:
    """The edited sentences: the generator's tokens at inserted and masked ones.

    Args:
        frozen: holds `generator` and `generator_head`, unless the edit is `delete`.
        changed: the sentences with tokens inserted and dropped.
        masked: the same, masked.
        options: which edit it is; of one that replaces nothing, the generator's tokens are used at inserted ones only.
        generator: how the generator's tokens are chosen and where they are used.
        key: of its dropout and of sampling.

    Returns:
        The sentences, whose labels are 1 at inserted tokens, at those that the generator replaced and at those whose
        predecessor was dropped.
    """
    if options.edit == "delete":
        return Edited(changed.rows, changed.labels)
    if options.edit == "insert":
        generator = dataclasses.replace(generator, positions="masked")
    masked = Masked(masked.rows, masked.selected | changed.inserted)
    edited = generate(frozen, changed.rows, masked, generator, key)
    return Edited(edited.rows, edited.replaced | changed.labels)


def _destinations(
    there: Bool[Array, "rows places"], last: Bool[Array, "rows places"], positions: int
) -> tuple[Bool[Array, "rows places"], Int[Array, "rows places"]]:
    """Which places are kept, and the position of each: side by side, the last one within so many positions."""
    counts = jnp.cumsum(there, axis=1)
    end = jnp.minimum(counts[:, -1:], positions) - 1
    return there & ((counts - 1 < end) | last), jnp.where(last, end, counts - 1)


def _placed(
    kept: Bool[Array, "rows places"], destinations: Int[Array, "rows places"], positions: int, values: jax.Array
) -> jax.Array:
    """The values that are kept at their positions, and zeros elsewhere."""
    where = jnp.where(kept, destinations, positions)
    empty = jnp.zeros((positions,), values.dtype)
    return jax.vmap(lambda where, values: empty.at[where].set(values, mode="drop"))(where, values)
