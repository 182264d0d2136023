"""Edited sentences: masking, and filling the gaps with a frozen masked LM.

Nothing here carries a gradient. The rules are those of the authors' code, which produced the published numbers
(80/10/10 masks, arg-max of a generator that runs with dropout, its output used at every position); each has the
paper's text as an option.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What masking must know of a tokenizer."""

    size: int
    mask_id: int | None
    special_ids: tuple[int, ...]  # never masked: [CLS], [SEP], [PAD], [UNK], [MASK]


def mask_tokens(
    key: PRNGKeyArray,
    input_ids: Int[Array, "batch length"],
    *,
    vocabulary: Vocabulary,
    ratio: float,
    style: str,
) -> tuple[Int[Array, "batch length"], Bool[Array, "batch length"]]:
    """Masks a random share of the ordinary tokens.

    Args:
        ratio: probability of each ordinary token to be selected.
        style: `bert`: of the selected, 80 % become [MASK], 10 % a random token of the whole vocabulary, 10 % stay;
            `mask`: all become [MASK].

    Returns:
        The masked ids, and which positions were selected.
    """
    select_key, style_key, token_key = jax.random.split(key, 3)
    ordinary = ~jnp.isin(input_ids, jnp.array(vocabulary.special_ids, input_ids.dtype))
    selected = ordinary & jax.random.bernoulli(select_key, ratio, input_ids.shape)
    if style == "mask":
        return jnp.where(selected, vocabulary.mask_id, input_ids), selected
    random_ids = jax.random.randint(token_key, input_ids.shape, 0, vocabulary.size, input_ids.dtype)
    draw = jax.random.uniform(style_key, input_ids.shape)
    edited = jnp.where(draw < 0.8, vocabulary.mask_id, jnp.where(draw < 0.9, random_ids, input_ids))
    return jnp.where(selected, edited, input_ids), selected


def filled_positions(
    selected: Bool[Array, "batch length"], attention_mask: Int[Array, "batch length"], *, positions: str
) -> Bool[Array, "batch length"]:
    """Where the generator's token is used: never at position 0 or in padding, as in the authors' code.

    Args:
        selected: the positions that were masked.
        attention_mask: 1 for real tokens.
        positions: `all` of the others ([SEP] is not spared), or only the `masked` ones.
    """
    real = (attention_mask > 0).at[:, 0].set(False)
    return real & selected if positions == "masked" else real


def choose_token(logits: Float[Array, " vocab"], *, decode: str, key: PRNGKeyArray | None = None) -> Int[Array, ""]:
    """The generator's token.

    Args:
        logits: the generator's output at one position.
        decode: `argmax` or `sample`.
        key: for sampling.
    """
    return jnp.argmax(logits) if decode == "argmax" else jax.random.categorical(key, logits)


def replace_tokens(
    tokens: Int[Array, "batch length"],
    input_ids: Int[Array, "batch length"],
    filled: Bool[Array, "batch length"],
    attention_mask: Int[Array, "batch length"],
) -> tuple[Int[Array, "batch length"], Bool[Array, "batch length"]]:
    """Fills in the generator's tokens; padding becomes id 0, as in the authors' code.

    Args:
        tokens: the generator's.
        input_ids: the original sentences.
        filled: where the generator's token is used.
        attention_mask: 1 for real tokens.

    Returns:
        The edited ids, and where they differ from the original (real tokens only).
    """
    edited = jnp.where(filled, tokens.astype(input_ids.dtype), input_ids) * attention_mask.astype(input_ids.dtype)
    return edited, (edited != input_ids) & (attention_mask > 0)
