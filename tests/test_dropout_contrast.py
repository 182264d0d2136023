import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import ENCODER, NO_DROPOUT, SIMCSE, VOCABULARY, config_of, random_batch, shared_forward, views_of

from diffcse_jax.errors import ConfigError
from diffcse_jax.losses.contrastive import info_nce
from diffcse_jax.models.forward import Computation, fold_in_name, row_keys
from diffcse_jax.training import networks

ON = {"dropout_contrast": {"weight": 1.0, "temperature": 0.2}}
KEY = jax.random.key(0)


def test_anchors_find_themselves_under_other_dropout_masks_and_equal_ones_are_no_negatives():
    config = config_of(SIMCSE, ON)
    built = networks.build(config, ENCODER, None, VOCABULARY)
    trained = Computation(built.networks, built.params)
    batch = random_batch(size=6, columns=2)
    for values in batch.values():
        values[4, 0] = values[1, 0]
    views = jax.tree.map(jnp.asarray, views_of(batch))
    forward = shared_forward(config, trained, views, KEY)

    again = forward.projected(views.anchors, row_keys(fold_in_name(KEY, "anchors again"), 6), name="again")
    anchors, _ = forward.projected_views
    assert not np.allclose(again, anchors, atol=1e-2)
    assert not np.allclose(again, forward.off_dropout, atol=1e-2)
    equal = np.zeros((6, 6), bool)
    equal[[1, 4], [4, 1]] = True
    expected = info_nce(anchors, again, temperature=0.2, left_out=jnp.asarray(equal)).mean()
    loss, _ = config.losses["dropout_contrast"].loss(forward, None, KEY)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_without_dropout_it_is_refused():
    with pytest.raises(ConfigError, match=r"dropout_contrast .* model.hidden_dropout=\(0.1,\)"):
        _ = config_of(SIMCSE, NO_DROPOUT, ON)
