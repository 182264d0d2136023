"""DiffCSE, difference-based contrastive learning: from a sentence to the loss.

This is Section 3 of Chuang et al. 2022. Contrastive learning makes sentence embeddings insensitive
to small changes. DiffCSE adds a task that depends on them: which tokens of an edited sentence
differ from the original? This file contains all of it, in the order of computation:

    x     a sentence                        the cat  sat    on the mat
    x'    some tokens are masked            the cat [MASK]  on the [MASK]   mask_tokens
    x''   a frozen masked LM fills them     the cat  slept  on the mat      generate
    y     which tokens were replaced         0   0    1     0   0   0       label
    h     the sentence embedding of x, shared with the contrast
    D     reads x'' with h in the place of its first token                  discriminate
    L     the mean of -log D(y_t) over all positions t            replaced_token_detection

Only h can tell D what x said where x'' differs. The gradient flows through h into the encoder: to
help D, an embedding must record what its sentence says. D starts as a copy of the encoder, or as an
ELECTRA discriminator, which has learnt this task without h. After training, D and the generator are
dropped.

The whole loss is contrast + lambda L, with lambda = 0.005. Where the authors' code differs from the
paper, the code's rule is the default, because it produced the published numbers, and an option
selects the paper's rule.

`DiffCSE`, at the end, is the loss that trains. It looks up how sentences are edited, and what is
predicted about them, in the tables `EDITS` and `PREDICTIONS`. `diffcse_variants.py` adds the
ablations to both.
"""

import dataclasses
from collections import ChainMap
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from diffcse_jax.batch import Batch, TokenRows, Vocabulary, position_keys
from diffcse_jax.losses import (
    GeneratorOptions,
    Loss,
    Metrics,
    PretrainedCheckpoints,
    RunInfo,
)
from diffcse_jax.models.forward import (
    FEW,
    MOST,
    Computation,
    SharedForward,
    fold_in_name,
    mean_where,
    row_keys,
)
from diffcse_jax.models.heads import ReplacedTokenHead, linear
from diffcse_jax.models.layers import Network
from diffcse_jax.models.transformer import Transformer
from diffcse_jax.options import option

TOKENS_AT_ONCE = 1024  # tokens for which the generator computes logits at the same time


class Masked(NamedTuple):
    """Sentences with masked tokens, x'."""

    rows: TokenRows
    selected: Bool[Array, "rows length"]  # the positions that were chosen for masking


class Edited(NamedTuple):
    """Edited sentences x'' and the labels y of their tokens.

    y is true where tokens were replaced or inserted, or follow a dropped one. If tokens are only
    masked, it is true where they were selected.
    """

    rows: TokenRows
    labels: Bool[Array, "rows length"]  # y


# x -> x': mask.


def mask_tokens(
    key: PRNGKeyArray, rows: TokenRows, *, vocabulary: Vocabulary, ratio: float, style: str
) -> Masked:
    """Mask random tokens.

    Args:
        key: A random key. What happens to a token depends on it, the row's number and the position,
            not on padding.
        rows: The sentences.
        vocabulary: The tokenizer's vocabulary. Its special tokens are never masked.
        ratio: The probability with which each token is selected.
        style: `bert`: 80 % of the selected tokens become [MASK], 10 % become a random token of the
            whole vocabulary, and 10 % stay. `mask`: all become [MASK].
    """
    ids = rows.input_ids
    split_in_three = jax.vmap(partial(jax.random.split, num=3), out_axes=1)
    select_keys, style_keys, id_keys = split_in_three(row_keys(key, len(ids)))

    def draw_rows(draw: Callable[..., jax.Array], keys: jax.Array, *arguments: Any) -> jax.Array:
        return jax.vmap(lambda key: draw(key, *arguments))(keys)

    shape = (ids.shape[1],)
    ordinary = ~jnp.isin(ids, jnp.array(vocabulary.special_ids, ids.dtype))
    selected = ordinary & draw_rows(jax.random.bernoulli, select_keys, ratio, shape)
    new_ids = jnp.array(vocabulary.mask_id, ids.dtype)
    if style == "bert":
        random_ids = draw_rows(jax.random.randint, id_keys, shape, 0, vocabulary.size, ids.dtype)
        uniform = draw_rows(jax.random.uniform, style_keys, shape)
        new_ids = jnp.where(uniform < 0.8, new_ids, jnp.where(uniform < 0.9, random_ids, ids))
    return Masked(rows._replace(input_ids=jnp.where(selected, new_ids, ids)), selected)


# x' -> x'': generate.


