"""Edited sentences: masking, and filling the gaps with a frozen masked LM; `lengths.py` inserts and drops tokens.

Nothing here carries a gradient. The rules are those of the authors' code, which produced the published numbers
(80/10/10 masks, arg-max of a generator that runs with dropout, its output used at every position); each has the
paper's text as an option.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from diffcse_jax.batch import TokenRows, Vocabulary
from diffcse_jax.groups import GeneratorConfig
from diffcse_jax.models.forward import FEW, MOST, Computation, row_keys
from diffcse_jax.models.packing import token_keys

TOKENS_AT_ONCE = 1024  # whose logits over the vocabulary the generator holds


class Masked(NamedTuple):
    """Masked sentences."""

    rows: TokenRows
    selected: Bool[Array, "rows length"]  # which positions were masked


class Edited(NamedTuple):
    """Sentences that differ from the original."""

    rows: TokenRows
    replaced: Bool[Array, "rows length"]  # where they do; with other edits: inserted, or a dropped token's successor


def mask_tokens(key: PRNGKeyArray, rows: TokenRows, *, vocabulary: Vocabulary, ratio: float, style: str) -> Masked:
    """Masks a random share of the ordinary tokens.

    Args:
        key: a row's mask is a function of it, the row's number and the position, and not of the padding.
        rows: the sentences.
        vocabulary: the tokenizer's.
        ratio: probability of each ordinary token to be selected.
        style: `bert`: of the selected, 80 % become [MASK], 10 % a random token of the whole vocabulary, 10 % stay;
            `mask`: all become [MASK].
    """
    ids = rows.input_ids
    select_keys, style_keys, id_keys = jax.vmap(partial(jax.random.split, num=3), out_axes=1)(row_keys(key, len(ids)))
    length = (ids.shape[1],)
    ordinary = ~jnp.isin(ids, jnp.array(vocabulary.special_ids, ids.dtype))
    selected = ordinary & jax.vmap(lambda key: jax.random.bernoulli(key, ratio, length))(select_keys)
    masked = jnp.array(vocabulary.mask_id, ids.dtype)
    if style == "bert":
        random_ids = jax.vmap(lambda key: jax.random.randint(key, length, 0, vocabulary.size, ids.dtype))(id_keys)
        draw = jax.vmap(lambda key: jax.random.uniform(key, length))(style_keys)
        masked = jnp.where(draw < 0.8, masked, jnp.where(draw < 0.9, random_ids, ids))
    return Masked(rows._replace(input_ids=jnp.where(selected, masked, ids)), selected)


def generate(
    frozen: Computation, rows: TokenRows, masked: Masked, options: GeneratorConfig, key: PRNGKeyArray
) -> Edited:
    """The generator's sentences.

    Args:
        frozen: holds `generator` and `generator_head`.
        rows: the original sentences.
        masked: the same, masked.
        options: how the generator's tokens are chosen and where they are used.
        key: of its dropout and of sampling.
    """
    generator, head = frozen.network("generator"), frozen.network("generator_head")
    word_embeddings = frozen.params["generator.embeddings.word.embedding"]
    shares = FEW if options.positions == "masked" else MOST

    def choose_one(token: tuple[jax.Array, jax.Array | None]) -> jax.Array:
        state, key = token
        return choose_token(head(state, word_embeddings), key, options.temperature)

    def choose(states: jax.Array, keys: jax.Array | None) -> jax.Array:
        return jax.lax.map(choose_one, (states, keys), batch_size=TOKENS_AT_ONCE)

    def tokens_of(
        rows: TokenRows, filled: jax.Array, dropout_keys: jax.Array, decode_keys: jax.Array | None
    ) -> jax.Array:
        states = generator(rows, keys=dropout_keys)["last_hidden_state"]
        return frozen.gather_positions(choose, filled, states, decode_keys, shares=shares)

    dropout_keys, decode_keys = (row_keys(part, len(rows.input_ids)) for part in jax.random.split(key))
    by_token: Key[Array, "rows length"] | None = None
    if options.decode == "sample":
        by_token = token_keys(decode_keys, rows, positions=rows.input_ids.shape[1])
    filled = filled_positions(masked.selected, rows.attention_mask, positions=options.positions)
    tokens = frozen.map_chunks(tokens_of, masked.rows, filled, dropout_keys, by_token)
    return replace_tokens(tokens, rows, filled)


def filled_positions(
    selected: Bool[Array, "rows length"], attention_mask: Int[Array, "rows length"], *, positions: str
) -> Bool[Array, "rows length"]:
    """Where the generator's token is used: never at position 0 or in padding, as in the authors' code.

    Args:
        selected: the positions that were masked.
        attention_mask: 1 for real tokens.
        positions: `all` of the others ([SEP] is not spared), or only the `masked` ones.
    """
    real = (attention_mask > 0).at[:, 0].set(False)
    return real & selected if positions == "masked" else real


def choose_token(logits: Float[Array, " vocab"], key: PRNGKeyArray | None, temperature: float = 1.0) -> Int[Array, ""]:
    """The generator's token: the most probable one, or one that is sampled.

    Args:
        logits: the generator's output at one position.
        key: of the sample; None: the most probable token.
        temperature: of the sample; below 1 it comes near the most probable token, above 1 near any.
    """
    return jnp.argmax(logits) if key is None else jax.random.categorical(key, logits / temperature)


def replace_tokens(tokens: Int[Array, "rows length"], rows: TokenRows, filled: Bool[Array, "rows length"]) -> Edited:
    """Fills in the generator's tokens; padding becomes id 0, as in the authors' code.

    Args:
        tokens: the generator's.
        rows: the original sentences.
        filled: where the generator's token is used.

    Returns:
        The edited sentences, and where they differ from the original (real tokens only).
    """
    ids, mask = rows.input_ids, rows.attention_mask
    edited = jnp.where(filled, tokens.astype(ids.dtype), ids) * mask.astype(ids.dtype)
    return Edited(rows._replace(input_ids=edited), (edited != ids) & (mask > 0))
