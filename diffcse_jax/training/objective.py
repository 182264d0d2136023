"""The objective of a step: networks and losses meet here and nowhere else.

SimCSE, SimCSE++, DiffCSE and their sums are this one function under other weights. What has weight 0 is not computed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from diffcse_jax.config import Config
from diffcse_jax.edits import mask_tokens, replace_tokens
from diffcse_jax.models import parameters
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.pooling import pool
from diffcse_jax.objectives import contrastive, decorrelation, difference
from diffcse_jax.training.networks import Networks

Metrics = dict[str, jax.Array]


class Views(NamedTuple):
    """A batch as rows of one sentence each: the views of an example are neighbours, row = example * views + view."""

    input_ids: Int[Array, "rows length"]
    attention_mask: Int[Array, "rows length"]
    count: int  # views per example: 2, or 3 with hard negatives


class Masked(NamedTuple):
    """Masked rows, and which positions were masked."""

    input_ids: Int[Array, "rows length"]
    selected: Bool[Array, "rows length"]


class Edited(NamedTuple):
    """Rows filled in by the generator, and where they differ from the original."""

    input_ids: Int[Array, "rows length"]
    replaced: Bool[Array, "rows length"]


class Corruptions(NamedTuple):
    """The edited inputs of a step; None where no objective needs them. They carry no gradient."""

    edited: Edited | None
    masked: Masked | None  # of the auxiliary masked LM


def as_views(batch: dict[str, Int[Array, "batch columns length"]]) -> Views:
    """The rows of a batch; a single sentence is its own second view, which dropout tells apart.

    Interleaving the views keeps each example's rows on one device, so that sharding the batch moves nothing.
    """
    count = max(2, batch["input_ids"].shape[1])
    rows = (
        jnp.broadcast_to(batch[name], (len(batch[name]), count, batch[name].shape[2])).reshape(-1, batch[name].shape[2])
        for name in ("input_ids", "attention_mask")
    )
    return Views(*rows, count)


def corrupt(networks: Networks, config: Config, frozen: Params, views: Views, key: PRNGKeyArray) -> Corruptions:
    """Masks every row anew and lets the frozen generator fill the gaps, where an objective needs it."""
    mask_key, generator_key, mlm_key = jax.random.split(key, 3)
    edited = masked = None
    if config.uses_difference:
        masked_rows = Masked(
            *mask_tokens(
                mask_key,
                views.input_ids,
                vocabulary=networks.vocabulary,
                ratio=config.difference.mask_ratio,
                style=config.difference.mask_style,
            )
        )
        edited = generate(networks, config, frozen, views, masked_rows, generator_key)
    if "mlm" in config.weights:
        masked = Masked(
            *mask_tokens(
                mlm_key, views.input_ids, vocabulary=networks.vocabulary, ratio=config.mlm.mask_ratio, style="bert"
            )
        )
    return Corruptions(edited, masked)


def generate(
    networks: Networks, config: Config, frozen: Params, views: Views, masked: Masked, key: PRNGKeyArray
) -> Edited:
    """The generator's sentences for masked rows."""
    dropout_key, decode_key = jax.random.split(key)
    generator = networks.bind("generator", frozen)
    hidden_states = generator(masked.input_ids, views.attention_mask, key=dropout_key)["last_hidden_state"]
    logits = networks.bind("generator_head", frozen)(hidden_states, frozen["generator.embeddings.word.embedding"])
    return Edited(
        *replace_tokens(
            logits,
            views.input_ids,
            masked.selected,
            views.attention_mask,
            decode=config.generator.decode,
            positions=config.generator.positions,
            key=decode_key,
        )
    )


