"""Second views that the generator made (SimCSE Table 1, "MLM k %"); those of other kinds come with the data."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from diffcse_jax.batch import Batch, TokenRows
from diffcse_jax.edits import generate, mask_tokens
from diffcse_jax.groups import RunConfig
from diffcse_jax.models.forward import Computation, fold_in_name


def generated_second_views(config: RunConfig, frozen: Computation, views: Batch, key: PRNGKeyArray) -> Batch:
    """The batch, with words of the second views masked and filled by the generator where `data.augmentation` is `mlm`.

    Args:
        config: the run.
        frozen: the frozen networks.
        views: the batch.
        key: for this alone.
    """
    data = config.data
    if data.augmentation != "mlm":
        return views
    ids = views.input_ids[:, 1]
    rows = TokenRows(ids, views.attention_mask[:, 1])
    masked = mask_tokens(
        fold_in_name(key, "mask"),
        rows,
        vocabulary=frozen.networks.vocabulary,
        ratio=data.augmentation_ratio,
        style="mask",
    )
    generator = dataclasses.replace(config.generator, positions="masked")
    edited = generate(frozen, rows, masked, generator, fold_in_name(key, "generator"))
    second = jnp.where(rows.attention_mask > 0, edited.rows.input_ids, ids)
    return views._replace(input_ids=views.input_ids.at[:, 1].set(second))
