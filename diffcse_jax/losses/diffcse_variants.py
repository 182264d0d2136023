"""The ablations of DiffCSE: other edits, other predictions and other sentences (Chuang et al. 2022, Tables 3, 4, 15).

`Difference` is the loss of the key group `difference`. With its defaults it is `DiffCSE` of `diffcse.py`.
"""

import dataclasses
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from diffcse_jax.batch import Batch, TokenRows, Vocabulary
from diffcse_jax.errors import ConfigError
from diffcse_jax.losses import Checkpoints, GeneratorOptions, Loss, Metrics, RunInfo, option
from diffcse_jax.losses.diffcse import DiffCSE, Edited, Masked, MaskOptions, discriminate, generate, replace_tokens
from diffcse_jax.models.forward import FEW, MOST, Computation, SharedForward, fold_in_name, mean_where, row_keys
from diffcse_jax.models.heads import MaskedLMHead
from diffcse_jax.models.layers import Dense, Network

# Edits (Table 4).


@dataclasses.dataclass(frozen=True)
class EditOptions(MaskOptions):
    """How a sentence is edited."""

    edit: str = option(
        "replace",
        "`replace` masks tokens and lets the generator fill them, `insert` adds tokens of the generator, `delete` "
        "drops tokens, `mixed` does all three (DiffCSE Tables 4 and 15)",
        choices=("replace", "insert", "delete", "mixed"),
    )
    insert_ratio: float = option(0.15, "share of gaps that get a token; for `insert` and `mixed`", low=0.0, high=1.0)
    delete_ratio: float = option(0.15, "share of tokens that are dropped; for `delete` and `mixed`", low=0.0, high=1.0)

    @property
    def edit_needs(self) -> frozenset[str]:
        """What the edit needs (see `Loss.needs`)."""
        return frozenset({"mask_token"} if self.edit == "delete" else {"mask_token", "generator"})

    def edited(self, frozen: Computation, rows: TokenRows, key: PRNGKeyArray, run: RunInfo) -> PyTree:
        """Drop, insert, mask and fill tokens.

        Label 1 is on inserted tokens, on replaced tokens, and on tokens whose predecessor was dropped.
        """
        vocabulary, lengths_key = frozen.networks.vocabulary, fold_in_name(key, "lengths")
        rows, inserted, labels = change_lengths(lengths_key, rows, self, vocabulary, run.max_length)
        if self.edit == "delete":
            return Edited(rows, labels)
        ratio, options = self.mask_ratio, run.generator
        if self.edit == "insert":
            ratio, options = 0.0, dataclasses.replace(options, positions="masked")
        masked = MaskOptions(ratio, self.mask_style).masked(frozen, rows, key)
        masked = Masked(masked.rows, masked.selected | inserted)
        edited = generate(frozen, rows, masked, options, fold_in_name(key, "generator"))
        return Edited(edited.rows, edited.replaced | labels)


def change_lengths(
    key: PRNGKeyArray, rows: TokenRows, options: EditOptions, vocabulary: Vocabulary, max_length: int
) -> tuple[TokenRows, Bool[Array, "rows length"], Bool[Array, "rows length"]]:
    """Drop and insert random tokens.

    Each ordinary token is dropped with probability `delete_ratio`; [CLS] and [SEP] stay. Each gap between two tokens of
    the original gets a [MASK] with probability `insert_ratio`. A sentence that is longer than `max_length`
    afterwards loses its last tokens but keeps [SEP]. The token after a dropped one has label 1, even if it is [SEP], or
    if a token was inserted between them.

    Returns:
        The sentences, padded with 0, which tokens were inserted, and the labels: 1 on inserted tokens and after dropped
        ones. If the edit inserts tokens, there are up to twice as many positions, at most `max_length`. The sentences
        have no layout, because theirs was made for other lengths. If the edit keeps the lengths, the rows are returned
        unchanged. The edit of a row depends on the key, the row's number and the position, not on the padding.
    """
    insert = options.insert_ratio if options.edit in ("insert", "mixed") else 0.0
    delete = options.delete_ratio if options.edit in ("delete", "mixed") else 0.0
    ids, length = rows.input_ids, rows.input_ids.shape[1]
    nothing = jnp.zeros(ids.shape, bool)
    if not (insert or delete):
        return rows, nothing, nothing
    delete_keys, insert_keys = jax.vmap(jax.random.split, out_axes=1)(row_keys(key, len(ids)))

    def drawn(keys: jax.Array, share: float) -> jax.Array:
        return jax.vmap(lambda key: jax.random.bernoulli(key, share, (length,)))(keys)

    real = rows.attention_mask > 0
    has_next = jnp.pad(real[:, 1:], ((0, 0), (0, 1)))  # all real tokens except the last one, [SEP]
    dropped = real & ~jnp.isin(ids, jnp.array(vocabulary.special_ids, ids.dtype)) & drawn(delete_keys, delete)
    inserted = has_next & drawn(insert_keys, insert) if insert else nothing
    after_dropped = jnp.pad(dropped[:, :-1], ((0, 0), (1, 0)))
    mask_id = 0 if vocabulary.mask_id is None else vocabulary.mask_id  # read only if something is inserted

    # Each token is followed by the gap after it. Then the tokens that exist move together.
    def interleave(tokens: jax.Array, gaps: jax.Array) -> jax.Array:
        return jnp.stack([tokens, gaps], axis=2).reshape(len(ids), 2 * length)

    exists = interleave(real & ~dropped, inserted)
    is_last = interleave(real & ~has_next, nothing)
    positions = min(2 * length, max_length) if insert else length
    counts = jnp.cumsum(exists, axis=1)
    end = jnp.minimum(counts[:, -1:], positions) - 1  # the last token always has a position
    kept = exists & ((counts - 1 < end) | is_last)
    destinations = jnp.where(kept, jnp.where(is_last, end, counts - 1), positions)

    def place(values: jax.Array) -> jax.Array:
        empty = jnp.zeros((positions,), values.dtype)
        return jax.vmap(lambda where, values: empty.at[where].set(values, mode="drop"))(destinations, values)

    new_ids = place(interleave(ids, jnp.full_like(ids, mask_id)))
    attention_mask = place(exists.astype(rows.attention_mask.dtype))
    labels = place(interleave(after_dropped, ~nothing))
    return TokenRows(new_ids, attention_mask), place(interleave(nothing, ~nothing)), labels


