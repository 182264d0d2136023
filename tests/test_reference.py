"""The whole networks against the authors' code: losses, every gradient, what lies between, and training runs."""

import functools
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference_networks import (
    by_reference_name,
    reference_batch,
    reference_config,
    reference_networks,
    reference_views,
)

from diffcse_jax.config import Config
from diffcse_jax.models import parameters
from diffcse_jax.models.parameters import Params
from diffcse_jax.training import objective as objective_module
from diffcse_jax.training.networks import Networks
from diffcse_jax.training.objective import Corruptions, Edited, Masked, Views, generate, objective
from diffcse_jax.training.optimizer import learning_rate_schedule, make_optimizer
from diffcse_jax.training.sharding import make_mesh
from diffcse_jax.training.step import initial_state, make_train_step

KEY = jax.random.key(0)  # read by nothing: every dropout rate is 0
NO_DIFFERENCE = {"weight": 0.0}
TANH = {"model": {"projector": "mlp"}}
SIMCSE = {**TANH, "difference": NO_DIFFERENCE}


def off_dropout(ratio: float, negatives: str = "off_dropout") -> dict:
    return {**SIMCSE, "contrast": {"negatives": negatives, "negative_ratio": ratio}}


def dcl(weight: float, temperature: float) -> dict:
    return {"dcl": {"weight": weight, "temperature": temperature}}


# The reference's name to the batch, the configuration and the generator's head.
CASES = {
    "simcse.unsup": ("unsup", SIMCSE),
    "simcse.pair": ("pair", SIMCSE),
    "simcse.pair.mlm0.1": ("pair", {**SIMCSE, "mlm": {"weight": 0.1}}),
    "simcse.sup.hardneg0.0": ("sup", SIMCSE),
    "simcse.sup.hardneg1.0": ("sup", {**SIMCSE, "contrast": {"hard_negative_weight": float(np.e)}}),
    "diffcse.pair.bn.genrandom": ("pair", {}),
    "diffcse.pair.nobn.lam0.005": ("pair", TANH),
    "diffcse.pair.nobn.before_mlp": ("pair", {**TANH, "difference": {"condition": "pooled"}}),
}
for batch in ("unsup", "pair"):
    CASES |= {
        f"diffcse.{batch}.bn.lam{weight}": (batch, {"difference": {"weight": weight}}) for weight in (0.005, 1.0, 0.0)
    }
    CASES |= {f"offdropout.{batch}.m{ratio}": (batch, off_dropout(ratio)) for ratio in (1.0, 0.9)}
    CASES |= {
        f"both_mean.{batch}.m1.0": (batch, off_dropout(1.0, "mean")),
        f"simcse+dcl_tau10_w0.1.{batch}": (batch, SIMCSE | dcl(0.1, 10.0)),
        f"simcsepp.{batch}.m0.9_tau5_w0.1": (batch, off_dropout(0.9) | dcl(0.1, 5.0)),
        f"simcsepp.{batch}.m0.9_tau5_w1.0": (batch, off_dropout(0.9) | dcl(1.0, 5.0)),
    }
# One of each kind; the others differ in a weight or the batch.
FAST = {"simcse.sup.hardneg1.0", "simcse.pair.mlm0.1", "diffcse.pair.bn.lam0.005", "simcsepp.pair.m0.9_tau5_w0.1"}
DIFFERENCE_CASES = [name for name in CASES if name.startswith("diffcse") and not name.endswith(("lam1.0", "lam0.0"))]


def cases(names) -> list:
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def values(reference_dir):
    groups = json.loads((reference_dir / "outputs.json").read_text())
    return groups["diffcse"] | groups["simcse"] | groups["simcsepp"]


@pytest.fixture(scope="module")
def arrays(reference_dir):
    return dict(np.load(reference_dir / "outputs.npz"))


@pytest.fixture(scope="module")
def evaluated(reference_dir) -> Callable[[str], tuple]:
    """The configuration, networks, parameters, views, corruptions and results of a case, computed once."""

    @functools.cache
    def evaluate(name: str) -> tuple:
        batch, groups = CASES[name]
        config = reference_config(**groups)
        head = "random" if name.endswith("genrandom") else "fitted"
        networks, params, batch_stats, frozen = reference_networks(config, reference_dir, head)
        views, masked = reference_views(reference_dir, batch), reference_batch(reference_dir, batch)[1]
        edited = edit(frozen, networks, config, views, masked) if config.uses_difference else None
        corruptions = Corruptions(edited, masked if config.mlm.weight else None)
        results = losses_and_grads(params, batch_stats, networks, config, views, corruptions)
        return config, networks, params, views, corruptions, results

    return evaluate


def edit(frozen: Params, networks: Networks, config: Config, views: Views, masked: Masked) -> Edited:
    @jax.jit
    def run(frozen, input_ids, attention_mask, masked):
        return generate(networks, config, frozen, Views(input_ids, attention_mask, views.count), masked, KEY)

    return run(frozen, views.input_ids, views.attention_mask, masked)


