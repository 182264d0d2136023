"""DiffCSE, difference-based contrastive learning (Chuang et al. 2022, Section 3): from a sentence to the loss.

Contrastive learning makes sentence embeddings insensitive to small changes. DiffCSE adds a task that depends on them:
which tokens of an edited sentence differ from the original? This file contains all of it, in the order of computation:

    x     a sentence                          the cat  sat    on the mat
    x'    some tokens are masked              the cat [MASK]  on the [MASK]     mask_tokens
    x''   a frozen masked LM fills them       the cat  slept  on the mat        generate
    y     which tokens were replaced           0   0    1     0   0   0         label
    h     the sentence embedding of x, shared with the contrast
    D     reads x'' with h in the place of its first token                      discriminate
    L     the mean of -log D(y_t) over all positions t                          replaced_token_detection

Only h can tell D what x said where x'' differs. The gradient flows through h into the encoder: to help D, an embedding
must record what its sentence says. D starts as a copy of the encoder, or as an ELECTRA discriminator, which has learnt
this task without h. After training, D and the generator are dropped.

The whole loss is contrast + lambda L, with lambda = 0.005. Where the authors' code differs from the paper, the code's
rule is the default, because it produced the published numbers, and an option selects the paper's rule.
`diffcse_variants.py` has the ablations: other predictions (Table 3) and other edits (Table 4).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from diffcse_jax.batch import Batch, TokenRows, Vocabulary, token_keys
from diffcse_jax.losses import Checkpoints, GeneratorOptions, Loss, Metrics, RunInfo, option
from diffcse_jax.models.forward import FEW, MOST, Computation, SharedForward, fold_in_name, mean_where, row_keys
from diffcse_jax.models.heads import ReplacedTokenHead, linear
from diffcse_jax.models.layers import Network
from diffcse_jax.models.transformer import Transformer

TOKENS_AT_ONCE = 1024  # tokens for which the generator computes logits at the same time


class Masked(NamedTuple):
    """Sentences with masked tokens, x'."""

    rows: TokenRows
    selected: Bool[Array, "rows length"]  # the positions that were chosen for masking


class Edited(NamedTuple):
    """Edited sentences x'' and the labels y of their tokens."""

    rows: TokenRows
    replaced: Bool[Array, "rows length"]  # y


@dataclasses.dataclass(frozen=True)
class MaskOptions:
    """How the tokens of a sentence are masked before the generator fills them."""

    mask_ratio: float = option(0.30, "share of tokens to mask; for `replace` and `mixed`", low=0.0, high=1.0)
    mask_style: str = option(
        "bert",
        "`bert`: 80 % [MASK], 10 % random tokens, 10 % unchanged (authors' code); `mask`: [MASK] (paper)",
        choices=("bert", "mask"),
    )

    def masked(self, frozen: Computation, rows: TokenRows, key: PRNGKeyArray) -> Masked:
        vocabulary, mask_key = frozen.networks.vocabulary, fold_in_name(key, "mask")
        return mask_tokens(mask_key, rows, vocabulary=vocabulary, ratio=self.mask_ratio, style=self.mask_style)