def objective(
    params: Params,
    batch_stats: Params,
    networks: Networks,
    config: Config,
    views: Views,
    corruptions: Corruptions,
    key: PRNGKeyArray,
) -> tuple[Float[Array, ""], tuple[Metrics, Params]]:
    """The weighted sum of losses of one batch.

    Args:
        params: trained parameters of all networks.
        batch_stats: running statistics of the projector's BatchNorm.
        corruptions: edited inputs from `corrupt`.
        key: dropout key.

    Returns:
        The loss, and (named metrics, new batch statistics).
    """
    encoder_key, discriminator_key, mlm_key = jax.random.split(key, 3)
    encoder = networks.bind("encoder", params)
    projector = networks.bind("projector", params, batch_stats) if networks.projector else None

    def embed(rows: slice, key: PRNGKeyArray | None) -> tuple[jax.Array, jax.Array]:
        attention_mask = views.attention_mask[rows]
        states = encoder(views.input_ids[rows], attention_mask, key=key)["hidden_states"]
        pooled = pool(states, attention_mask, config.model.pooler)
        projected = projector(pooled) if projector else pooled
        return pooled.astype(jnp.float32), projected.astype(jnp.float32)

    pooled, projected = embed(slice(None), encoder_key)
    if projector:
        batch_stats = parameters.prefixed(parameters.batch_stats_of(projector), "projector")
    z1, z2, *hard = jnp.moveaxis(projected.reshape(-1, views.count, projected.shape[-1]), 1, 0)

    losses, metrics = {}, _similarity_metrics(z1, z2)
    if "contrast" in config.weights:
        off_dropout = None
        if config.contrast.negatives == "off_dropout":
            off_dropout = embed(slice(None, None, views.count), None)[1]
        losses["contrast"] = _contrast(config, z1, z2, hard, off_dropout)
    if "dcl" in config.weights:
        per_dimension = decorrelation.dimension_contrast(
            z1, z2, temperature=config.dcl.temperature, form=config.dcl.form
        )
        losses["dcl"] = per_dimension.mean() if config.dcl.form == "code" else per_dimension.sum()
    if config.uses_difference:
        condition = projected if config.difference.condition == "projected" else pooled
        losses["difference"], rtd_metrics = _replaced_token_detection(
            params, networks, config, views, corruptions.edited, condition, discriminator_key
        )
        metrics |= rtd_metrics
    if "mlm" in config.weights:
        losses["mlm"] = _masked_language_model(params, networks, views, corruptions.masked, mlm_key)

    loss = sum(config.weights[name] * value for name, value in losses.items())
    metrics |= {f"loss_{name}": value for name, value in losses.items()} | {"loss": loss}
    return loss, (metrics, batch_stats)


def _contrast(
    config: Config, z1: jax.Array, z2: jax.Array, hard: list[jax.Array], off_dropout: jax.Array | None
) -> jax.Array:
    options = config.contrast
    if options.negatives == "dropout":
        return contrastive.info_nce(
            z1,
            z2,
            temperature=options.temperature,
            hard_negatives=hard[0] if hard else None,
            hard_negative_weight=options.hard_negative_weight,
        ).mean()
    negatives = (z1 + z2) / 2 if options.negatives == "mean" else off_dropout
    return contrastive.off_dropout_info_nce(
        z1,
        z2,
        negatives,
        temperature=options.temperature,
        ratio=options.negative_ratio,
        form=options.negative_ratio_form,
    ).mean()


def _replaced_token_detection(
    params: Params,
    networks: Networks,
    config: Config,
    views: Views,
    edited: Edited,
    condition: jax.Array,
    key: PRNGKeyArray,
) -> tuple[jax.Array, Metrics]:
    discriminator = networks.bind("discriminator", params)
    states = discriminator(edited.input_ids, views.attention_mask, condition=condition, key=key)["last_hidden_state"]
    logits = networks.bind("token_classifier", params)(states).astype(jnp.float32)
    per_token = difference.replaced_token_detection(logits, edited.replaced)
    real = views.attention_mask > 0
    # Authors' batches end with their longest sentence; ours may be padded further, to a static length.
    counted = real if config.difference.loss_positions == "real" else real.any(axis=0, keepdims=True)
    loss = _mean_where(per_token, jnp.broadcast_to(counted, real.shape))
    right = (logits[..., 1] > logits[..., 0]) == edited.replaced
    return loss, {
        "rtd_accuracy": _mean_where(right, real),
        "rtd_accuracy_replaced": _mean_where(right, edited.replaced),
        "rtd_accuracy_kept": _mean_where(right, real & ~edited.replaced),
        "rtd_share_kept": _mean_where(~edited.replaced, real),
    }


def _masked_language_model(
    params: Params, networks: Networks, views: Views, masked: Masked, key: PRNGKeyArray
) -> jax.Array:
    encoder = networks.bind("encoder", params)
    states = encoder(masked.input_ids, views.attention_mask, key=key)["last_hidden_state"]
    logits = networks.bind("mlm_head", params)(states)
    return _mean_where(difference.masked_language_model(logits, views.input_ids), masked.selected)


def _similarity_metrics(z1: jax.Array, z2: jax.Array) -> Metrics:
    z1, z2 = jax.lax.stop_gradient((z1, z2))
    similarity = contrastive.cosine_similarity(z1, z2)
    return {
        "similarity_positive": jnp.diagonal(similarity).mean(),
        "similarity_negative": _mean_where(similarity, ~jnp.eye(len(z1), dtype=bool)),
        "alignment": contrastive.alignment(z1, z2).mean(),
        "uniformity": contrastive.uniformity(z1),
    }


def _mean_where(values: jax.Array, where: jax.Array) -> jax.Array:
    """Mean over the positions in `where`; 0 where there are none."""
    weights = where.astype(jnp.float32)
    return jnp.sum(values.astype(jnp.float32) * weights) / jnp.maximum(weights.sum(), 1.0)
