"""The objective of a step: networks and losses meet here and nowhere else.

SimCSE, SimCSE++, DiffCSE and their sums are this one function under other weights. What has weight 0 is not computed.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from diffcse_jax.config import Config
from diffcse_jax.edits import choose_token, filled_positions, mask_tokens, replace_tokens
from diffcse_jax.models import parameters
from diffcse_jax.models.packing import pack_rows
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.pooling import pool, positions_read
from diffcse_jax.objectives import contrastive, decorrelation, difference
from diffcse_jax.training.networks import Networks
from diffcse_jax.training.rows import FEW, MOST, at_positions, in_chunks, mean_where, row_keys

Metrics = dict[str, jax.Array]

TOKENS_AT_ONCE = 1024  # whose logits over the vocabulary the generator holds


class Views(NamedTuple):
    """A batch as rows of one sentence each: the views of an example are neighbours, row = example * views + view."""

    input_ids: Int[Array, "rows length"]
    attention_mask: Int[Array, "rows length"]
    count: int  # views per example: 2, or 3 with hard negatives
    real_share: float = 1.0  # of the positions, as of `pack_rows`


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


class Vectors(NamedTuple):
    """The encoder's sentence vectors, float32."""

    pooled: Float[Array, "rows hidden"]
    projected: Float[Array, "rows hidden"]  # behind the projector, where there is one
    off_dropout: Float[Array, "batch hidden"] | None  # the first views, projected, in a pass without dropout


def as_views(batch: dict[str, Int[Array, "batch columns length"]], real_share: float = 1.0) -> Views:
    """The rows of a batch; a single sentence is its own second view, which dropout tells apart.

    Interleaving the views keeps each example's rows on one device, so that sharding the batch moves nothing.
    """
    count = max(2, batch["input_ids"].shape[1])
    rows = (
        jnp.broadcast_to(batch[name], (len(batch[name]), count, batch[name].shape[2])).reshape(-1, batch[name].shape[2])
        for name in ("input_ids", "attention_mask")
    )
    return Views(*rows, count, real_share)


def corrupt(networks: Networks, config: Config, frozen: Params, views: Views, key: PRNGKeyArray) -> Corruptions:
    """Masks every row anew and lets the frozen generator fill the gaps, where an objective needs it."""
    mask_key, generator_key, mlm_key = jax.random.split(key, 3)
    mask = partial(mask_tokens, input_ids=views.input_ids, vocabulary=networks.vocabulary)
    edited = masked = None
    if config.uses_difference:
        options = config.difference
        gaps = Masked(*mask(mask_key, ratio=options.mask_ratio, style=options.mask_style))
        edited = generate(networks, config, frozen, views, gaps, generator_key)
    if "mlm" in config.weights:
        masked = Masked(*mask(mlm_key, ratio=config.mlm.mask_ratio, style="bert"))
    return Corruptions(edited, masked)


def generate(
    networks: Networks, config: Config, frozen: Params, views: Views, masked: Masked, key: PRNGKeyArray
) -> Edited:
    """The generator's sentences for masked rows."""
    generator, head = networks.bind("generator", frozen), networks.bind("generator_head", frozen)
    word_embeddings = frozen["generator.embeddings.word.embedding"]
    options, shares = config.generator, FEW if config.generator.positions == "masked" else MOST

    def choose_one(token: tuple[jax.Array, jax.Array | None]) -> jax.Array:
        state, key = token
        return choose_token(head(state, word_embeddings), decode=options.decode, key=key)

    def choose(states: jax.Array, keys: jax.Array | None) -> jax.Array:
        return jax.lax.map(choose_one, (states, keys), batch_size=TOKENS_AT_ONCE)

    def tokens_of(input_ids, attention_mask, filled, dropout_keys, decode_keys):
        packing = pack_rows(attention_mask, views.real_share)
        states = generator(input_ids, attention_mask, keys=dropout_keys, packing=packing)["last_hidden_state"]
        return at_positions(choose, filled, states, decode_keys, shares=shares)

    dropout_keys, decode_keys = (row_keys(part, len(views.input_ids)) for part in jax.random.split(key))
    decode_keys = _token_keys(decode_keys, views.input_ids.shape[1]) if options.decode == "sample" else None
    filled = filled_positions(masked.selected, views.attention_mask, positions=options.positions)
    rows = masked.input_ids, views.attention_mask, filled, dropout_keys, decode_keys
    tokens = in_chunks(tokens_of, _chunks(config, views), *rows)
    return Edited(*replace_tokens(tokens, views.input_ids, filled, views.attention_mask))


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
    losses, metrics = {}, {}
    if config.weights.keys() - {"mlm"}:  # all others are about sentence vectors
        vectors, batch_stats = embed(params, batch_stats, networks, config, views, encoder_key)
        z1, z2, *hard = jnp.moveaxis(vectors.projected.reshape(-1, views.count, vectors.projected.shape[-1]), 1, 0)
        metrics |= _similarity_metrics(z1, z2)
    if "contrast" in config.weights:
        losses["contrast"] = _contrast(config, z1, z2, hard, vectors.off_dropout)
    if "dcl" in config.weights:
        losses["dcl"] = _dimension_contrast(config, z1, z2)
    if config.uses_difference:
        condition = vectors.projected if config.difference.condition == "projected" else vectors.pooled
        losses["difference"], rtd_metrics = _replaced_token_detection(
            params, networks, config, views, corruptions.edited, condition, discriminator_key
        )
        metrics |= rtd_metrics
    if "mlm" in config.weights:
        losses["mlm"] = _masked_language_model(params, networks, config, views, corruptions.masked, mlm_key)

    loss = sum(config.weights[name] * value for name, value in losses.items())
    metrics |= {f"loss_{name}": value for name, value in losses.items()} | {"loss": loss}
    return loss, (metrics, batch_stats)