def losses_and_grads(
    params: Params, batch_stats: Params, networks: Networks, config: Config, views: Views, corruptions: Corruptions
) -> tuple[dict, Params, Params]:
    """Metrics, new batch statistics and gradients."""

    @jax.jit
    def run(params, input_ids, attention_mask, corruptions):
        views_ = Views(input_ids, attention_mask, views.count)
        return jax.grad(objective, has_aux=True)(params, batch_stats, networks, config, views_, corruptions, KEY)

    grads, (metrics, batch_stats) = run(params, views.input_ids, views.attention_mask, corruptions)
    return metrics, batch_stats, grads


def assert_near(ours, expected, share: float = 1e-4) -> None:
    """Everywhere within `share` of the largest expected value."""
    np.testing.assert_allclose(ours, expected, rtol=0, atol=share * np.abs(expected).max())


@pytest.mark.parametrize("name", cases(CASES))
def test_losses(name, values, evaluated):
    config, *_, (metrics, _, _) = evaluated(name)
    expected = {"loss": values[name]["total"]}
    if "contrastive" in values[name]:
        expected["loss_contrast"] = values[name]["contrastive"]
    if config.uses_difference:
        expected["loss_difference"] = values[name]["rtd"]
    if config.mlm.weight:
        expected["loss_mlm"] = values[name]["mlm"]
    if config.dcl.weight:
        expected["loss_dcl"] = values[name][f"dcl_tau{config.dcl.temperature:.0f}_original_fn"]
    for metric, value in expected.items():
        np.testing.assert_allclose(metrics[metric], value, rtol=1e-4, atol=1e-7, err_msg=metric)


@pytest.mark.parametrize("name", cases(name for name in CASES if name.startswith("diffcse")))
def test_similarities_and_accuracies(name, values, evaluated):
    config, *_, (metrics, _, _) = evaluated(name)
    expected = {"similarity_positive": "pos_avg", "similarity_negative": "neg_avg"}
    if config.uses_difference:
        expected |= {
            "rtd_accuracy": "electra_acc",
            "rtd_accuracy_replaced": "electra_rep_acc",
            "rtd_accuracy_kept": "electra_fix_acc",
        }
    for metric, theirs in expected.items():
        np.testing.assert_allclose(metrics[metric], values[name][theirs], rtol=1e-5, err_msg=metric)


@pytest.mark.parametrize("name", cases(CASES))
def test_gradient_of_every_parameter(name, values, arrays, evaluated):
    config, *_, (_, _, grads) = evaluated(name)
    total = values[name]["grad_norm_total"]
    if total < 1e-6:  # two equal views: the gradient is rounding noise
        assert optax.tree.norm(grads) < 1e-6
        return
    np.testing.assert_allclose(optax.tree.norm(grads), total, rtol=1e-4)
    ours, theirs = by_reference_name(grads), values[name]["grad_norms"]
    absent = set(theirs) - set(ours)
    assert not set(ours) - set(theirs)
    assert not any(theirs[parameter] for parameter in absent)  # what we do not have gets no gradient there
    for parameter, grad in ours.items():
        norm = np.linalg.norm(grad)
        if vanishes(parameter, config):
            assert norm < 1e-7 * total
        else:
            np.testing.assert_allclose(norm, theirs[parameter], rtol=1e-4, err_msg=parameter)
        if f"{name}.grad.{parameter}" in arrays and not vanishes(parameter, config):
            assert_near(grad, arrays[f"{name}.grad.{parameter}"])


def vanishes(parameter: str, config: Config) -> bool:
    """Whether the gradient is zero in exact arithmetic, so that either side's value is rounding noise.

    A key's bias adds the same to all logits of a query, which softmax ignores; what the last block adds to every
    sentence alike, the BatchNorm behind it takes away.
    """
    before_batch_norm = config.model.projector == "batchnorm" and config.difference.condition == "projected"
    return parameter.endswith("attention.self.key.bias") or (
        before_batch_norm and parameter == "bert.encoder.layer.5.output.LayerNorm.bias"
    )


@pytest.mark.parametrize("name", cases(DIFFERENCE_CASES))
def test_edited_sentences(name, values, arrays, evaluated):
    _, _, _, views, corruptions, (metrics, _, _) = evaluated(name)
    edited = corruptions.edited
    np.testing.assert_array_equal(edited.input_ids, arrays[f"{name}.e_inputs"])
    np.testing.assert_array_equal(edited.replaced, arrays[f"{name}.replaced"])
    assert edited.replaced.sum() == values[name]["n_replaced"]
    share_kept = 1 - values[name]["n_replaced"] / values[name]["n_valid"]
    np.testing.assert_allclose(metrics["rtd_share_kept"], share_kept, rtol=1e-6)
    sep = views.input_ids == 102
    assert (edited.replaced & sep).sum() == values[name]["n_replaced_at_sep"]