def generate(
    frozen: Computation,
    rows: TokenRows,
    masked: Masked,
    options: GeneratorOptions,
    key: PRNGKeyArray,
) -> Edited:
    """Let the generator fill masked sentences, and label the tokens that differ from the originals.

    It chooses the most probable token or a random one (`options.decode`), at all positions or at
    the selected ones (`options.positions`), but never at position 0 and never at padding. The key
    is for its dropout and for sampling.
    """
    generator, head = frozen.network("generator"), frozen.network("generator_head")
    word_embeddings = frozen.params["generator.embeddings.word.embedding"]

    def choose_one(token: tuple[jax.Array, jax.Array | None]) -> jax.Array:
        state, key = token
        logits = head(state, word_embeddings)
        return jnp.argmax(logits) if key is None else jax.random.categorical(key, logits)

    def choose(states: jax.Array, keys: jax.Array | None) -> jax.Array:
        return jax.lax.map(choose_one, (states, keys), batch_size=TOKENS_AT_ONCE)

    def fill(
        rows: TokenRows, filled: jax.Array, dropout_keys: jax.Array, keys: jax.Array | None
    ) -> jax.Array:
        states = generator(rows, keys=dropout_keys)[-1]
        shares = FEW if options.positions == "masked" else MOST
        return frozen.gather_positions(choose, filled, states, keys, shares=shares)

    dropout_key, decode_key = jax.random.split(key)
    examples, positions = rows.input_ids.shape
    dropout_keys = row_keys(dropout_key, examples)
    keys = None
    if options.decode == "sample":
        keys = position_keys(row_keys(decode_key, examples), positions)
    # With `all`, [SEP] is filled as well, as in the authors' code.
    filled = (rows.attention_mask > 0).at[:, 0].set(False)
    if options.positions == "masked":
        filled &= masked.selected
    return label(frozen.map_chunks(fill, masked.rows, filled, dropout_keys, keys), rows, filled)


# x'', x -> y: label.


def label(
    tokens: Int[Array, "rows length"], rows: TokenRows, filled: Bool[Array, "rows length"]
) -> Edited:
    """Put the generator's tokens into the sentences, and label those that differ from the original.

    A token that the generator guessed right has the label 0. Padding becomes id 0, as in the
    authors' code.
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

    The embedding h takes the place of the first token of x'', after the embedding layer. Only h can
    tell the discriminator what x said where x'' differs, and only through h does this loss reach
    the encoder.

    Args:
        forward: The sentence embeddings and the trained networks.
        rows: The edited sentences x''.
        head: Applied to hidden states (rows, length, hidden) and to `values`, each row by itself.
        values: Arrays whose first axis is that of the rows.
        condition: The embedding: `projected`, `pooled` or `none`.
        key: A random key for dropout.
    """
    discriminator = forward.computation.network("discriminator")
    embeddings = forward.embeddings
    h = {"projected": embeddings.projected, "pooled": embeddings.pooled, "none": None}[condition]

    def read(rows: TokenRows, keys: jax.Array, h: jax.Array | None, *values: PyTree) -> PyTree:
        return head(discriminator(rows, condition=h, keys=keys)[-1], *values)

    return forward.computation.map_chunks(
        read, rows, row_keys(key, len(rows.input_ids)), h, *values
    )


# D, y -> L: the loss.


def replaced_token_detection(
    logits: Float[Array, "rows length 2"], replaced: Bool[Array, "rows length"]
) -> Float[Array, "rows length"]:
    """Compute -log D(y_t) for each token, the cross-entropy of two classes (DiffCSE Section 3).

    The logits are D's, of the classes 0 (kept) and 1 (replaced). The authors' code takes the mean
    over all positions, the paper a sum over tokens.
    """
    # The cross-entropy of two classes is the softplus of the margin against the right class.
    margin = logits[..., 1] - logits[..., 0]
    return jax.nn.softplus(jnp.where(replaced, -margin, margin))


# The edit: x -> x'', y.


@dataclasses.dataclass(frozen=True)
class MaskOptions:
    """How the tokens of a sentence are masked before the generator fills them."""

    mask_ratio: float = option(
        0.30, "share of tokens to mask; for `replace` and `mixed`", low=0.0, high=1.0
    )
    mask_style: str = option(
        "bert",
        "`bert`: 80 % [MASK], 10 % random tokens, 10 % unchanged (authors' code); `mask`: [MASK] "
        "(paper)",
        choices=("bert", "mask"),
    )

    def masked(self, frozen: Computation, rows: TokenRows, key: PRNGKeyArray) -> Masked:
        vocabulary = frozen.networks.vocabulary
        mask_key = fold_in_name(key, "mask")
        return mask_tokens(
            mask_key, rows, vocabulary=vocabulary, ratio=self.mask_ratio, style=self.mask_style
        )


