"""The vectors of a batch: dropout masks, means over dropout samples."""

import jax
import jax.numpy as jnp
import numpy as np
from tiny_networks import ENCODER, GENERATOR, NO_DROPOUT, SIMCSE, VOCABULARY, config_of, random_batch, views_of

from diffcse_jax.batch import TokenRows
from diffcse_jax.models import parameters
from diffcse_jax.models.computation import Computation, Forward
from diffcse_jax.training import networks


def forward_passes(*parts, read, keys: int, batch=None):
    """What `read` takes from the forward passes with so many keys."""
    config = config_of(SIMCSE, *parts)
    built = networks.build(config, ENCODER, None, VOCABULARY)
    views = jax.tree.map(jnp.asarray, views_of(batch or random_batch()))

    def one_pass(key):
        return read(Forward(config, Computation(built.networks, built.params), views, key))

    compiled = jax.jit(one_pass, compiler_options={"xla_backend_optimization_level": 0})
    return [compiled(jax.random.key(seed)) for seed in range(keys)]


def test_views_of_the_same_text_are_equal_without_dropout_or_with_the_same_masks():
    ((one, other),) = forward_passes(NO_DROPOUT, read=lambda forward: forward.projected_views, keys=1)
    np.testing.assert_array_equal(one, other)
    shared = {"model": {"projector": "mlp", "dropout_masks": "shared"}}
    batch = random_batch()
    batch = {name: np.repeat(values[:1], 8, axis=0) for name, values in batch.items()}  # one sentence eight times
    for z1, z2 in forward_passes(shared, read=lambda forward: forward.projected_views, keys=2, batch=batch):
        np.testing.assert_array_equal(z1, z2)
        assert (np.ptp(z1, axis=0) > 1e-3).all()  # examples do not share their masks


def test_a_mean_over_dropout_samples_has_a_part_of_their_variance():
    samples = 9
    passes = forward_passes(read=lambda forward: (forward.projected_views, forward.projected_means(samples)), keys=2)
    one, mean = (np.square(np.subtract(first, second)).mean() for first, second in zip(*passes, strict=True))
    np.testing.assert_allclose(one / mean, samples, rtol=0.35)


def test_a_second_encoder_embeds_all_views_but_the_first_and_learns_from_them():
    config = config_of(SIMCSE, NO_DROPOUT, {"contrast": {"second_encoder": True}})
    built = networks.build(config, ENCODER, None, VOCABULARY)
    for name, array in ENCODER.transformer.items():
        np.testing.assert_array_equal(built.params[f"second_encoder.{name}"], array)
    params = built.params | parameters.prefixed(GENERATOR.transformer, "second_encoder")  # others, to tell them apart
    views = jax.tree.map(jnp.asarray, views_of(random_batch(columns=3)))

    def second_views(params):
        computation = Computation(built.networks, params)
        by_view = Forward(config, computation, views, jax.random.key(0)).projected_views
        projector, expected = computation.network("projector"), []
        for view, name in enumerate(("encoder", "second_encoder", "second_encoder")):
            rows = TokenRows(views.input_ids[:, view], views.attention_mask[:, view])
            expected.append(projector(computation.network(name)(rows)["last_hidden_state"][:, 0]))
        return jnp.sum(by_view[1]), (by_view, expected)

    compiled = jax.jit(jax.grad(second_views, has_aux=True), compiler_options={"xla_backend_optimization_level": 0})
    grads, (by_view, expected) = compiled(params)
    for ours, theirs in zip(by_view, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    of_networks = {name: parameters.subset(grads, name) for name in ("encoder", "second_encoder")}
    size = {name: sum(np.abs(grad).sum() for grad in of.values()) for name, of in of_networks.items()}
    assert size["encoder"] == 0 < size["second_encoder"]