@pytest.mark.parametrize("name", cases(f"{name}" for name in CASES if "lam1.0" not in name and "lam0.0" not in name))
def test_sentence_vectors(name, arrays, evaluated):
    if f"{name}.z" not in arrays:
        pytest.skip("the reference stores no vectors of this case")
    config, networks, params, views, *_ = evaluated(name)
    states = networks.bind("encoder", params)(views.input_ids, views.attention_mask)
    cls = states["last_hidden_state"][:, 0]
    batch_stats = evaluated(name)[-1][1]
    projector = networks.bind("projector", params, batch_stats)
    if f"{name}.encoder_cls" in arrays:
        assert_near(cls, arrays[f"{name}.encoder_cls"])
    assert_near(projector(cls), arrays[f"{name}.z"])
    if f"{name}.z0" in arrays:
        assert_near(projector(cls[:: views.count]), arrays[f"{name}.z0"])


@pytest.mark.parametrize("name", cases(DIFFERENCE_CASES))
def test_discriminator(name, arrays, evaluated):
    config, networks, params, views, corruptions, _ = evaluated(name)
    condition = arrays[f"{name}.{'encoder_cls' if config.difference.condition == 'pooled' else 'z'}"]
    states = networks.bind("discriminator", params)(
        corruptions.edited.input_ids, views.attention_mask, condition=jnp.array(condition)
    )["last_hidden_state"]
    logits = networks.bind("token_classifier", params)(states)
    real = np.asarray(views.attention_mask > 0)
    assert_near(states[real], arrays[f"{name}.disc_hidden"][real])
    assert_near(logits, arrays[f"{name}.electra_logits"])


@pytest.mark.parametrize("name", cases(["diffcse.unsup.bn.lam0.005", "diffcse.pair.bn.lam0.005"]))
def test_running_statistics(name, arrays, evaluated):
    batch_stats = evaluated(name)[-1][1]
    for layer, ours in (("1", "expand_norm"), ("4", "contract_norm")):
        for moment in ("mean", "var"):
            expected = arrays[f"{name}.bn_after.net.{layer}.running_{moment}"]
            assert_near(batch_stats[f"projector.{ours}.{moment}"], expected)


def test_loss_over_real_tokens(values, evaluated):
    name = "diffcse.pair.bn.lam0.005"
    config, networks, params, views, corruptions, (_, batch_stats, _) = evaluated(name)
    config = reference_config(difference={"loss_positions": "real"})
    metrics, _, _ = losses_and_grads(params, batch_stats, networks, config, views, corruptions)
    np.testing.assert_allclose(
        metrics["loss_difference"], values[name]["rtd_mean_over_valid_tokens"], rtol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("simcse.lr3e-5", {**SIMCSE, "optim": {"learning_rate": 3e-5}}),
        ("diffcse.lr7e-6.lam0.005", {"optim": {"learning_rate": 7e-6}}),
        ("simcsepp.lr3e-5.m0.9_tau5_w0.1", {**off_dropout(0.9), **dcl(0.1, 5.0), "optim": {"learning_rate": 3e-5}}),
    ],
)
def test_twenty_steps_of_training(name, groups, reference_dir, monkeypatch):
    expected = json.loads((reference_dir / "train.json").read_text())[name]
    config = reference_config(**groups, mesh={"data": 1})
    networks, params, batch_stats, frozen = reference_networks(config, reference_dir)
    batch, masked = reference_batch(reference_dir, "pair")
    monkeypatch.setattr(objective_module, "mask_tokens", lambda *_, **__: masked)

    mesh, optimizer = make_mesh(config), make_optimizer(config.optim, total_steps=20)
    step, rate = make_train_step(networks, config, optimizer, mesh), learning_rate_schedule(config.optim, 20)
    state = initial_state(params, batch_stats, optimizer, mesh)
    start = cls_embeddings(networks, state.params, batch)
    rows = []
    for index in range(20):
        state, metrics = step(state, frozen, batch)
        rows.append((metrics["loss"], metrics["grad_norm"], rate(index)))
    losses, norms, rates = np.array(rows, np.float64).T
    import os
    if os.environ.get("DBG"):
        print(np.abs(losses / expected["losses"] - 1)); print(np.abs(norms / expected["grad_norms_before_clip"] - 1))
    np.testing.assert_allclose(rates, expected["lrs"], rtol=1e-6)
    np.testing.assert_allclose(losses, expected["losses"], rtol=1e-3)
    np.testing.assert_allclose(norms, expected["grad_norms_before_clip"], rtol=1e-3)
    after = cls_embeddings(networks, state.params, batch)
    stored = np.load(reference_dir / "train.npz")[f"{name}.sent_emb_after"]
    if os.environ.get("DBG"):
        print(np.abs(after - stored).max(), np.abs(start - stored).max())
    np.testing.assert_allclose(after, stored, rtol=0, atol=1e-3 * np.abs(stored - start).max())


def cls_embeddings(networks: Networks, params: Params, batch: dict[str, np.ndarray]) -> np.ndarray:
    rows = (jnp.array(batch[name]).reshape(-1, 32) for name in ("input_ids", "attention_mask"))
    return np.asarray(networks.bind("encoder", params)(*rows)["last_hidden_state"][:, 0])
