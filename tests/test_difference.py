import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy.special import log_softmax

from diffcse_jax.objectives.difference.rtd import replaced_token_detection
from diffcse_jax.objectives.mlm import masked_language_model

logits_of_any_size = arrays.arrays(np.float32, (2, 3, 2), elements=st.floats(-1e4, 1e4, width=32))
labels = arrays.arrays(np.bool_, (2, 3))


@given(logits_of_any_size, labels)
def test_replaced_token_detection_is_the_two_class_cross_entropy(logits, replaced):
    losses = replaced_token_detection(jnp.array(logits), jnp.array(replaced))
    expected = -np.take_along_axis(log_softmax(np.float64(logits), axis=-1), replaced[..., None].astype(int), -1)[
        ..., 0
    ]
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)


@given(logits_of_any_size, labels)
def test_replaced_token_detection_has_the_gradient_of_a_softmax(logits, replaced):
    grad = jax.grad(lambda x: replaced_token_detection(x, jnp.array(replaced)).sum())(jnp.array(logits))
    expected = np.exp(log_softmax(np.float64(logits), axis=-1)) - np.eye(2)[replaced.astype(int)]
    np.testing.assert_allclose(grad, expected, atol=1e-6)


def test_an_undecided_discriminator_pays_log_2():
    losses = replaced_token_detection(jnp.full((1, 2, 2), 3.0), jnp.array([[True, False]]))
    np.testing.assert_allclose(losses, np.log(2), rtol=1e-6)


def test_masked_language_model_is_the_cross_entropy_of_the_original_token():
    rng = np.random.default_rng(0)
    logits, ids = rng.normal(0, 30, size=(2, 5, 11)).astype(np.float32), rng.integers(0, 11, size=(2, 5))
    losses = masked_language_model(jnp.array(logits), jnp.array(ids))
    expected = -np.take_along_axis(log_softmax(np.float64(logits), axis=-1), ids[..., None], -1)[..., 0]
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-5)
