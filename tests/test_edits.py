import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tiny_model import random_params
from tiny_networks import SIZES, config_of, random_batch, views_of
from tiny_networks import VOCABULARY as TINY

from diffcse_jax.data.rows import Rows
from diffcse_jax.data.vocabulary import Vocabulary
from diffcse_jax.edits import choose_token, filled_positions, mask_tokens, replace_tokens
from diffcse_jax.models.computation import Computation, named_key
from diffcse_jax.models.heads import MaskedLMHead
from diffcse_jax.models.pretrained import Pretrained
from diffcse_jax.models.transformer import Transformer, TransformerConfig
from diffcse_jax.training import networks

PAD, CLS, SEP, MASK = 0, 1, 2, 3
VOCABULARY = Vocabulary(size=40, mask_id=MASK, special_ids=(PAD, CLS, SEP, MASK))
SHAPE = (3, 8)

ids_of_any_kind = arrays.arrays(np.int32, SHAPE, elements=st.integers(0, VOCABULARY.size - 1))
selections = arrays.arrays(np.bool_, SHAPE)
lengths = arrays.arrays(np.int32, SHAPE[:1], elements=st.integers(1, SHAPE[1]))
seeds = st.integers(0, 2**31)


def masked(ids: np.ndarray, seed: int, ratio: float = 0.3, style: str = "bert") -> tuple[np.ndarray, np.ndarray]:
    rows = Rows(jnp.array(ids), jnp.ones_like(ids))
    edited = mask_tokens(jax.random.key(seed), rows, vocabulary=VOCABULARY, ratio=ratio, style=style)
    return np.asarray(edited.rows.input_ids), np.asarray(edited.selected)


