"""The vectors of a batch: dropout masks, means over dropout samples."""

import jax
import jax.numpy as jnp
import numpy as np
from tiny_networks import ENCODER, NO_DROPOUT, SIMCSE, VOCABULARY, config_of, random_batch, views_of

from diffcse_jax.models.computation import Computation, Forward
from diffcse_jax.training import networks


def forward_passes(*parts, read, keys: int, batch=None):
    """What `read` takes from the forward passes with so many keys."""
    config = config_of(SIMCSE, *parts)
    built = networks.build(config, ENCODER, None, VOCABULARY)
    views = jax.tree.map(jnp.asarray, views_of(batch or random_batch()))

    def one_pass(key):
        return read(Forward(config, Computation(built.networks, built.params), built.batch_stats, views, key))

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
