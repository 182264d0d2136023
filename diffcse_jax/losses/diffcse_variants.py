"""The ablations of DiffCSE (Chuang et al. 2022, Tables 3, 4, 15): other edits and predictions.

Each is a function, and a line in one of the tables `EDITS` and `PREDICTIONS` of `diffcse.py`.
There, `replace` and `detect_replaced_tokens` are the edit and the prediction of DiffCSE itself.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from diffcse_jax.batch import Batch, TokenRows, Vocabulary
from diffcse_jax.errors import ConfigError
from diffcse_jax.losses import Loss, Metrics, PretrainedCheckpoints, RunInfo
from diffcse_jax.losses.contrastive import info_nce
from diffcse_jax.losses.diffcse import (
    EDITS,
    PREDICTIONS,
    DiffCSE,
    Edit,
    Edited,
    EditOptions,
    Masked,
    MaskOptions,
    Prediction,
    discriminate,
    generate,
    replace,
)
from diffcse_jax.losses.masked_lm import score_tokens
from diffcse_jax.models.forward import (
    FEW,
    MOST,
    Computation,
    SharedForward,
    fold_in_name,
    mean_where,
    row_keys,
)
from diffcse_jax.models.heads import MaskedLMHead
from diffcse_jax.models.layers import Dense, Network
from diffcse_jax.options import option

# Edits (Table 4). The label is 1 on inserted and replaced tokens, and on those after a dropped one.


def insert(
    frozen: Computation,
    rows: TokenRows,
    options: EditOptions,
    key: PRNGKeyArray,
    run: RunInfo,
) -> Edited:
    """Insert tokens of the generator. The arguments are those of `replace`."""
    changed = _changed(frozen, rows, key, run, insert_ratio=options.insert_ratio)
    generator = dataclasses.replace(run.generator, positions="masked")
    masked = Masked(changed.rows, changed.inserted)
    edited = generate(frozen, changed.rows, masked, generator, fold_in_name(key, "generator"))
    return Edited(edited.rows, edited.labels | changed.labels)


def delete(
    frozen: Computation,
    rows: TokenRows,
    options: EditOptions,
    key: PRNGKeyArray,
    run: RunInfo,
) -> Edited:
    """Drop tokens. The arguments are those of `replace`."""
    changed = _changed(frozen, rows, key, run, delete_ratio=options.delete_ratio)
    return Edited(changed.rows, changed.labels)


def mixed(
    frozen: Computation,
    rows: TokenRows,
    options: EditOptions,
    key: PRNGKeyArray,
    run: RunInfo,
) -> Edited:
    """Drop, insert and replace tokens. The arguments are those of `replace`."""
    ratios = {"insert_ratio": options.insert_ratio, "delete_ratio": options.delete_ratio}
    changed = _changed(frozen, rows, key, run, **ratios)
    masked = options.masked(frozen, changed.rows, key)
    masked = Masked(masked.rows, masked.selected | changed.inserted)
    edited = generate(frozen, changed.rows, masked, run.generator, fold_in_name(key, "generator"))
    return Edited(edited.rows, edited.labels | changed.labels)


EDITS.update(
    {
        "insert": Edit(insert),
        "delete": Edit(delete, needs=frozenset()),
        "mixed": Edit(mixed),
    }
)


class Changed(NamedTuple):
    """Sentences of other lengths than the originals, padded with 0."""

    rows: TokenRows
    inserted: Bool[Array, "rows length"]  # the tokens that were inserted, [MASK]
    labels: Bool[Array, "rows length"]  # true on inserted tokens and after dropped ones


def _changed(
    frozen: Computation,
    rows: TokenRows,
    key: PRNGKeyArray,
    run: RunInfo,
    **ratios: float,
) -> Changed:
    vocabulary = frozen.networks.vocabulary
    key = fold_in_name(key, "lengths")
    return change_lengths(key, rows, vocabulary=vocabulary, max_length=run.max_length, **ratios)


def change_lengths(
    key: PRNGKeyArray,
    rows: TokenRows,
    *,
    insert_ratio: float = 0.0,
    delete_ratio: float = 0.0,
    vocabulary: Vocabulary,
    max_length: int,
) -> Changed:
    """Drop and insert random tokens.

    Args:
        key: A random key. What happens to a row depends on it, the row's number and the position,
            not on padding.
        rows: The sentences.
        insert_ratio: The probability with which each gap between two tokens gets a [MASK].
        delete_ratio: The probability with which each ordinary token is dropped; [CLS] and [SEP]
            stay.
        vocabulary: The tokenizer's vocabulary.
        max_length: A sentence that is longer afterwards loses its last tokens but keeps [SEP].

    Returns:
        The sentences, without a layout, because theirs was made for other lengths. If tokens are
        inserted, there are up to twice as many positions, at most `max_length`. If both ratios are
        0, the rows are returned unchanged. The token after a dropped one has label 1, even if it is
        [SEP], or if a token was inserted between them.
    """
    ids = rows.input_ids
    length = rows.input_ids.shape[1]
    nothing = jnp.zeros(ids.shape, bool)
    if not (insert_ratio or delete_ratio):
        return Changed(rows, nothing, nothing)
    delete_keys, insert_keys = jax.vmap(jax.random.split, out_axes=1)(row_keys(key, len(ids)))

    def drawn(keys: jax.Array, share: float) -> jax.Array:
        return jax.vmap(lambda key: jax.random.bernoulli(key, share, (length,)))(keys)

    real = rows.attention_mask > 0
    has_next = jnp.pad(real[:, 1:], ((0, 0), (0, 1)))  # all real tokens except the last one, [SEP]
    ordinary = real & ~jnp.isin(ids, jnp.array(vocabulary.special_ids, ids.dtype))
    dropped = ordinary & drawn(delete_keys, delete_ratio)
    inserted = has_next & drawn(insert_keys, insert_ratio) if insert_ratio else nothing
    after_dropped = jnp.pad(dropped[:, :-1], ((0, 0), (1, 0)))
    # This id is read only if something is inserted.
    mask_id = 0 if vocabulary.mask_id is None else vocabulary.mask_id

    # Each token is followed by the gap after it. Then the tokens that exist move together.
    def interleave(tokens: jax.Array, gaps: jax.Array) -> jax.Array:
        return jnp.stack([tokens, gaps], axis=2).reshape(len(ids), 2 * length)

    exists = interleave(real & ~dropped, inserted)
    is_last = interleave(real & ~has_next, nothing)
    positions = min(2 * length, max_length) if insert_ratio else length
    counts = jnp.cumsum(exists, axis=1)
    end = jnp.minimum(counts[:, -1:], positions) - 1  # the last token always has a position
    kept = exists & ((counts - 1 < end) | is_last)
    destinations = jnp.where(kept, jnp.where(is_last, end, counts - 1), positions)

    def place(values: jax.Array) -> jax.Array:
        empty = jnp.zeros((positions,), values.dtype)
        return jax.vmap(lambda where, values: empty.at[where].set(values, mode="drop"))(
            destinations, values
        )

    new_ids = place(interleave(ids, jnp.full_like(ids, mask_id)))
    attention_mask = place(exists.astype(rows.attention_mask.dtype))
    labels = place(interleave(after_dropped, ~nothing))
    return Changed(TokenRows(new_ids, attention_mask), place(interleave(nothing, ~nothing)), labels)


# Predictions (Table 3). These recover original tokens. The decoder of their masked-LM head is the
# discriminator's embedding table.


def _check_tokens_have_originals(options: DiffCSE) -> None:
    """Raise a `ConfigError` for an ELECTRA discriminator, or an edit without original tokens."""
    if options.discriminator:
        raise ConfigError(
            f"difference.discriminator={options.discriminator!r} needs difference.objective='rtd', "
            f"the task of ELECTRA. Leave it empty for {options.objective!r}."
        )
    if options.edit != "replace":
        raise ConfigError(
            f"difference.edit={options.edit!r} needs difference.objective='rtd': "
            f"{options.objective!r} recovers the original of every token, and an inserted or "
            "dropped token has none."
        )


def _language_model(checkpoints: PretrainedCheckpoints) -> dict[str, Network]:
    encoder = checkpoints.encoder
    return {
        "discriminator_lm_head": Network(partial(MaskedLMHead, encoder.config), encoder.mlm_head)
    }


def _mask_only(
    frozen: Computation,
    rows: TokenRows,
    options: MaskOptions,
    key: PRNGKeyArray,
    run: RunInfo,
) -> Edited:
    masked = options.masked(frozen, rows, key)
    return Edited(masked.rows, labels=masked.selected)


def predict_masked_tokens(
    options: DiffCSE,
    forward: SharedForward,
    masked: Edited,
    original: Int[Array, "rows length"],
    key: PRNGKeyArray,
) -> tuple[Float[Array, ""], Metrics]:
    """Compute the mean cross-entropy of the original tokens at masked positions.

    There is no generator. The arguments are those of `detect_replaced_tokens`, with masked
    sentences.
    """
    rows, selected = masked
    computation = forward.computation
    head = computation.network("discriminator_lm_head")
    word_embeddings = computation.params["discriminator.embeddings.word.embedding"]

    at_tokens = partial(score_tokens, head, word_embeddings)

    def at_rows(
        states: jax.Array, selected: jax.Array, targets: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return computation.gather_positions(at_tokens, selected, states, targets, shares=FEW)

    losses, correct = discriminate(
        forward, rows, at_rows, selected, original, condition=options.condition, key=key
    )
    return mean_where(losses, selected), {"conditional_mlm_accuracy": mean_where(correct, selected)}


def correct_tokens(
    options: DiffCSE,
    forward: SharedForward,
    edited: Edited,
    original: Int[Array, "rows length"],
    key: PRNGKeyArray,
) -> tuple[Float[Array, ""], Metrics]:
    """Compute the loss of a language model that recovers the original of every token, or copies it.

    The arguments are those of `detect_replaced_tokens`.

    The task and its copy mechanism are those of COCO-LM (Meng et al. 2021, "corrective language
    modeling"). A head gives the probability p_copy that a token is the original one. The language
    model predicts the rest:

        p(x) = p_copy [x = input token] + (1 - p_copy) p_LM(x)

    The loss is the mean of -log p(original), plus the mean binary cross-entropy of p_copy. p_copy
    gets no gradient from the first term. Both means are over all real tokens except position 0,
    which the sentence embedding replaces. (COCO-LM takes the first mean over masked tokens only;
    DiffCSE asks for every position.)
    """
    rows, replaced = edited
    computation = forward.computation
    language_model = computation.network("discriminator_lm_head")
    copy = computation.network("copy_head")
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
        inputs = (states, copy_logits, *values)
        return computation.gather_positions(at_token, where, *inputs, shares=MOST), copy_logits

    (losses, correct), copy_logits = discriminate(
        forward, rows, at_rows, where, replaced, original, condition=options.condition, key=key
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
    """Compute -log(p_copy [target = input] + (1 - p_copy) p_LM(target)) per token.

    p_copy has no gradient. `kept` is true where the input is the target.
    """
    copy_logits = jax.lax.stop_gradient(copy_logits)
    entropies = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    generated = jax.nn.log_sigmoid(-copy_logits) - entropies
    return -jnp.where(kept, jnp.logaddexp(jax.nn.log_sigmoid(copy_logits), generated), generated)


def _language_model_that_copies(checkpoints: PretrainedCheckpoints) -> dict[str, Network]:
    """Return also the head that gives the logit of p_copy for each token."""
    copy_head = Network(partial(Dense, checkpoints.encoder.config.hidden_size, 1))
    return _language_model(checkpoints) | {"copy_head": copy_head}


CORRECTIVE_LM = ("corrective_lm_copy_accuracy", "corrective_lm_accuracy_replaced")  # in one panel
PREDICTIONS.update(
    {
        "conditional_mlm": Prediction(
            predict_masked_tokens,
            _language_model,
            panels={"conditional masked LM": ("conditional_mlm_accuracy",)},
            check=_check_tokens_have_originals,
            edit=Edit(_mask_only, needs=frozenset({"mask_token"})),
        ),
        "corrective_lm": Prediction(
            correct_tokens,
            _language_model_that_copies,
            panels={"corrective LM": CORRECTIVE_LM},
            papers=("diffcse", "coco_lm"),
            check=_check_tokens_have_originals,
        ),
    }
)


# Edited sentences as positives, as negatives (Table 15), and as second views (SimCSE).


@dataclasses.dataclass(frozen=True)
class EditedContrast(EditOptions, Loss):
    """A contrast with edited sentences, as positives or negatives (DiffCSE Table 15).

    DiffCSE learns to notice an edit. This loss treats an edited sentence as the same sentence, or
    as another one. Each step edits the anchors again. The paper does not say how it combined its
    terms; this is our reading:

    - `positive`: InfoNCE (SimCSE Eq. 4) between anchors and their edits, added to `contrast` or in
      place of it.
    - `negative`: InfoNCE between the views with all edits as hard negatives (SimCSE Eq. 8), which
      takes the place of `contrast` if contrast.weight is 0.
    """

    weight: float = option(
        0.0, "weight of the contrast with edited sentences (Table 15: mask_ratio 0.15)", low=0.0
    )
    role: str = option(
        "positive",
        "edits are `positive` for their originals, or hard `negative` for all: that contains "
        "`contrast`, so set contrast.weight=0",
        choices=("positive", "negative"),
    )
    temperature: float = option(0.05, "temperature that divides the cosine similarities", low=1e-6)
    compares_embeddings = True
    papers = ("diffcse",)

    @property
    def needs(self) -> frozenset[str]:
        of_views = frozenset({"dropout"} if self.role == "negative" else ())
        return frozenset({"embeddings"}) | of_views | EDITS[self.edit].needs

    def prepare(self, frozen: Computation, batch: Batch, key: PRNGKeyArray, run: RunInfo) -> Edited:
        return EDITS[self.edit].function(frozen, batch.anchors, self, key, run)

    def loss(
        self, forward: SharedForward, inputs: PyTree, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        z1, z2, *_ = forward.projected_views
        edits = forward.projected(inputs.rows, row_keys(key, len(z1)), name="edited_contrast")
        if self.role == "positive":
            return info_nce(z1, edits, temperature=self.temperature).mean(), {}
        return info_nce(z1, z2, temperature=self.temperature, hard_negatives=[edits]).mean(), {}


def generated_second_views(
    frozen: Computation,
    batch: Batch,
    ratio: float,
    key: PRNGKeyArray,
    run: RunInfo,
) -> Batch:
    """Mask tokens of second views and let the generator fill them (SimCSE Table 1, "MLM k %").

    `ratio` is the share of the tokens that is masked.
    """
    rows = TokenRows(batch.input_ids[:, 1], batch.attention_mask[:, 1])
    run = run._replace(generator=dataclasses.replace(run.generator, positions="masked"))
    edited = replace(frozen, rows, MaskOptions(ratio, "mask"), key, run)
    second = jnp.where(rows.attention_mask > 0, edited.rows.input_ids, rows.input_ids)
    return batch._replace(input_ids=batch.input_ids.at[:, 1].set(second))