@dataclasses.dataclass(frozen=True)
class DiffCSE(Loss, MaskOptions):
    """Conditional replaced-token detection."""

    weight: float = option(0.005, "weight of the difference loss (lambda of DiffCSE)", low=0.0)
    condition: str = option(
        "projected",
        "the embedding that conditions the discriminator: after or before the projector",
        choices=("projected", "pooled"),
    )
    discriminator: str = option(
        "",
        "ELECTRA discriminator (folder or hub id) that the discriminator starts from, with its head, for `rtd`; it "
        "needs the encoder's vocabulary and hidden size; empty: a copy of the encoder, with a new head",
    )
    loss_positions: str = option("all", "mean over all positions (code) or real tokens", choices=("all", "real"))

    papers: ClassVar[tuple[str, ...]] = ("diffcse",)
    panels = MappingProxyType({"replaced-token detection": ("rtd_accuracy", "rtd_share_kept", "rtd_accuracy_replaced")})

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"vectors", "hidden_size", "mask_token", "generator"})

    def networks(self, checkpoints: Checkpoints, run: RunInfo) -> dict[str, Network]:
        """Return the discriminator and its head: those of an ELECTRA, or a copy of the encoder and a new head."""
        start = checkpoints.discriminator or checkpoints.encoder
        if checkpoints.discriminator is None:
            head = Network(partial(linear, start.config.hidden_size, 2))
        else:
            head = Network(partial(ReplacedTokenHead, start.config), start.discriminator_head)
        discriminator = Network(partial(Transformer, start.config), start.transformer)
        return {"discriminator": discriminator, "token_classifier": head}

    def prepare(self, frozen: Computation, batch: Batch, key: PRNGKeyArray, run: RunInfo) -> PyTree:
        """Edit every sentence of the batch: x -> x' -> x'', y."""
        return replace_tokens(frozen, batch.rows, self, run.generator, key)

    def loss(self, forward: SharedForward, inputs: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        """Compute the loss of the discriminator's predictions about the edited sentences: x'', y, h -> L."""
        rows, replaced = inputs
        real = rows.attention_mask > 0
        counted = real
        if self.loss_positions == "all":
            rows = rows.padded()  # so that D also computes padding
            # The authors' batches end where their longest sentence ends. Ours may be padded further, to static lengths.
            counted = jnp.broadcast_to(real.any(axis=0, keepdims=True), real.shape)
        head = forward.computation.network("token_classifier")
        logits = discriminate(forward, rows, head, condition=self.condition, key=key).astype(jnp.float32)
        correct = (logits[..., 1] > logits[..., 0]) == replaced
        return mean_where(replaced_token_detection(logits, replaced), counted), {
            "rtd_accuracy": mean_where(correct, real),
            "rtd_accuracy_replaced": mean_where(correct, replaced),
            "rtd_accuracy_kept": mean_where(correct, real & ~replaced),
            "rtd_share_kept": mean_where(~replaced, real),
        }


def replace_tokens(
    frozen: Computation, rows: TokenRows, mask: MaskOptions, options: GeneratorOptions, key: PRNGKeyArray
) -> Edited:
    """Edit sentences: mask tokens, let the generator fill them, and label the result."""
    return generate(frozen, rows, mask.masked(frozen, rows, key), options, fold_in_name(key, "generator"))


# x -> x': mask.


def mask_tokens(key: PRNGKeyArray, rows: TokenRows, *, vocabulary: Vocabulary, ratio: float, style: str) -> Masked:
    """Mask random tokens.

    Args:
        key: A random key. What happens to a token depends on it, the row's number and the position, not on padding.
        rows: The sentences.
        vocabulary: The tokenizer's vocabulary. Its special tokens are never masked.
        ratio: The probability with which each token is selected.
        style: `bert`: 80 % of the selected tokens become [MASK], 10 % become a random token of the whole vocabulary,
            and 10 % stay. `mask`: all become [MASK].
    """
    ids = rows.input_ids
    select_keys, style_keys, id_keys = jax.vmap(partial(jax.random.split, num=3), out_axes=1)(row_keys(key, len(ids)))
    shape = (ids.shape[1],)
    ordinary = ~jnp.isin(ids, jnp.array(vocabulary.special_ids, ids.dtype))
    selected = ordinary & jax.vmap(lambda key: jax.random.bernoulli(key, ratio, shape))(select_keys)
    new_ids = jnp.array(vocabulary.mask_id, ids.dtype)
    if style == "bert":
        random_ids = jax.vmap(lambda key: jax.random.randint(key, shape, 0, vocabulary.size, ids.dtype))(id_keys)
        draw = jax.vmap(lambda key: jax.random.uniform(key, shape))(style_keys)
        new_ids = jnp.where(draw < 0.8, new_ids, jnp.where(draw < 0.9, random_ids, ids))
    return Masked(rows._replace(input_ids=jnp.where(selected, new_ids, ids)), selected)


# x' -> x'': generate.


def generate(
    frozen: Computation, rows: TokenRows, masked: Masked, options: GeneratorOptions, key: PRNGKeyArray
) -> Edited:
    """Let the generator fill masked sentences, and label the tokens that differ from the originals.

    It chooses the most probable token or a random one (`options.decode`), at all positions or at the selected ones
    (`options.positions`), but never at position 0 and never at padding. The key is for its dropout and for sampling.
    """
    generator, head = frozen.network("generator"), frozen.network("generator_head")
    word_embeddings = frozen.params["generator.embeddings.word.embedding"]

    def choose_one(token: tuple[jax.Array, jax.Array | None]) -> jax.Array:
        state, key = token
        logits = head(state, word_embeddings)
        return jnp.argmax(logits) if key is None else jax.random.categorical(key, logits)

    def choose(states: jax.Array, keys: jax.Array | None) -> jax.Array:
        return jax.lax.map(choose_one, (states, keys), batch_size=TOKENS_AT_ONCE)

    def fill(rows: TokenRows, filled: jax.Array, dropout_keys: jax.Array, keys: jax.Array | None) -> jax.Array:
        states = generator(rows, keys=dropout_keys)[-1]
        shares = FEW if options.positions == "masked" else MOST
        return frozen.gather_positions(choose, filled, states, keys, shares=shares)

    dropout_keys, decode_keys = (row_keys(part, len(rows.input_ids)) for part in jax.random.split(key))
    keys = None
    if options.decode == "sample":
        keys = token_keys(decode_keys, rows, positions=rows.input_ids.shape[1])
    filled = (rows.attention_mask > 0).at[:, 0].set(False)  # with `all`, also [SEP], as in the authors' code
    if options.positions == "masked":
        filled &= masked.selected
    return label(frozen.map_chunks(fill, masked.rows, filled, dropout_keys, keys), rows, filled)


# x'', x -> y: label.


def label(tokens: Int[Array, "rows length"], rows: TokenRows, filled: Bool[Array, "rows length"]) -> Edited:
    """Put the generator's tokens into the sentences, and label those that differ from the original.

    A token that the generator guessed right has the label 0. Padding becomes id 0, as in the authors' code.
    """
    ids, mask = rows.input_ids, rows.attention_mask
    edited = jnp.where(filled, tokens.astype(ids.dtype), ids) * mask.astype(ids.dtype)
    return Edited(rows._replace(input_ids=edited), (edited != ids) & (mask > 0))


# x'', h -> D: discriminate.


def discriminate(
    forward: SharedForward,
    rows: TokenRows,
    head: Callable[..., PyTree],
    *values: PyTree,
    condition: str,
    key: PRNGKeyArray,
) -> PyTree:
    """Apply the discriminator to edited sentences, conditioned on the embeddings of the originals.

    The embedding h takes the place of the first token of x'', after the embedding layer. Only h can tell the
    discriminator what x said where x'' differs, and only through h does this loss reach the encoder.

    Args:
        forward: The sentence embeddings and the trained networks.
        rows: The edited sentences x''.
        head: Applied to hidden states (rows, length, hidden) and to `values`, each row by itself.
        values: Arrays whose first axis is that of the rows.
        condition: The embedding: `projected` or `pooled`.
        key: A random key for dropout.
    """
    discriminator = forward.computation.network("discriminator")
    h = forward.embeddings.projected if condition == "projected" else forward.embeddings.pooled

    def read(rows: TokenRows, keys: jax.Array, h: jax.Array, *values: PyTree) -> PyTree:
        return head(discriminator(rows, condition=h, keys=keys)[-1], *values)

    return forward.computation.map_chunks(read, rows, row_keys(key, len(rows.input_ids)), h, *values)


# D, y -> L: the loss.


def replaced_token_detection(
    logits: Float[Array, "rows length 2"], replaced: Bool[Array, "rows length"]
) -> Float[Array, "rows length"]:
    """Compute -log D(y_t) for each token, the cross-entropy of two classes (DiffCSE Section 3).

    The logits are D's, of the classes 0 (kept) and 1 (replaced). The authors' code takes the mean over all positions,
    the paper a sum over tokens.
    """
    # The cross-entropy of two classes is the softplus of the margin against the right class.
    margin = logits[..., 1] - logits[..., 0]
    return jax.nn.softplus(jnp.where(replaced, -margin, margin))