def replace(
    frozen: Computation,
    rows: TokenRows,
    options: MaskOptions,
    key: PRNGKeyArray,
    run: RunInfo,
) -> Edited:
    """Mask tokens, let the generator fill them, and label the result: the edit of DiffCSE.

    Args:
        frozen: The generator.
        rows: The sentences x.
        options: How tokens are masked.
        key: A random key. The edit of a row depends on it, the row's number and the position, not
            on padding.
        run: The run, with the options of the generator.
    """
    masked = options.masked(frozen, rows, key)
    return generate(frozen, rows, masked, run.generator, fold_in_name(key, "generator"))


class Edit(NamedTuple):
    """A way to edit sentences. Its function has the arguments and the result of `replace`."""

    function: Callable[..., Edited]
    needs: frozenset[str] = frozenset({"mask_token", "generator"})  # see `Loss.needs`


EDITS: dict[str, Edit] = {"replace": Edit(replace)}  # by `difference.edit`


@dataclasses.dataclass(frozen=True)
class EditOptions(MaskOptions):
    """How a sentence is edited."""

    edit: str = option(
        "replace",
        "`replace` masks tokens and lets the generator fill them, `insert` adds tokens of the "
        "generator, `delete` drops tokens, `mixed` does all three (DiffCSE Tables 4 and 15)",
        choices=EDITS,  # which grow with the table
    )
    insert_ratio: float = option(
        0.15, "share of gaps that get a token; for `insert` and `mixed`", low=0.0, high=1.0
    )
    delete_ratio: float = option(
        0.15, "share of tokens that are dropped; for `delete` and `mixed`", low=0.0, high=1.0
    )


# The prediction: x'', y, h -> L.


def detect_replaced_tokens(
    options: "DiffCSE",
    forward: SharedForward,
    edited: Edited,
    original: Int[Array, "rows length"],
    key: PRNGKeyArray,
) -> tuple[Float[Array, ""], Metrics]:
    """Compute the loss and the accuracy of the discriminator's guesses which tokens were replaced.

    Args:
        options: The options of the loss.
        forward: The batch, its sentence embeddings and the trained networks.
        edited: The edited sentences x'', and y.
        original: The tokens of x. This prediction does not read them.
        key: A random key for dropout.

    Returns:
        The loss, and metrics by name.
    """
    rows, replaced = edited
    real = rows.attention_mask > 0
    counted = real
    if options.loss_positions == "all":
        rows = rows.padded()  # so that D also computes padding
        # The authors' batches end where their longest sentence ends. Ours may be longer, because
        # their lengths are static.
        counted = jnp.broadcast_to(real.any(axis=0, keepdims=True), real.shape)
    head = forward.computation.network("token_classifier")
    logits = discriminate(forward, rows, head, condition=options.condition, key=key)
    logits = logits.astype(jnp.float32)
    correct = (logits[..., 1] > logits[..., 0]) == replaced
    return mean_where(replaced_token_detection(logits, replaced), counted), {
        "rtd_accuracy": mean_where(correct, real),
        "rtd_accuracy_replaced": mean_where(correct, replaced),
        "rtd_accuracy_kept": mean_where(correct, real & ~replaced),
        "rtd_share_kept": mean_where(~replaced, real),
    }


def token_classifier(checkpoints: PretrainedCheckpoints) -> dict[str, Network]:
    """Return the head of the two classes: that of an ELECTRA discriminator, or a new one."""
    electra = checkpoints.discriminator
    if electra is None:
        head = Network(partial(linear, checkpoints.encoder.config.hidden_size, 2))
    else:
        head = Network(partial(ReplacedTokenHead, electra.config), electra.discriminator_head)
    return {"token_classifier": head}


class Prediction(NamedTuple):
    """What the discriminator predicts about edited sentences."""

    loss: Callable[..., tuple[Float[Array, ""], Metrics]]  # as `detect_replaced_tokens`
    # The networks besides the discriminator.
    heads: Callable[[PretrainedCheckpoints], dict[str, Network]]
    panels: Mapping[str, tuple[str, ...]]  # see `Loss.panels`
    papers: tuple[str, ...] = ("diffcse",)
    # Raises a `ConfigError` for options that do not fit.
    check: Callable[["DiffCSE"], None] = lambda options: None
    edit: Edit | None = None  # the edit that it needs, if it is not that of `difference.edit`


