"""A generator of the run's own: a masked-LM head trained on the frozen encoder, for encoders without a masked LM.

Source: the "adjusting dropout" report. The head is small compared with the encoder, so a few hundred steps give
plausible replacements, which the discriminator can learn from.
"""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int, PRNGKeyArray
from safetensors.numpy import load_file

from diffcse_jax.batch import Batch, Vocabulary
from diffcse_jax.config import Config
from diffcse_jax.data.batches import BatchSource, make_batches
from diffcse_jax.data.sampling import Crops
from diffcse_jax.data.tokens import TokenStore
from diffcse_jax.errors import ConfigError, counted
from diffcse_jax.hosts import Progress, log_line
from diffcse_jax.io import disk_errors, read_sealed, write_sealed, write_tensors
from diffcse_jax.losses.diffcse import mask_tokens
from diffcse_jax.models import layers
from diffcse_jax.models.forward import FEW, Computation, Networks, fold_in_name, mean_where
from diffcse_jax.models.heads import MaskedLMHead
from diffcse_jax.models.hf import Pretrained
from diffcse_jax.models.layers import Params
from diffcse_jax.models.transformer import Transformer, TransformerConfig
from diffcse_jax.training.sharding import packing_of, replicated, shard_batch, shards_of

HELD_OUT_BATCHES = 8


def own_generator(
    config: Config, encoder: Pretrained, store: TokenStore | Crops, vocabulary: Vocabulary, mesh: Mesh, workdir: Path
) -> Pretrained:
    """Return the frozen encoder with a masked-LM head: from the run folder, or trained now and stored there."""
    folder = workdir / "generator"
    weights, record = folder / "mlm_head.safetensors", folder / "report.json"
    if record.is_file():
        scores = read_sealed(record, f"Remove {folder} to train the head again")
        log_line(f"generator: using the masked-LM head in {folder} ({_summary(scores)})")
        return dataclasses.replace(encoder, mlm_head=load_file(weights))
    log_line(f"generator: training a masked-LM head for {counted(config.generator.head_steps, 'step{s}')}")
    head, scores = train_head(config, encoder, store, vocabulary, mesh)
    if bad := next((name for name, array in head.items() if not np.isfinite(array).all()), None):
        raise ConfigError(
            f"training the generator's masked-LM head diverged ({bad} is NaN or infinite). Nothing was saved. Lower "
            f"generator.head_learning_rate={config.generator.head_learning_rate:g}."
        )
    log_line(f"generator: masked-LM head trained, {_summary(scores)}")
    if jax.process_index() == 0:
        with disk_errors(folder, safe="The text and the encoder's weights are intact."):
            folder.mkdir(parents=True, exist_ok=True)
            write_tensors(weights, head)
            write_sealed(record, scores, [weights])  # last: if it is there, the head is complete
    return dataclasses.replace(encoder, mlm_head=head)


def train_head(
    config: Config, encoder: Pretrained, store: TokenStore | Crops, vocabulary: Vocabulary, mesh: Mesh
) -> tuple[Params, dict[str, float]]:
    """Train the head for `generator.head_steps` steps.

    Returns:
        The parameters of the head, and scores: accuracy (%) and perplexity on masked tokens of the batches that would
        come next, and the number of steps.
    """
    options, root = config.generator, _root_key(config)
    initial, loss, step = make_head_training(config, encoder.config, vocabulary, mesh)
    source = BatchSource(
        store,
        batch_size=options.head_batch_size,
        steps=options.head_steps + HELD_OUT_BATCHES,
        seed=config.train.seed,
        pad_token_id=encoder.config.pad_token_id,
        shards=shards_of(mesh),
        packing=packing_of(config, mesh, anchors=True),
    )
    batches = (shard_batch(batch, mesh) for batch in make_batches(source))
    head, opt_state = jax.jit(initial, out_shardings=replicated(mesh))()
    frozen = jax.device_put(layers.prefixed(encoder.transformer, "transformer"), replicated(mesh))
    with Progress("masked-LM head", "steps", options.head_steps) as progress:
        for index in range(options.head_steps):
            head, opt_state, value = step(head, opt_state, frozen, next(batches), np.int32(index))
            progress.update(1, f"loss {float(value):.2f}" if index % 20 == 0 else "")
    measure, key = jax.jit(loss), fold_in_name(root, "held out")
    held_out = [measure(head, frozen, batch, jax.random.fold_in(key, index)) for index, batch in enumerate(batches)]
    mean_loss, accuracy = np.mean([[float(value) for value in result] for result in held_out], axis=0)
    scores = {"accuracy": 100 * float(accuracy), "perplexity": float(np.exp(mean_loss)), "steps": options.head_steps}
    return {name: np.asarray(value) for name, value in layers.subset(head, "head").items()}, scores


def make_head_training(config: Config, sizes: TransformerConfig, vocabulary: Vocabulary, mesh: Mesh) -> tuple:
    """Return three functions that train a masked-LM head on a frozen encoder of these sizes.

    Returns:
        `initial() -> (head, optimizer state)`, `loss(head, frozen, batch, key) -> (mean loss, accuracy)`, and compiled
        `step(head, optimizer state, frozen, batch, index) -> (head, optimizer state, loss)`.
    """
    options, root = config.generator, _root_key(config)
    build_head = partial(MaskedLMHead, sizes)
    modules: dict[str, layers.Build] = {"transformer": partial(Transformer, sizes), "head": build_head}
    networks = Networks(vocabulary, {name: layers.definition(build) for name, build in modules.items()})
    optimizer = optax.adamw(optax.linear_schedule(options.head_learning_rate, 0.0, max(options.head_steps, 1)))

    def initial() -> tuple[Params, optax.OptState]:
        head = layers.prefixed(layers.initial(build_head, fold_in_name(root, "initial weights")), "head")
        return head, optimizer.init(head)

    def loss(head: Params, frozen: Params, batch: Batch, key: PRNGKeyArray) -> tuple[jax.Array, jax.Array]:
        anchors = batch.anchors
        masked = mask_tokens(key, anchors, vocabulary=vocabulary, ratio=options.head_mask_ratio, style="bert")
        computation = Computation(networks, head | frozen, devices=mesh.shape["data"])
        states = computation.network("transformer")(masked.rows)[-1]
        head_network, word_embeddings = computation.network("head"), frozen["transformer.embeddings.word.embedding"]

        def at_tokens(states: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = head_network(states, word_embeddings)
            correct = jnp.argmax(logits, axis=-1) == targets
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets), correct

        losses, right = computation.gather_positions(at_tokens, masked.selected, states, anchors.input_ids, shares=FEW)
        return mean_where(losses, masked.selected), mean_where(right, masked.selected)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(head: Params, opt_state: optax.OptState, frozen: Params, batch: Batch, index: Int[Array, ""]) -> tuple:
        key = jax.random.fold_in(fold_in_name(root, "train step"), index)
        (value, _), grads = jax.value_and_grad(loss, has_aux=True)(head, frozen, batch, key)
        updates, opt_state = optimizer.update(grads, opt_state, head)
        return optax.apply_updates(head, updates), opt_state, value

    return initial, loss, step


def _root_key(config: Config) -> PRNGKeyArray:
    return fold_in_name(jax.random.key(config.train.seed), "generator head")


def _summary(scores: dict[str, float]) -> str:
    steps = counted(int(scores["steps"]), "step{s}")
    return f"masked accuracy {scores['accuracy']:.1f}%, perplexity {scores['perplexity']:.0f}, {steps}"
