"""Losses that compare embeddings: their formulas, what they read, and their weighted sum."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from reference_networks import REFERENCES
from scipy.spatial.distance import jensenshannon
from scipy.special import softmax
from tiny_networks import (
    ENCODER,
    GENERATOR,
    NO_DROPOUT,
    SIMCSE,
    VOCABULARY,
    config_of,
    evaluate,
    forward_of,
    random_batch,
    views_of,
)

from diffcse_jax.losses import contrastive
from diffcse_jax.losses.contrastive import info_nce, separate_info_nce
from diffcse_jax.losses.decorrelation import decorrelation, dimension_contrast
from diffcse_jax.losses.diffcse import Edited
from diffcse_jax.losses.ranking import jensen_shannon, list_mle, list_net
from diffcse_jax.models.forward import Computation, start_as_teacher
from diffcse_jax.models.layers import ACTIVATIONS, bind, definition
from diffcse_jax.models.pooling import alignment, cosine_similarity, uniformity
from diffcse_jax.training import networks

KEY = jax.random.key(0)


def random_vectors(count: int, rows: int = 7, dim: int = 5) -> list[np.ndarray]:
    return list(np.random.default_rng(0).normal(size=(count, rows, dim)).astype(np.float32))


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = np.float64(a), np.float64(b)
    return (a @ b.T) / np.linalg.norm(a, axis=1)[:, None] / np.linalg.norm(b, axis=1)[None]


def loss_of(name, **options):
    return config_of({"difference": {"weight": 0.0}, name: options}).losses[name]


def off_dropout(z1, z2, negatives, ratio: float, form: str = "code"):
    return separate_info_nce(
        (z1, z2), (negatives, negatives), temperature=0.05, ratio=ratio, form=form
    ).mean()


def dcl(z1, z2, temperature: float, form: str = "code"):
    values = dimension_contrast(z1, z2, temperature=temperature, form=form)
    return values.mean() if form == "code" else values.sum()


def simcse(z1, z2, *hard, temperature: float = 0.05, logit: float = 0.0):
    options = {"hard_negatives": hard, "hard_negative_weight": float(np.exp(logit))}
    return info_nce(z1, z2, temperature=temperature, **options).mean()


VECTORS = ("z1", "z2", "z3", "z0")
# The names of the reference: those of the authors' code, and of the paper where it differs from the
# code.
FORMS = {
    "infonce": lambda z1, z2, z3, z0: simcse(z1, z2),
    "infonce_temp0.1": lambda z1, z2, z3, z0: simcse(z1, z2, temperature=0.1),
    "hardneg0.0": lambda z1, z2, z3, z0: simcse(z1, z2, z3),
    "hardneg1.0": lambda z1, z2, z3, z0: simcse(z1, z2, z3, logit=1.0),
    "offdropout_m0.5": lambda z1, z2, z3, z0: off_dropout(z1, z2, z0, 0.5),
    "offdropout_m0.9": lambda z1, z2, z3, z0: off_dropout(z1, z2, z0, 0.9),
    "offdropout_m1.0": lambda z1, z2, z3, z0: off_dropout(z1, z2, z0, 1.0),
    "both_mean_m1.0": lambda z1, z2, z3, z0: off_dropout(z1, z2, (z1 + z2) / 2, 1.0),
    "simcse_dcl_tau10_w0.1": lambda z1, z2, z3, z0: simcse(z1, z2) + 0.1 * dcl(z1, z2, 10.0),
    "simcsepp_m0.9_tau5_w0.1": lambda z1, z2, z3, z0: (
        off_dropout(z1, z2, z0, 0.9) + 0.1 * dcl(z1, z2, 5.0)
    ),
    "simcsepp_m0.9_tau0.05_w0.1": lambda z1, z2, z3, z0: (
        off_dropout(z1, z2, z0, 0.9) + 0.1 * dcl(z1, z2, 0.05)
    ),
    "dcl_alone_tau5": lambda z1, z2, z3, z0: dcl(z1, z2, 5.0),
    "dcl_alone_tau0.05": lambda z1, z2, z3, z0: dcl(z1, z2, 0.05),
    "PAPER_eq3_offinfo_m0.9": lambda z1, z2, z3, z0: off_dropout(z1, z2, z0, 0.9, "paper"),
    "PAPER_eq5_dcl_tau5": lambda z1, z2, z3, z0: dcl(z1, z2, 5.0, "paper"),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("folder", REFERENCES)
def test_a_loss_alone_has_the_value_and_gradients_of_the_reference(folder, name):
    expected, arrays = (
        json.loads((folder / "losses.json").read_text()),
        np.load(folder / "losses.npz"),
    )
    size = arrays.files[0].split(".")[0]
    vectors = [arrays[f"{size}.{vector}"] for vector in VECTORS]
    value, grads = jax.value_and_grad(FORMS[name], argnums=(0, 1, 2, 3))(*vectors)
    np.testing.assert_allclose(value, expected[f"{size}.{name}"]["loss"], rtol=1e-4)
    for vector, grad in zip(VECTORS, grads, strict=True):
        if (key := f"{size}.{name}.grad_{vector}") in arrays:
            np.testing.assert_allclose(
                grad, arrays[key], rtol=0, atol=1e-4 * np.abs(arrays[key]).max()
            )


@pytest.mark.parametrize(("similarity", "of"), [("cosine", cosines), ("dot", np.inner)])
def test_info_nce_with_hard_negatives_is_equation_8(similarity, of):
    z1, z2, *hard = random_vectors(5)
    positives = np.exp(of(z1, z2) / 0.8)
    negatives = sum(np.exp(of(z1, z3) / 0.8) for z3 in hard)
    weights = np.where(np.eye(7), 1.7, 1.0)
    expected = -np.log(np.diag(positives) / (positives + weights * negatives).sum(axis=1))
    z1, z2, *hard = map(jnp.array, (z1, z2, *hard))
    options = {"temperature": 0.8, "similarity": similarity, "hard_negative_weight": 1.7}
    np.testing.assert_allclose(
        info_nce(z1, z2, hard_negatives=hard, **options), expected, rtol=1e-5
    )


def test_pairs_left_out_are_not_in_the_denominator_of_separate_negatives():
    z1, z2, z3, z4 = random_vectors(4)
    left_out = (np.random.default_rng(1).random((7, 7)) < 0.3) & ~np.eye(7, dtype=bool)
    others = np.where(left_out | np.eye(7, dtype=bool), 0.0, np.exp(cosines(z3, z4) / 0.2)).sum(
        axis=1
    )
    positives = np.diag(cosines(z1, z2)) / 0.2
    pairs, options = ((z1, z2), (z3, z4)), {"temperature": 0.2, "ratio": 1.0, "form": "code"}
    losses = separate_info_nce(
        *jax.tree.map(jnp.array, pairs), left_out=jnp.array(left_out), **options
    )
    np.testing.assert_allclose(
        losses, np.log(np.exp(positives) + others) - positives, rtol=1e-5, atol=1e-6
    )


def test_symmetric_contrast_is_the_mean_of_both_directions():
    views = random_vectors(3)
    left_out = np.random.default_rng(1).random((7, 14)) < 0.3
    left_out[np.arange(7), np.arange(7)] = False
    logits = np.exp(np.concatenate([cosines(views[0], view) for view in views[1:]], axis=1) / 0.2)
    kept = np.where(left_out, 0.0, logits)
    expected = (
        np.log(kept.sum(axis=1) * kept[:, :7].sum(axis=0)).mean() / 2
        - np.log(np.diag(logits)).mean()
    )
    masks = jnp.array(left_out), jnp.array(left_out[:, :7].T)
    loss, _ = loss_of("contrast", temperature=0.2, symmetric=True).loss(
        forward_of(*views), masks, KEY
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize(("positives", "negatives"), [("noise", "dropout"), ("dropout", "noise")])
def test_noise_is_added_only_where_asked(positives, negatives):
    views = random_vectors(2, rows=300, dim=20)
    contrast = loss_of("contrast", positives=positives, negatives=negatives, noise_variance=0.3)
    pairs = contrast._pairs(forward_of(*views), jax.random.key(0))
    for kind, pair in zip((positives, negatives), pairs, strict=True):
        noise = np.stack([noised - view for noised, view in zip(pair, views, strict=True)])
        np.testing.assert_allclose(noise.var(), 0.3 if kind == "noise" else 0.0, rtol=0.05)
        if kind == "noise":
            assert abs(np.corrcoef(noise.reshape(2, -1))[0, 1]) < 0.05


@given(arrays.arrays(np.float32, (2, 5, 4), elements=st.floats(-10, 10, width=32)))
def test_info_nce_stays_finite(vectors):
    value, grad = jax.value_and_grad(lambda both: info_nce(*both, temperature=0.05).sum())(
        jnp.array(vectors)
    )
    assert np.isfinite(value)
    assert np.isfinite(grad).all()


def test_equal_texts():
    # of 8 possible ones
    texts = np.random.default_rng(0).integers(1, 3, (9, 4, 3)).astype(np.int32)
    expected = np.zeros((9, 3, 9), bool)
    for i, view, j in np.ndindex(expected.shape):  # of anchor i and example j
        candidates = texts[j, :2] if view == 0 else texts[j, view + 1 : view + 2]
        equal = any((one == other).all() for one in texts[i, :2] for other in candidates)
        expected[i, view, j] = equal and not (view == 0 and i == j)
    assert 0.1 < expected.mean() < 0.9
    np.testing.assert_array_equal(
        contrastive.equal_texts(jnp.array(texts)), expected.reshape(9, -1)
    )


@pytest.mark.parametrize("threshold", [0.0, 0.6])
def test_near_duplicates_exceed_the_bound(threshold):
    z1, z2, z3 = random_vectors(3, rows=9, dim=4)
    z2 += z1  # so that positives are similar to their anchors
    similarities = np.concatenate([cosines(z1, z2), cosines(z1, z3)], axis=1)
    expected = similarities > (threshold or np.diagonal(similarities)[:, None])
    np.fill_diagonal(expected, False)
    assert 0.02 < expected.mean() < 0.5
    found = contrastive.near_duplicates(
        [*map(jnp.array, (z1, z2, z3))], threshold=threshold or None
    )
    np.testing.assert_array_equal(found, expected)


def test_the_starting_checkpoint_finds_near_duplicates():
    batch = random_batch(columns=2)
    for values in (batch["input_ids"], batch["attention_mask"]):
        values[3, 1] = values[5, 0]
    options = {"mask_duplicates": "similarity", "symmetric": True}
    _, (_, inputs) = evaluate(SIMCSE, {"contrast": options}, batch=views_of(batch))
    masks, ((z1, z2), _) = inputs["contrast"], pooled_and_projected(batch)
    # Each direction has the bounds of its own anchors.
    for mask, views in zip(masks, ((z1, z2), (z2, z1)), strict=True):
        expected = np.array(contrastive.near_duplicates(views, threshold=None))
        expected[3, 5] = expected[5, 3] = True
        np.testing.assert_array_equal(mask, expected)
    assert (np.asarray(masks[1]) != np.asarray(masks[0]).T).any()


def test_edited_sentences_are_positives_or_hard_negatives():
    z1, z2, z3 = map(jnp.array, random_vectors(3))
    forward = forward_of(z1, z2)
    forward._results["projected", "edited_contrast"] = z3  # the embeddings of the edits
    expected = {"positive": info_nce(z1, z3, temperature=0.2)}
    expected["negative"] = info_nce(z1, z2, temperature=0.2, hard_negatives=[z3])
    for role, losses in expected.items():
        loss_of_edits = loss_of("edited_contrast", weight=1.0, temperature=0.2, role=role)
        edited = Edited(forward.batch.rows, jnp.zeros((7, 4), bool))
        np.testing.assert_allclose(
            loss_of_edits.loss(forward, edited, KEY)[0], losses.mean(), rtol=1e-6
        )


@pytest.mark.parametrize("name", ["gelu", "gelu_new"])
def test_activations_keep_the_digits_of_bfloat16(name):
    x = jnp.linspace(-3, -0.05, 1000).astype(jnp.bfloat16)
    exact = jax.nn.gelu(x.astype(jnp.float32), approximate=name != "gelu")
    activation = ACTIVATIONS[name]
    found = jax.jit(activation)(x)
    np.testing.assert_allclose(found.astype(jnp.float32), exact, rtol=0.01)  # 0.37 in bfloat16
    assert found.dtype == jax.grad(lambda x: activation(x).sum())(x).dtype == jnp.bfloat16


def test_a_constant_column_has_a_finite_gradient():
    z = jnp.array(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32).at[:, 0].set(2.0)
    dcl = jax.jit(
        jax.grad(lambda z: dimension_contrast(z, z, temperature=5.0, form="code").mean())
    )(z)
    barlow_twins = jax.jit(
        jax.grad(lambda z: decorrelation(z, z, off_diagonal_weight=0.013).sum())
    )(z)
    assert np.isfinite(dcl).all()
    assert np.isfinite(barlow_twins).all()
    assert np.abs(barlow_twins[:, 1:]).max() > 0


def test_decorrelation_agrees_with_numpy():
    z1, z2 = np.random.default_rng(0).normal(1.0, 2.0, size=(2, 9, 4)).astype(np.float32)
    a, b = ((z - z.mean(0)) / np.sqrt(z.var(0) + 1e-5) for z in np.float64([z1, z2]))
    correlation = a.T @ b / 9
    expected = [
        (1 - correlation[c, c]) ** 2 + 0.3 * sum(correlation[c, d] ** 2 for d in range(4) if d != c)
        for c in range(4)
    ]
    losses = decorrelation(jnp.array(z1), jnp.array(z2), off_diagonal_weight=0.3)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


def test_artificial_rows_let_the_loss_of_few_rows_vanish():
    forward, losses = forward_of(*random_vectors(2, rows=4, dim=16)), []
    for count in (0, 10, 20_000):
        loss = loss_of("barlow_twins", weight=1.0, off_diagonal_weight=1.0, artificial_rows=count)
        losses.append(float(loss.loss(forward, None, KEY)[0]))
    assert losses[0] > losses[1] > 0.05 > losses[2]


# --- ranking ---

SCORES, OTHERS = jnp.array(np.random.default_rng(0).normal(0.0, 3.0, (2, 5, 4)), jnp.float32)
OFF = {"contrast": {"weight": 0.0}, "difference": {"weight": 0.0}, "model": {"projector": "mlp"}}


def test_consistency_is_the_divergence_of_jensen_and_shannon_between_rows_and_columns():
    apart = jnp.array([[100.0, 0.0], [0.0, 100.0]])
    np.testing.assert_allclose(jensen_shannon(apart, apart[::-1]), np.log(2.0), rtol=1e-6)
    z1, z2 = random_vectors(2)
    similarity = cosines(z1, z2) / 0.3
    # not the root
    expected = (
        jensenshannon(softmax(similarity, axis=1), softmax(similarity.T, axis=1), axis=1) ** 2
    )
    for second, value in ((z2, expected.mean()), (z1, 0.0)):
        loss, _ = loss_of("consistency", weight=1.0, temperature=0.3).loss(
            forward_of(z1, second), None, KEY
        )
        np.testing.assert_allclose(loss, value, rtol=1e-4, atol=1e-6)


def test_the_orders_of_a_list_are_a_distribution():
    scores = SCORES[:1]
    likelihoods = []
    for order in itertools.permutations(range(4)):
        teacher = jnp.zeros((1, 4)).at[0, jnp.array(order)].set(jnp.array([4.0, 3.0, 2.0, 1.0]))
        left, expected = np.exp(np.float64(scores[0])), 1.0
        for candidate in order:  # drawn one after the other, each by its share of what is left
            expected *= left[candidate] / left.sum()
            left[candidate] = 0.0
        likelihoods.append(np.exp(-list_mle(scores, teacher)[0]))
        np.testing.assert_allclose(likelihoods[-1], expected, rtol=1e-4)
    np.testing.assert_allclose(sum(likelihoods), 1.0, rtol=1e-5)


def test_list_net_is_a_cross_entropy():
    p, q = (softmax(np.float64(logits), axis=1) for logits in (SCORES, OTHERS))
    np.testing.assert_allclose(list_net(SCORES, OTHERS), -(q * np.log(p)).sum(axis=1), rtol=1e-5)
    np.testing.assert_allclose(
        jax.grad(lambda scores: list_net(scores, OTHERS).sum())(OTHERS), 0.0, atol=1e-6
    )


def test_teachers_are_mixed_and_have_no_dropout():
    shares = {
        "weight": 1.0,
        "teachers": ("other", "start"),
        "shares": (1.0, 3.0),
        "form": "listnet",
    }
    parts = {"distillation": shares, "consistency": {"weight": 1.0}}
    batch = jax.tree.map(jnp.asarray, views_of(random_batch(columns=3), packed=True))
    teachers = [start_as_teacher(each, "cls") for each in (GENERATOR, ENCODER)]
    _, (metrics, inputs) = evaluate(OFF, parts, batch=batch, teachers={"other": teachers[0]})
    lists = []
    for teacher in teachers:
        anchors, *others = batch.by_view(
            np.asarray(bind(definition(teacher.build), teacher.params)(batch.rows))
        )
        lists.append(cosines(anchors, np.concatenate(others)))
    np.testing.assert_allclose(inputs["distillation"], 0.25 * lists[0] + 0.75 * lists[1], atol=1e-5)
    assert np.isfinite(metrics["loss_distillation"])
    assert metrics["loss_consistency"] > 0
    assert metrics["loss"] == pytest.approx(
        float(metrics["loss_distillation"] + metrics["loss_consistency"])
    )


# --- the weighted sum ---


def pooled_and_projected(batch) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The embeddings of every view before and after the projector, dropout off."""
    built = networks.build(config_of(SIMCSE, NO_DROPOUT), ENCODER, None, VOCABULARY)
    views = jax.tree.map(jnp.asarray, views_of(batch))

    @jax.jit
    def embeddings(params):
        encoder, projector = map(
            Computation(built.networks, params).network, ("encoder", "projector")
        )
        pooled = encoder(views.rows)[-1][:, 0]
        return views.by_view(pooled), views.by_view(projector(pooled))

    return embeddings(built.params)