def embed(
    params: Params, batch_stats: Params, networks: Networks, config: Config, views: Views, key: PRNGKeyArray
) -> tuple[Vectors, Params]:
    """The sentence vectors of all rows, and the batch statistics behind them."""
    encoder = networks.bind("encoder", params)
    projector = networks.bind("projector", params, batch_stats) if networks.projector else lambda pooled: pooled

    def pooled_of(input_ids, attention_mask, keys):
        positions = positions_read(config.model.pooler)
        packing = pack_rows(attention_mask, views.real_share)
        outputs = encoder(input_ids, attention_mask, keys=keys, last_positions=positions, packing=packing)
        return pool(outputs["hidden_states"], attention_mask, config.model.pooler)

    rows, chunks = (views.input_ids, views.attention_mask), _chunks(config, views)
    pooled = in_chunks(pooled_of, chunks, *rows, row_keys(key, len(views.input_ids)))
    projected = projector(pooled)
    if networks.projector:  # read before another pass counts as a batch
        batch_stats = parameters.prefixed(parameters.batch_stats_of(projector), "projector")
    off_dropout = None
    if "contrast" in config.weights and config.contrast.negatives == "off_dropout":
        first_views = (values[:: views.count] for values in rows)
        off_dropout = projector(in_chunks(pooled_of, chunks, *first_views, None))
    vectors = jax.tree.map(lambda rows: rows.astype(jnp.float32), Vectors(pooled, projected, off_dropout))
    return vectors, batch_stats


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


def _dimension_contrast(config: Config, z1: jax.Array, z2: jax.Array) -> jax.Array:
    options = config.dcl
    per_dimension = decorrelation.dimension_contrast(z1, z2, temperature=options.temperature, form=options.form)
    return per_dimension.mean() if options.form == "code" else per_dimension.sum()


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
    classifier = networks.bind("token_classifier", params)
    only_real = config.difference.loss_positions == "real"

    def logits_of(input_ids, attention_mask, keys, condition):
        packing = pack_rows(attention_mask, views.real_share) if only_real else None
        outputs = discriminator(input_ids, attention_mask, condition=condition, keys=keys, packing=packing)
        return classifier(outputs["last_hidden_state"])

    rows = edited.input_ids, views.attention_mask, row_keys(key, len(edited.input_ids)), condition
    logits = in_chunks(logits_of, _chunks(config, views), *rows).astype(jnp.float32)
    per_token = difference.replaced_token_detection(logits, edited.replaced)
    real = views.attention_mask > 0
    # Authors' batches end with their longest sentence; ours may be padded further, to a static length.
    counted = real if only_real else real.any(axis=0, keepdims=True)
    loss = mean_where(per_token, jnp.broadcast_to(counted, real.shape))
    right = (logits[..., 1] > logits[..., 0]) == edited.replaced
    return loss, {
        "rtd_accuracy": mean_where(right, real),
        "rtd_accuracy_replaced": mean_where(right, edited.replaced),
        "rtd_accuracy_kept": mean_where(right, real & ~edited.replaced),
        "rtd_share_kept": mean_where(~edited.replaced, real),
    }


def _masked_language_model(
    params: Params, networks: Networks, config: Config, views: Views, masked: Masked, key: PRNGKeyArray
) -> jax.Array:
    encoder, head = networks.bind("encoder", params), networks.bind("mlm_head", params)

    def token_losses(states: jax.Array, targets: jax.Array) -> jax.Array:
        return difference.masked_language_model(head(states), targets)

    def losses_of(input_ids, attention_mask, keys, targets, selected):
        packing = pack_rows(attention_mask, views.real_share)
        states = encoder(input_ids, attention_mask, keys=keys, packing=packing)["last_hidden_state"]
        return at_positions(token_losses, selected, states, targets, shares=FEW)

    keys = row_keys(key, len(views.input_ids))
    rows = masked.input_ids, views.attention_mask, keys, views.input_ids, masked.selected
    return mean_where(in_chunks(losses_of, _chunks(config, views), *rows), masked.selected)


def _similarity_metrics(z1: jax.Array, z2: jax.Array) -> Metrics:
    z1, z2 = jax.lax.stop_gradient((z1, z2))
    similarity = contrastive.cosine_similarity(z1, z2)
    return {
        "similarity_positive": jnp.diagonal(similarity).mean(),
        "similarity_negative": mean_where(similarity, ~jnp.eye(len(z1), dtype=bool)),
        "alignment": contrastive.alignment(z1, z2).mean(),
        "uniformity": contrastive.uniformity(z1),
    }


def _chunks(config: Config, views: Views) -> int:
    """How many parts the networks take the rows in."""
    examples = len(views.input_ids) // views.count
    return examples // (config.train.chunk_size or examples)


def _token_keys(keys: jax.Array, length: int) -> jax.Array:
    """A key for each token, from those of the rows."""
    return jax.vmap(lambda key: jax.random.split(key, length))(keys)