def generated_second_views(
    frozen: Computation, batch: Batch, ratio: float, options: GeneratorOptions, key: PRNGKeyArray
) -> Batch:
    """Mask this share of the tokens of second views and let the generator fill them (SimCSE Table 1, "MLM k %")."""
    rows = TokenRows(batch.input_ids[:, 1], batch.attention_mask[:, 1])
    options = dataclasses.replace(options, positions="masked")
    edited = replace_tokens(frozen, rows, MaskOptions(ratio, "mask"), options, key)
    second = jnp.where(rows.attention_mask > 0, edited.rows.input_ids, rows.input_ids)
    return batch._replace(input_ids=batch.input_ids.at[:, 1].set(second))


# Predictions and sentences (Table 3).


@dataclasses.dataclass(frozen=True)
class Difference(EditOptions, DiffCSE):
    """A prediction about an edited sentence, given the embedding of a sentence."""

    objective: str = option(
        "rtd",
        "what is predicted: which tokens were replaced (`rtd`, DiffCSE), the masked tokens (`conditional_mlm`), or the "
        "original of every token (`corrective_lm`; both DiffCSE Table 3); `none`: off",
        choices=("rtd", "conditional_mlm", "corrective_lm", "none"),
    )
    sentence: str = option(
        "same",
        "edit the `same` sentence, the `next` one of the document, or `both` (DiffCSE Table 3; needs documents)",
        choices=("same", "next", "both"),
    )

    def active(self) -> Loss | None:
        if self.objective == "none" or self.weight == 0:
            return None
        kinds = {"rtd": Difference, "conditional_mlm": ConditionalMaskedLM, "corrective_lm": CorrectiveLM}
        return kinds[self.objective](**vars(self))

    @property
    def needs(self) -> frozenset[str]:
        next_sentence = {"next_sentence"} if self.sentence != "same" else set()
        return frozenset({"vectors", "hidden_size"} | next_sentence) | self.edit_needs

    def prepare(self, frozen: Computation, batch: Batch, key: PRNGKeyArray, run: RunInfo) -> PyTree:
        """Edit the same sentences, the next ones, or both. For both, return a dict."""
        batches: dict[str, Any] = {"same": batch, "next": batch.next}
        if self.sentence != "both":
            return self.edited(frozen, batches[self.sentence].rows, key, run)
        return {name: self.edited(frozen, each.rows, fold_in_name(key, name), run) for name, each in batches.items()}

    def loss(self, forward: SharedForward, inputs: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        """Compute the loss of the prediction. For both sentences, it is the mean of the two losses."""
        if self.sentence != "both":
            return self.predict(forward, inputs, key)
        results = [self.predict(forward, edited, fold_in_name(key, name)) for name, edited in inputs.items()]
        return jax.tree.map(lambda *values: jnp.stack(values).mean(), *results)

    def predict(self, forward: SharedForward, edited: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        """Compute the loss of the prediction about edited sentences."""
        return super().loss(forward, edited, key)


class _RecoversTokens(Difference):
    """A prediction of original tokens, by a masked-LM head whose decoder is the discriminator's embedding table."""

    def check(self, run: RunInfo) -> None:
        if self.discriminator:
            raise ConfigError(
                f"difference.discriminator={self.discriminator!r} needs difference.objective='rtd', the task of "
                f"ELECTRA. Leave it empty for {self.objective!r}."
            )
        if self.edit != "replace":
            raise ConfigError(
                f"difference.edit={self.edit!r} needs difference.objective='rtd': {self.objective!r} recovers the "
                "original of every token, and an inserted or dropped token has none."
            )

    def networks(self, checkpoints: Checkpoints, run: RunInfo) -> dict[str, Network]:
        encoder, discriminator = checkpoints.encoder, super().networks(checkpoints, run)["discriminator"]
        head = Network(partial(MaskedLMHead, encoder.config), encoder.mlm_head)
        return {"discriminator": discriminator, "discriminator_lm_head": head}


class ConditionalMaskedLM(_RecoversTokens):
    """The discriminator recovers the masked tokens. The loss is the mean cross-entropy; there is no generator."""

    panels = MappingProxyType({"conditional masked LM": ("conditional_mlm_accuracy",)})

    @property
    def needs(self) -> frozenset[str]:
        return super().needs - {"generator"}

    def edited(self, frozen: Computation, rows: TokenRows, key: PRNGKeyArray, run: RunInfo) -> PyTree:
        """Return masked sentences and the original tokens."""
        return self.masked(frozen, rows, key), rows.input_ids

    def predict(self, forward: SharedForward, edited: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        (rows, selected), original = edited
        computation = forward.computation
        head = computation.network("discriminator_lm_head")
        word_embeddings = computation.params["discriminator.embeddings.word.embedding"]

        def at_token(states: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = head(states, word_embeddings)
            correct = jnp.argmax(logits, axis=-1) == targets
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets), correct

        def at_rows(states: jax.Array, selected: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
            return computation.gather_positions(at_token, selected, states, targets, shares=FEW)

        losses, correct = discriminate(forward, rows, at_rows, selected, original, condition=self.condition, key=key)
        return mean_where(losses, selected), {"conditional_mlm_accuracy": mean_where(correct, selected)}


class CorrectiveLM(_RecoversTokens):
    """The discriminator recovers the original of every token, or copies the token of its input.

    The task and its copy mechanism are those of COCO-LM (Meng et al. 2021, "corrective language modeling"). A head
    gives the probability p_copy that a token is the original one. The language model predicts the rest:

        p(x) = p_copy [x = input token] + (1 - p_copy) p_LM(x)

    The loss is the mean of -log p(original), plus the mean binary cross-entropy of p_copy. p_copy gets no gradient from
    the first term. Both means are over all real tokens except position 0, which the sentence embedding replaces.
    (COCO-LM takes the first mean over masked tokens only; DiffCSE asks for every position.)
    """

    papers = ("diffcse", "coco_lm")
    panels = MappingProxyType({"corrective LM": ("corrective_lm_copy_accuracy", "corrective_lm_accuracy_replaced")})

    def networks(self, checkpoints: Checkpoints, run: RunInfo) -> dict[str, Network]:
        """Also return the head that gives the logit of p_copy for each token."""
        copy_head = Network(partial(Dense, checkpoints.encoder.config.hidden_size, 1))
        return super().networks(checkpoints, run) | {"copy_head": copy_head}

    def edited(self, frozen: Computation, rows: TokenRows, key: PRNGKeyArray, run: RunInfo) -> PyTree:
        """Return edited sentences and the original tokens."""
        return super().edited(frozen, rows, key, run), rows.input_ids

    def predict(self, forward: SharedForward, edited: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        (rows, replaced), original = edited
        computation = forward.computation
        language_model, copy = (computation.network(name) for name in ("discriminator_lm_head", "copy_head"))
        word_embeddings = computation.params["discriminator.embeddings.word.embedding"]
        where = (rows.attention_mask > 0).at[:, 0].set(False)

        def at_token(
            states: jax.Array, copy_logits: jax.Array, replaced: jax.Array, targets: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            logits = language_model(states, word_embeddings)
            correct = jnp.argmax(logits, axis=-1) == targets
            return corrective_language_model(logits, copy_logits, ~replaced, targets), correct

        def at_rows(states: jax.Array, where: jax.Array, *values: jax.Array) -> PyTree:
            copy_logits = copy(states)[..., 0].astype(jnp.float32)
            return computation.gather_positions(at_token, where, states, copy_logits, *values, shares=MOST), copy_logits

        (losses, correct), copy_logits = discriminate(
            forward, rows, at_rows, where, replaced, original, condition=self.condition, key=key
        )
        copy_loss = mean_where(optax.sigmoid_binary_cross_entropy(copy_logits, ~replaced), where)
        return mean_where(losses, where) + copy_loss, {
            "corrective_lm_copy_loss": copy_loss,
            "corrective_lm_copy_accuracy": mean_where((copy_logits > 0) == ~replaced, where),
            "corrective_lm_accuracy_replaced": mean_where(correct, where & replaced),
        }


def corrective_language_model(
    logits: Float[Array, "*tokens vocab"],
    copy_logits: Float[Array, "*tokens"],
    kept: Bool[Array, "*tokens"],
    targets: Int[Array, "*tokens"],
) -> Float[Array, "*tokens"]:
    """Compute -log(p_copy [target = input] + (1 - p_copy) p_LM(target)) per token, without a gradient for p_copy.

    `kept` is true where the input is the target.
    """
    copy_logits = jax.lax.stop_gradient(copy_logits)
    generated = jax.nn.log_sigmoid(-copy_logits) - optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return -jnp.where(kept, jnp.logaddexp(jax.nn.log_sigmoid(copy_logits), generated), generated)