def test_columns_are_anchor_positive_and_hard_negatives():
    batch = random_batch(columns=4)
    # a hard negative that is another example's anchor
    batch["input_ids"][2, 3] = batch["input_ids"][1, 0]
    batch["attention_mask"][2, 3] = batch["attention_mask"][1, 0]
    options = {"hard_negative_weight": 2.0, "temperature": 0.2, "mask_duplicates": "text"}
    _, (metrics, _) = evaluate(SIMCSE, NO_DROPOUT, {"contrast": options}, batch=views_of(batch))
    _, (z1, z2, *hard) = pooled_and_projected(batch)
    left_out = jnp.zeros((8, 24), bool).at[1, 16 + 2].set(True)
    expected = info_nce(
        z1, z2, temperature=0.2, hard_negatives=hard, hard_negative_weight=2.0, left_out=left_out
    ).mean()
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["negatives_masked"], 1 / (8 * 23), rtol=1e-5)
    np.testing.assert_allclose(metrics["alignment"], alignment(z1, z2).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["uniformity"], uniformity(z1), rtol=1e-5)


def test_off_dropout_negatives_have_no_dropout():
    # With m near 0 the positive logit vanishes, and only the negatives are left.
    batch, options = (
        random_batch(),
        {"negatives": "off_dropout", "negative_ratio": 1e-6, "temperature": 0.2},
    )
    _, (metrics, _) = evaluate(SIMCSE, {"contrast": options}, batch=views_of(batch))
    _, (z, _) = pooled_and_projected(batch)
    similarity = np.float64(cosine_similarity(z, z)) / 0.2
    negatives = np.where(np.eye(len(z)), 0.0, np.exp(similarity)).sum(axis=1)
    np.testing.assert_allclose(metrics["loss"], np.log(1 + negatives).mean(), rtol=1e-4)
    assert metrics["similarity_positive"] < 0.999  # the positives did have dropout


