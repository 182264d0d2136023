import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import ENCODER, NO_DROPOUT, SIMCSE, VOCABULARY, config_of, random_batch, shared_forward, views_of

from diffcse_jax.batch import TokenRows
from diffcse_jax.losses.contrastive import info_nce
from diffcse_jax.models.forward import Computation
from diffcse_jax.training import networks

KEY = jax.random.key(0)


@pytest.mark.parametrize("role", ["positive", "negative"])
def test_edits_are_positives_of_their_originals_or_negatives_of_all(role):
    options = {"weight": 1.0, "role": role, "edit": "delete", "delete_ratio": 0.4, "temperature": 0.2}
    config = config_of(SIMCSE, NO_DROPOUT, {"edited_contrast": options, "train": {"recompute": "off"}})
    built = networks.build(config, ENCODER, None, VOCABULARY)
    objective = config.losses["edited_contrast"]

    @jax.jit
    def loss_and_vectors(params, views):
        trained = Computation(built.networks, params)
        edited = objective.prepare(Computation(built.networks, {}), views, KEY, config.run_info)
        loss, _ = objective.loss(shared_forward(config, trained, views, KEY), edited, KEY)
        encoder, projector = trained.network("encoder"), trained.network("projector")
        positives = TokenRows(views.input_ids[:, 1], views.attention_mask[:, 1])
        return (
            loss,
            edited,
            [projector(encoder(rows)["last_hidden_state"][:, 0]) for rows in (views.anchors, positives, edited.rows)],
        )

    views = jax.tree.map(jnp.asarray, views_of(random_batch(size=4, columns=2)))
    loss, edited, (z1, z2, z3) = loss_and_vectors(built.params, views)
    assert edited.rows.attention_mask.sum() < views.anchors.attention_mask.sum()
    if role == "positive":
        expected = info_nce(z1, z3, temperature=0.2)
    else:
        expected = info_nce(z1, z2, temperature=0.2, hard_negatives=[z3])
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-5)