RTD = ("rtd_accuracy", "rtd_share_kept", "rtd_accuracy_replaced")  # in one panel
PREDICTIONS: dict[str, Prediction] = {  # by `difference.objective`
    "rtd": Prediction(detect_replaced_tokens, token_classifier, {"replaced-token detection": RTD}),
}


@dataclasses.dataclass(frozen=True)
class DiffCSE(EditOptions, Loss):
    """A prediction about an edited sentence, given the embedding of a sentence.

    With the defaults it is conditional replaced-token detection, the loss of DiffCSE.
    """

    weight: float = option(0.005, "weight of the difference loss (lambda of DiffCSE)", low=0.0)
    objective: str = option(
        "rtd",
        "what is predicted: which tokens were replaced (`rtd`, DiffCSE), the masked tokens "
        "(`conditional_mlm`), or the original of every token (`corrective_lm`; both DiffCSE Table "
        "3); `none`: off",
        choices=ChainMap[str, Any]({"none": None}, PREDICTIONS),  # which grow with the table
    )
    sentence: str = option(
        "same",
        "edit the `same` sentence, the `next` one of the document, or `both` (DiffCSE Table 3; "
        "needs documents)",
        choices=("same", "next", "both"),
    )
    condition: str = option(
        "projected",
        "the embedding that conditions the discriminator: after or before the projector; `none`: a "
        "control, in which the loss trains the discriminator alone",
        choices=("projected", "pooled", "none"),
    )
    discriminator: str = option(
        "",
        "ELECTRA discriminator (folder or hub id) that the discriminator starts from, with its "
        "head, for `rtd`; it needs the encoder's vocabulary and hidden size; empty: a copy of the "
        "encoder, with a new head",
    )
    loss_positions: str = option(
        "all",
        "mean of `rtd` over all positions (code) or real tokens; other objectives use real tokens",
        choices=("all", "real"),
    )

    def active(self) -> Loss | None:
        return None if self.objective == "none" else super().active()

    def check(self, run: RunInfo) -> None:
        PREDICTIONS[self.objective].check(self)

    @property
    def needs(self) -> frozenset[str]:
        of_sentence = frozenset() if self.sentence == "same" else frozenset({"next_sentence"})
        return frozenset({"embeddings", "hidden_size"}) | self._edit.needs | of_sentence

    @property
    def _edit(self) -> Edit:
        return PREDICTIONS[self.objective].edit or EDITS[self.edit]

    @property
    def papers(self) -> tuple[str, ...]:
        return PREDICTIONS[self.objective].papers

    @property
    def panels(self) -> Mapping[str, tuple[str, ...]]:
        return PREDICTIONS[self.objective].panels

    def networks(self, checkpoints: PretrainedCheckpoints, run: RunInfo) -> dict[str, Network]:
        """Return the discriminator, an ELECTRA or a copy of the encoder, and its heads."""
        start = checkpoints.discriminator or checkpoints.encoder
        discriminator = Network(partial(Transformer, start.config), start.transformer)
        return {"discriminator": discriminator} | PREDICTIONS[self.objective].heads(checkpoints)

    def prepare(self, frozen: Computation, batch: Batch, key: PRNGKeyArray, run: RunInfo) -> PyTree:
        """Edit the same sentences, the next ones, or both: x -> x'', y. For both, return a dict."""

        def edited(rows: TokenRows, key: PRNGKeyArray) -> Edited:
            return self._edit.function(frozen, rows, self, key, run)

        if self.sentence != "both":
            return edited(_sentences(batch, self.sentence), key)
        return {
            name: edited(_sentences(batch, name), fold_in_name(key, name))
            for name in ("same", "next")
        }

    def loss(
        self, forward: SharedForward, inputs: PyTree, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        """Compute the loss of the prediction, or its mean over both sentences: x'', y, h -> L."""

        def predict(
            name: str, edited: Edited, key: PRNGKeyArray
        ) -> tuple[Float[Array, ""], Metrics]:
            original = _sentences(forward.batch, name).input_ids
            return PREDICTIONS[self.objective].loss(self, forward, edited, original, key)

        if self.sentence != "both":
            return predict(self.sentence, inputs, key)
        both = [predict(name, edited, fold_in_name(key, name)) for name, edited in inputs.items()]
        return jax.tree.map(lambda *values: jnp.stack(values).mean(), *both)


def _sentences(batch: Batch, name: str) -> TokenRows:
    """Return the batch's own sentences, or the next ones of their documents."""
    chosen = batch if name == "same" else batch.next
    assert chosen is not None  # the loss needs "next_sentence"
    return chosen.rows
