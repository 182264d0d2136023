import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import ENCODER, NO_DROPOUT, SIMCSE, VOCABULARY, config_of, random_batch, views_of

from diffcse_jax.errors import ConfigError
from diffcse_jax.models.computation import Computation
from diffcse_jax.objectives.contrast import info_nce
from diffcse_jax.training import networks
from diffcse_jax.training.objective import total_loss

ON = {"dropout_contrast": {"weight": 0.5, "temperature": 0.2}}
RARELY = {"model": {"hidden_dropout": (1e-9,), "attention_dropout": (1e-9,)}}  # never, in a test
VIEWS = jax.tree.map(jnp.asarray, views_of(random_batch(size=6, columns=2)))


def metrics_of(*groups: dict, seed: int = 0) -> dict[str, jax.Array]:
    config = config_of(SIMCSE, *groups)
    built = networks.build(config, ENCODER, None, VOCABULARY)
    trained, nothing = Computation(built.networks, built.params), dict.fromkeys(config.objectives)
    return total_loss(config, trained, {}, VIEWS, nothing, jax.random.key(seed))[1][0]


def test_anchors_find_themselves():
    built = networks.build(config_of(SIMCSE), ENCODER, None, VOCABULARY)
    encoder, projector = (Computation(built.networks, built.params).network(name) for name in ("encoder", "projector"))
    anchors = projector(encoder(VIEWS.anchors)["last_hidden_state"][:, 0])
    expected = info_nce(anchors, anchors, temperature=0.2).mean()
    np.testing.assert_allclose(metrics_of(ON, RARELY)["loss_dropout_contrast"], expected, rtol=1e-5)


def test_under_masks_of_their_own_beside_the_contrast_of_pairs():
    alone, both, other = metrics_of(), metrics_of(ON), metrics_of(ON, seed=1)
    assert both["loss_contrast"] == alone["loss_contrast"]  # which it does not disturb
    assert both["loss_dropout_contrast"] > metrics_of(ON, RARELY)["loss_dropout_contrast"]
    assert both["loss_dropout_contrast"] != other["loss_dropout_contrast"]
    np.testing.assert_allclose(both["loss"], both["loss_contrast"] + 0.5 * both["loss_dropout_contrast"], rtol=1e-6)


def test_without_dropout_it_is_refused():
    with pytest.raises(ConfigError, match=r"dropout_contrast .* model.hidden_dropout=\(0.1,\)"):
        _ = config_of(SIMCSE, NO_DROPOUT, ON).objectives
