"""DiffCSE step by step: mask, generate, label, and the loss.

There are also other edits, and second views by the generator.
"""

import dataclasses
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy.special import log_softmax
from tiny_networks import (
    CLS,
    ENCODER,
    GENERATOR,
    MASK,
    PAD,
    SEP,
    SIMCSE,
    VOCABULARY,
    config_of,
    evaluate,
    random_batch,
    views_of,
)

from diffcse_jax.batch import TokenRows
from diffcse_jax.losses import diffcse_variants
from diffcse_jax.losses.diffcse import EDITS, Edited, label, mask_tokens, replaced_token_detection
from diffcse_jax.losses.diffcse_variants import generated_second_views
from diffcse_jax.models.forward import Computation, Networks
from diffcse_jax.training import networks

SHAPE, KEY = (3, 8), jax.random.key(0)

ids_of_any_kind = arrays.arrays(np.int32, SHAPE, elements=st.integers(0, VOCABULARY.size - 1))
lengths = arrays.arrays(np.int32, SHAPE[:1], elements=st.integers(1, SHAPE[1]))
seeds = st.integers(0, 2**31)


def masked(
    ids: np.ndarray, seed: int, ratio: float = 0.3, style: str = "bert"
) -> tuple[np.ndarray, np.ndarray]:
    rows = TokenRows(jnp.array(ids), jnp.ones_like(ids))
    edited = mask_tokens(
        jax.random.key(seed), rows, vocabulary=VOCABULARY, ratio=ratio, style=style
    )
    return np.asarray(edited.rows.input_ids), np.asarray(edited.selected)


def assert_share(count: int, trials: int, probability: float) -> None:
    """Within five standard deviations of the binomial distribution: a false alarm in 1.7 million."""
    deviation = np.sqrt(trials * probability * (1 - probability))
    assert abs(count - trials * probability) < 5 * deviation


@given(ids_of_any_kind, seeds, st.sampled_from(["bert", "mask"]), st.sampled_from([0.0, 0.3, 1.0]))
def test_only_selected_ordinary_tokens_change(ids, seed, style, ratio):
    edited, selected = masked(ids, seed, ratio, style)
    ordinary = ~np.isin(ids, VOCABULARY.special_ids)
    assert not (selected & ~ordinary).any()
    np.testing.assert_array_equal(edited[~selected], ids[~selected])
    assert ((edited >= 0) & (edited < VOCABULARY.size)).all()
    if ratio in (0.0, 1.0):
        np.testing.assert_array_equal(selected, ordinary & (ratio == 1.0))
    if style == "mask":
        assert (edited[selected] == MASK).all()


def test_share_of_masked_tokens_and_what_becomes_of_them():
    ratio = 0.15
    # The token in the text is one id, so that a random token equals it with probability 1 / size.
    ids = np.full((200, 200), 10, np.int32)
    edited, selected = masked(ids, seed=0, ratio=ratio)
    count = int(selected.sum())
    assert_share(count, ids.size, ratio)
    tokens = edited[selected]
    same_by_chance = 0.1 / VOCABULARY.size
    assert_share((tokens == MASK).sum(), count, 0.8 + same_by_chance)
    assert_share((tokens == 10).sum(), count, 0.1 + same_by_chance)
    drawn = np.bincount(tokens[(tokens != MASK) & (tokens != 10)], minlength=VOCABULARY.size)
    # special tokens are drawn as often as any
    for token in set(range(VOCABULARY.size)) - {MASK, 10}:
        assert_share(drawn[token], count, same_by_chance)


@given(ids_of_any_kind, ids_of_any_kind, arrays.arrays(np.bool_, SHAPE), lengths)
def test_tokens_that_differ_are_labelled(ids, tokens, filled, lengths):
    real = np.arange(SHAPE[1]) < lengths[:, None]
    rows = TokenRows(jnp.array(ids), jnp.array(real, jnp.int32))
    edited = label(jnp.array(tokens), rows, jnp.array(filled))
    expected = np.where(real, np.where(filled, tokens, ids), PAD)
    np.testing.assert_array_equal(edited.rows.input_ids, expected)
    np.testing.assert_array_equal(edited.labels, (expected != ids) & real)


def edited_by(logits: np.ndarray, rows: TokenRows, generator: dict, **difference):
    """The edits with a generator that has these logits at every position."""
    zeros = {name: np.zeros_like(array) for name, array in GENERATOR.mlm_head.items()}
    checkpoint = dataclasses.replace(GENERATOR, mlm_head=zeros | {"bias": np.float32(logits)})
    config = config_of({"difference": difference, "generator": generator})
    built = networks.build(config, ENCODER, checkpoint, VOCABULARY)
    frozen = Computation(built.networks, jax.device_put(built.frozen))
    edit = EDITS[config.difference.edit].function
    return jax.jit(lambda rows: edit(frozen, rows, config.difference, KEY, config.run_info))(rows)