def test_prefixes_of_vectors_add_their_losses():
    batch = random_batch(columns=2)
    parts = (SIMCSE, NO_DROPOUT, {"contrast": {"temperature": 0.2}, "dcl": {"weight": 0.5}})
    matryoshka = {"matryoshka": {"sizes": (4, 8)}, "model": {"projector": "none"}}
    _, (metrics, _) = evaluate(*parts, matryoshka, batch=views_of(batch))
    (z1, z2), _ = pooled_and_projected(batch)
    losses = {
        "contrast": lambda a, b: info_nce(a, b, temperature=0.2).mean(),
        "dcl": lambda a, b: dimension_contrast(a, b, temperature=5.0, form="code").mean(),
    }
    for name, loss in losses.items():
        whole, of_4, of_8 = (loss(z1[:, :size], z2[:, :size]) for size in (16, 4, 8))
        np.testing.assert_allclose(metrics[f"loss_{name}_4"], of_4, rtol=1e-5)
        np.testing.assert_allclose(metrics[f"loss_{name}"], whole + of_4 + of_8, rtol=1e-5)
    np.testing.assert_allclose(
        metrics["loss"], metrics["loss_contrast"] + 0.5 * metrics["loss_dcl"], rtol=1e-6
    )


@pytest.mark.slow
def test_the_codes_difference_loss_counts_padding_up_to_the_longest_sentence():
    tight, padded = random_batch(seed=3), random_batch(seed=3, padding=4)
    assert tight["lengths"].max() == 12
    difference = {"difference": {"mask_ratio": 0.0}}  # with which both lengths have the same edits
    results = (evaluate(NO_DROPOUT, difference, batch=views_of(batch)) for batch in (tight, padded))
    losses = [metrics["loss_difference"] for _, (metrics, _) in results]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_bfloat16_is_near_float32():
    # Without the generator's dropout, and its arg-max used at masked positions only, few labels can
    # flip.
    shared = [SIMCSE, NO_DROPOUT, {"generator": {"dropout": False, "positions": "masked"}}]
    batch = views_of(random_batch(columns=2))
    gradients = functools.partial(
        evaluate, *shared, batch=batch, transform=functools.partial(jax.grad, has_aux=True)
    )
    (exact_grads, (exact, _)), (rough_grads, (rough, _)) = (
        gradients(),
        gradients({"precision": "bfloat16"}),
    )
    for name, value in exact.items():
        assert rough[name].dtype == jnp.float32
        np.testing.assert_allclose(rough[name], value, rtol=0.1, atol=0.1, err_msg=name)
    assert all(
        grad.dtype == jnp.float32 and np.isfinite(grad).all() for grad in rough_grads.values()
    )
    flat, rough_flat = (
        np.concatenate([np.ravel(g[n]) for n in sorted(g)]) for g in (exact_grads, rough_grads)
    )
    assert flat @ rough_flat / np.linalg.norm(flat) / np.linalg.norm(rough_flat) > 0.95
