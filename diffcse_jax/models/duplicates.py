"""Duplicates in a batch: texts that say the same and should not be negatives of one another.

Masks are of anchors (rows) and their negatives (columns) in the order of InfoNCE's logits: the positives of all
examples first, then the hard negatives, column by column. An anchor's own positive is never in a mask.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from diffcse_jax.batch import Batch, TokenRows
from diffcse_jax.models.forward import Computation
from diffcse_jax.models.pooling import cosine_similarity, pool, positions_read


def equal_texts(input_ids: Int[Array, "batch views length"]) -> Bool[Array, "batch negatives"]:
    """Where the texts are equal token by token, up to the length that sentences are cut to.

    The positive of another example is a duplicate where one of its two texts, anchor or positive, is one of the two
    texts of this example; a hard negative is one where it is itself one of these.
    """
    anchors, positives, *hard_negatives = (input_ids[:, view] for view in range(input_ids.shape[1]))

    def equal_to_one_of_the_pair(texts: jax.Array) -> jax.Array:
        return _equal(anchors, texts) | _equal(positives, texts)

    blocks = [equal_to_one_of_the_pair(anchors) | equal_to_one_of_the_pair(positives)]
    return _without_own_positives([*blocks, *map(equal_to_one_of_the_pair, hard_negatives)])


def near_duplicates(vectors: Float[Array, "batch views dim"], *, threshold: float) -> Bool[Array, "batch negatives"]:
    """Where a negative is more similar to the anchor than a bound, by the vectors of a guide.

    Args:
        vectors: the guide's.
        threshold: the bound, a cosine; 0: the similarity of the anchor and its own positive, the rule of GISTEmbed
            (Solatorio 2024).
    """
    anchors, *others = (vectors[:, view] for view in range(vectors.shape[1]))
    similarities = [cosine_similarity(anchors, candidates) for candidates in others]
    bound = threshold or jnp.diagonal(similarities[0])[:, None]
    return _without_own_positives([similarity > bound for similarity in similarities])


def share(duplicates: Bool[Array, "batch negatives"]) -> Float[Array, ""]:
    """The share of all negatives that a mask holds."""
    return duplicates.sum().astype(jnp.float32) / (duplicates.size - len(duplicates))


def guide_vectors(frozen: Computation, views: Batch, pooler: str) -> Float[Array, "batch views dim"]:
    """Vectors of all views by the frozen network `guide`, without dropout."""
    guide = frozen.network("guide")

    def pooled(rows: TokenRows) -> jax.Array:
        states = guide(rows, last_positions=positions_read(pooler))["hidden_states"]
        return pool(states, rows.attention_mask, pooler)

    vectors = frozen.map_chunks(pooled, views.rows).astype(jnp.float32)
    return vectors.reshape(-1, views.per_example, vectors.shape[-1])


def _equal(ours: Int[Array, "batch length"], theirs: Int[Array, "batch length"]) -> Bool[Array, "batch batch"]:
    return (ours[:, None] == theirs[None]).all(axis=-1)


def _without_own_positives(blocks: list[jax.Array]) -> Bool[Array, "batch negatives"]:
    duplicates = jnp.concatenate(blocks, axis=1)
    examples, negatives = duplicates.shape
    return duplicates & ~jnp.eye(examples, negatives, dtype=bool)