def replaced(
    logits: np.ndarray,
    ids: np.ndarray,
    selected: np.ndarray,
    sentence_lengths: np.ndarray,
    seed: int = 0,
    *,
    decode: str = "argmax",
    positions: str = "all",
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The edited ids, the labels, and which tokens are real."""
    real = np.arange(ids.shape[1]) < sentence_lengths[:, None]
    attention_mask = jnp.array(real, jnp.int32)
    keys = jax.random.split(jax.random.key(seed), ids.size)
    choose = jax.vmap(lambda logits, key: choose_token(logits, key if decode == "sample" else None))
    tokens = choose(jnp.array(logits).reshape(ids.size, -1), keys).reshape(ids.shape)
    filled = filled_positions(jnp.array(selected), attention_mask, positions=positions)
    edited = replace_tokens(tokens, Rows(jnp.array(ids), attention_mask), filled)
    return np.asarray(edited.rows.input_ids), np.asarray(edited.replaced), real


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


@pytest.mark.parametrize("ratio", [0.15, 0.3])
def test_share_of_masked_tokens_and_what_becomes_of_them(ratio):
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
    for token in set(range(VOCABULARY.size)) - {MASK, 10}:  # special tokens are drawn as often as any
        assert_share(drawn[token], count, same_by_chance)


def test_a_rows_mask_does_not_depend_on_padding_or_other_rows():
    ids = np.random.default_rng(0).integers(4, 40, (3, 16), np.int32)
    for whole, part in zip(masked(ids, seed=0), masked(ids[:2, :9], seed=0), strict=True):
        np.testing.assert_array_equal(whole[:2, :9], part)


def test_each_row_and_each_key_has_its_own_mask():
    ids = np.full((2, 200), 10, np.int32)
    _, first = masked(ids, seed=0)
    _, second = masked(ids, seed=1)
    assert (first[0] != first[1]).any()
    assert (first != second).any()


@given(st.data(), ids_of_any_kind, selections, lengths)
def test_what_replacing_never_touches_and_where_labels_lie(data, ids, selected, sentence_lengths):
    options = {
        "decode": data.draw(st.sampled_from(["argmax", "sample"])),
        "positions": data.draw(st.sampled_from(["all", "masked"])),
    }
    seed = data.draw(st.integers(0, 2**31))
    logits = np.random.default_rng(seed).normal(0, 2, (*SHAPE, VOCABULARY.size)).astype(np.float32)
    edited, labels, real = replaced(logits, ids, selected, sentence_lengths, seed, **options)
    np.testing.assert_array_equal(edited[:, 0], ids[:, 0])
    assert (edited[~real] == 0).all()
    np.testing.assert_array_equal(labels, (edited != ids) & real)
    if options["positions"] == "masked":
        np.testing.assert_array_equal(edited[real & ~selected], ids[real & ~selected])


@given(ids_of_any_kind, selections, seeds)
def test_argmax_takes_the_best_token_wherever_it_may(ids, selected, seed):
    logits = np.random.default_rng(seed).normal(size=(*SHAPE, VOCABULARY.size)).astype(np.float32)
    whole = np.full(SHAPE[:1], SHAPE[1], np.int32)
    best = logits.argmax(-1)
    everywhere, _, _ = replaced(logits, ids, selected, whole)
    np.testing.assert_array_equal(everywhere[:, 1:], best[:, 1:])
    at_masks, _, _ = replaced(logits, ids, selected, whole, positions="masked")
    np.testing.assert_array_equal(at_masks[:, 1:], np.where(selected, best, ids)[:, 1:])


def test_sep_is_not_spared():
    ids = np.array([[CLS, 10, SEP, PAD]], np.int32)
    logits = np.zeros((1, 4, VOCABULARY.size), np.float32)
    logits[..., 11] = 1.0
    edited, labels, _ = replaced(logits, ids, np.zeros((1, 4), bool), np.array([3]))
    np.testing.assert_array_equal(edited, [[CLS, 11, 11, PAD]])
    np.testing.assert_array_equal(labels, [[False, True, True, False]])


def test_padding_that_has_another_id_becomes_0_and_no_label():
    edited, labels, _ = replaced(
        np.zeros((1, 3, VOCABULARY.size), np.float32),
        np.array([[5, 0, 7]], np.int32),  # 7: RoBERTa's padding is not 0 either
        np.zeros((1, 3), bool),
        np.array([2]),
    )
    np.testing.assert_array_equal(edited, [[5, 0, 0]])
    assert not labels.any()


def test_sampling_follows_the_generators_distribution():
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.tile(np.log(probabilities).astype(np.float32), (100, 101, 1))
    ids = np.zeros((100, 101), np.int32)
    edited, _, _ = replaced(
        logits, ids, np.ones_like(ids, bool), np.full(100, 101), decode="sample", positions="masked"
    )
    for token, count in enumerate(np.bincount(edited[:, 1:].ravel(), minlength=4)):
        assert_share(count, 100 * 100, probabilities[token])


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_tokens_are_sampled_at_a_temperature(temperature):
    logits, trials = np.array([0.0, 1.0, -1.0], np.float32), 4000
    keys = jax.random.split(jax.random.key(3), trials)
    tokens = jax.vmap(lambda key: choose_token(jnp.array(logits), key, temperature))(keys)
    probabilities = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    for token, probability in enumerate(probabilities):
        assert_share(int((tokens == token).sum()), trials, probability)


DISTILBERT = dataclasses.replace(
    SIZES, family="distilbert", type_vocab_size=0, attention_output_dropout=False, hidden_size=8, num_blocks=1,
    hidden_dropout=(0.1,), attention_dropout=(0.1,),
)  # fmt: skip


@pytest.mark.parametrize(("encoder", "generator"), [(SIZES, DISTILBERT), (DISTILBERT, SIZES)])
def test_a_generator_of_another_family_and_size(encoder, generator):
    """Its arg-max at the masked positions, by its own forward pass."""
    options = {"dropout": False, "positions": "masked"}
    config = config_of({"generator": options, "difference": {"mask_ratio": 0.5}})

    def checkpoint(sizes: TransformerConfig) -> Pretrained:
        transformer, head = random_params(Transformer, sizes), random_params(MaskedLMHead, sizes)
        return Pretrained(Path("tiny"), {}, sizes, transformer, pooler=None, mlm_head=head)

    built = networks.build(config, checkpoint(encoder), checkpoint(generator), TINY)
    frozen = Computation(built.networks, jax.tree.map(jnp.asarray, built.frozen))
    views, key = jax.tree.map(jnp.asarray, views_of(random_batch())), jax.random.key(0)
    edited = config.objectives["difference"].corrupt(frozen, views, key)
    given = mask_tokens(named_key(key, "mask"), views.rows, vocabulary=TINY, ratio=0.5, style="bert")
    states = frozen.network("generator")(given.rows)["last_hidden_state"]
    logits = frozen.network("generator_head")(states, frozen.params["generator.embeddings.word.embedding"])
    expected = np.where(given.selected, logits.argmax(axis=-1), views.rows.input_ids)
    np.testing.assert_array_equal(edited.rows.input_ids, expected)
    assert np.asarray(edited.replaced).any()