def test_tokens_are_sampled_by_their_probabilities():
    shape, logits = (300, 16), np.full(VOCABULARY.size, -1e9)
    logits[20:24] = [0.0, 1.0, -1.0, 0.3]
    rows = TokenRows(jnp.full(shape, 10), jnp.ones(shape, jnp.int32))
    tokens = np.asarray(edited_by(logits, rows, {"decode": "sample"}).rows.input_ids)[:, 1:]
    for token, probability in enumerate(
        np.exp(logits[20:24]) / np.exp(logits[20:24]).sum(), start=20
    ):
        assert_share(int((tokens == token).sum()), tokens.size, probability)


def changed_lengths(
    sentence_lengths: np.ndarray,
    seed: int,
    *,
    positions: int = SHAPE[1],
    max_length: int = 24,
    **options,
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """The original sentences, of tokens that differ within a row, the edited ones and their labels, without padding.

    The generator keeps [MASK], and nothing is replaced. 24 positions hold every edit of a sentence
    of `SHAPE`.
    """
    real = np.arange(positions) < sentence_lengths[:, None]
    ids = np.where(real, MASK + 1 + np.arange(positions)[None], PAD)
    ids[:, 0] = CLS
    ids[np.arange(len(ids)), sentence_lengths - 1] = SEP
    rows = TokenRows(jnp.array(ids, jnp.int32), jnp.array(real, jnp.int32))
    config = config_of(
        {"difference": options | {"mask_ratio": 0.0}, "data": {"max_length": max_length}}
    )
    frozen, edit = Computation(Networks(VOCABULARY, {}), {}), EDITS[config.difference.edit].function

    def keep_masks(frozen, rows, masked, options, key):
        np.testing.assert_array_equal(masked.selected, masked.rows.input_ids == MASK)
        return Edited(masked.rows, masked.selected)

    with mock.patch.object(diffcse_variants, "generate", keep_masks):
        changed, labels = edit(
            frozen, rows, config.difference, jax.random.key(seed), config.run_info
        )
    assert changed.layout is None
    mask = np.asarray(changed.attention_mask) > 0
    assert (np.diff(mask.astype(int), axis=1) <= 0).all()  # padding comes last
    assert not np.asarray(changed.input_ids)[~mask].any()
    assert not np.asarray(labels)[~mask].any()
    return tuple(
        [values[there].tolist() for values, there in zip(np.asarray(array), where, strict=True)]
        for array, where in ((ids, real), (changed.input_ids, mask), (labels, mask))
    )


sentences_of_two_or_more = arrays.arrays(np.int64, SHAPE[:1], elements=st.integers(2, SHAPE[1]))
ratios = st.sampled_from([0.0, 0.15, 0.5, 1.0])


@given(
    sentences_of_two_or_more, seeds, st.sampled_from(["insert", "delete", "mixed"]), ratios, ratios
)
def test_labels_lie_on_inserted_tokens_and_after_dropped_ones(
    sentence_lengths, seed, edit, insert, delete
):
    shares = {"insert_ratio": insert, "delete_ratio": delete}
    for original, edited, labels in zip(
        *changed_lengths(sentence_lengths, seed, edit=edit, **shares), strict=True
    ):
        assert (edited[0], edited[-1]) == (original[0], original[-1]) == (CLS, SEP)
        kept = [token for token in edited if token != MASK]
        assert kept == [token for token in original if token in kept]  # in order, none twice
        if edit == "insert" or delete == 0:
            assert kept == original
        if edit == "delete" or insert == 0:
            assert kept == edited
        if edit != "delete" and insert == 1:
            assert edited.count(MASK) == len(original) - 1
        if edit != "insert" and delete == 1:
            assert kept == [CLS, SEP]
        expected = [
            token == MASK or (token != CLS and original[original.index(token) - 1] not in kept)
            for token in edited
        ]
        assert labels == expected


@given(
    sentences_of_two_or_more, seeds, st.sampled_from(["insert", "mixed"]), st.integers(SHAPE[1], 15)
)
def test_a_full_sentence_loses_what_comes_last_and_keeps_sep(
    sentence_lengths, seed, edit, max_length
):
    shares = {"edit": edit, "insert_ratio": 0.8}
    _, whole, whole_labels = changed_lengths(sentence_lengths, seed, **shares)
    _, cut, cut_labels = changed_lengths(sentence_lengths, seed, max_length=max_length, **shares)
    for full, short in zip(whole + whole_labels, cut + cut_labels, strict=True):
        assert short == (full if len(full) <= max_length else [*full[: max_length - 1], full[-1]])


def test_lengths_change_in_the_shares_that_were_asked_for():
    lengths = np.full(100, 200)
    for edit, insert, delete in (("insert", 0.15, 0.0), ("delete", 0.0, 0.15), ("mixed", 0.3, 0.1)):
        # read by the edits they concern only
        shares = {"insert_ratio": insert or 1.0, "delete_ratio": delete or 1.0}
        _, edited, _ = changed_lengths(
            lengths, 0, positions=200, max_length=400, edit=edit, **shares
        )
        inserted = sum(row.count(MASK) for row in edited)
        dropped = 100 * 200 - sum(map(len, edited)) + inserted
        for count, places, share in ((inserted, 199, insert), (dropped, 198, delete)):
            if share:
                assert_share(count, 100 * places, share)
            else:
                assert count == 0


@pytest.mark.parametrize(
    ("edit", "positions", "expected"),
    [
        ("replace", "masked", [CLS, 20, 20, SEP, PAD]),
        ("replace", "all", [CLS, 20, 20, 20, PAD]),  # also [SEP], as in the authors' code
        ("insert", "all", [CLS, 20, 10, 20, 11, 20, SEP, PAD, PAD, PAD]),
        ("mixed", "masked", [CLS, 20, 10, 20, 11, 20, SEP, PAD, PAD, PAD]),
        ("mixed", "all", [CLS, 20, 20, 20, 20, 20, 20, PAD, PAD, PAD]),
    ],
)
def test_the_generator_spares_position_0_and_padding(edit, positions, expected):
    always_20 = np.arange(VOCABULARY.size) == 20
    options = {
        "edit": edit,
        "insert_ratio": 1.0,
        "delete_ratio": 0.0,
        "mask_ratio": float(edit == "replace"),
    }
    rows = TokenRows(jnp.array([[CLS, 10, 11, SEP, PAD]]), jnp.array([[1, 1, 1, 1, 0]]))
    edited = edited_by(always_20, rows, {"positions": positions}, **options)
    np.testing.assert_array_equal(edited.rows.input_ids, [expected])
    np.testing.assert_array_equal(edited.labels, edited.rows.input_ids == 20)


def test_the_generator_makes_second_views():
    config = config_of(SIMCSE, {"data": {"augmentation": "mlm", "augmentation_ratio": 0.5}})
    assert config.needs("generator")
    built = networks.build(config, ENCODER, GENERATOR, VOCABULARY)
    frozen = Computation(built.networks, jax.device_put(built.frozen))
    views = jax.tree.map(jnp.asarray, views_of(random_batch(), packed=True))
    changed = jax.jit(
        lambda views: generated_second_views(frozen, views, 0.5, KEY, config.run_info)
    )(views)
    differs = np.asarray(changed.input_ids != views.input_ids)
    assert not differs[:, 0].any()
    ordinary = ~np.isin(views.input_ids, VOCABULARY.special_ids)
    assert not (differs & ~ordinary).any()
    # half of them, but for those that it guessed
    assert 0.3 < differs[:, 1].sum() / ordinary[:, 1].sum() < 0.6
    jax.tree.map(np.testing.assert_array_equal, changed._replace(input_ids=views.input_ids), views)
    assert not config_of(SIMCSE).needs("generator")


@pytest.mark.parametrize("condition", ["projected", "pooled", "none"])
def test_the_difference_reaches_the_encoder_through_the_condition_alone(condition):
    alone = {"contrast": {"weight": 0.0}, "difference": {"weight": 1.0, "condition": condition}}
    grads, _ = evaluate(alone, transform=partial(jax.grad, has_aux=True))
    reached = {name.partition(".")[0] for name, grad in grads.items() if np.any(grad)}
    through = {"projected": {"encoder", "projector"}, "pooled": {"encoder"}, "none": set()}
    assert reached == {"discriminator", "token_classifier"} | through[condition]


@given(
    arrays.arrays(np.float32, (2, 3, 2), elements=st.floats(-1e4, 1e4, width=32)),
    arrays.arrays(np.bool_, (2, 3)),
)
def test_replaced_token_detection_is_the_two_class_cross_entropy(logits, replaced):
    losses = replaced_token_detection(jnp.array(logits), jnp.array(replaced))
    if_kept, if_replaced = np.moveaxis(-log_softmax(np.float64(logits), axis=-1), -1, 0)
    np.testing.assert_allclose(
        losses, np.where(replaced, if_replaced, if_kept), rtol=1e-5, atol=1e-6
    )
