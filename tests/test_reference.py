"""The whole networks against the authors' code.

Losses, every gradient, what lies between, and training runs are compared.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from reference_networks import (
    REFERENCES,
    by_reference_name,
    reference_config,
    reference_masked,
    reference_networks,
    reference_views,
)

from diffcse_jax.batch import Batch
from diffcse_jax.config import Config
from diffcse_jax.losses.diffcse import Edited, MaskOptions, generate
from diffcse_jax.models.forward import Computation, Networks
from diffcse_jax.models.layers import Params
from diffcse_jax.training.optimizer import learning_rate_schedule, make_optimizer
from diffcse_jax.training.sharding import make_mesh
from diffcse_jax.training.step import (
    initial_state,
    loss_of_batch,
    make_train_step,
    root_key,
)

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
        f"diffcse.{batch}.bn.lam{weight}": (batch, {"difference": {"weight": weight}})
        for weight in (0.005, 1.0, 0.0)
    }
    CASES |= {f"offdropout.{batch}.m{ratio}": (batch, off_dropout(ratio)) for ratio in (1.0, 0.9)}
    CASES |= {
        f"both_mean.{batch}.m1.0": (batch, off_dropout(1.0, "mean")),
        f"simcse+dcl_tau10_w0.1.{batch}": (batch, SIMCSE | dcl(0.1, 10.0)),
        f"simcsepp.{batch}.m0.9_tau5_w0.1": (batch, off_dropout(0.9) | dcl(0.1, 5.0)),
        f"simcsepp.{batch}.m0.9_tau5_w1.0": (batch, off_dropout(0.9) | dcl(1.0, 5.0)),
    }
WITHOUT_ARRAYS = ("mlm0.1", "lam1.0", "lam0.0", "w1.0")
FAST = {"simcse.sup.hardneg1.0", "diffcse.pair.bn.lam0.005"}


@functools.cache
def outputs(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the reference's numbers by case, and its arrays."""
    groups = json.loads((folder / "outputs.json").read_text()).values()
    numbers = {
        case: values
        for group in groups
        if isinstance(group, dict)
        for case, values in group.items()
    }
    return numbers, dict(np.load(folder / "outputs.npz"))


# A smaller folder than the largest has the same cases: of it, what takes long is left out.
RUNS = [
    pytest.param(
        folder,
        name,
        marks=() if name in FAST else pytest.mark.slow,
        id=f"{folder.name}{index}-{name}",
    )
    for index, folder in enumerate(REFERENCES)
    for name in CASES
    if name in outputs(folder)[0] and (name in FAST or folder == REFERENCES[-1])
]


@functools.cache
def edit(folder: Path, batch: str, head: str) -> Edited:
    config = reference_config()
    networks, _, frozen = reference_networks(config, folder, head)
    rows = reference_views(folder, batch).rows
    masked = reference_masked(folder, batch, rows)
    return generate(
        Computation(networks, jax.device_put(frozen)), rows, masked, config.generator, KEY
    )


# Compiling takes longer than running: optimising less halves it.
@functools.partial(
    jax.jit,
    static_argnames=("networks", "config"),
    compiler_options={"xla_backend_optimization_level": 0},
)
def compiled_grad(params, networks, config, views, inputs):
    def loss(params):
        return loss_of_batch(config, Computation(networks, params), views, inputs, KEY)

    return jax.grad(loss, has_aux=True)(params)


@functools.cache
def starting_embeddings(folder: Path, batch: str) -> jax.Array:
    """Embed a batch before any training: alike in every case, without dropout."""
    networks, params, _ = reference_networks(reference_config(), folder)
    return jnp.asarray(cls_embeddings(networks, params, reference_views(folder, batch)))


def assert_near(ours, expected, share: float = 1e-4) -> None:
    """Everywhere within `share` of the largest expected value. The first columns may be all that is expected."""
    columns = np.asarray(ours)[..., : expected.shape[-1]]
    np.testing.assert_allclose(columns, expected, rtol=0, atol=share * np.abs(expected).max())


@pytest.mark.parametrize(("folder", "name"), RUNS)
def test_a_case_has_the_losses_gradients_and_states_of_the_authors_code(folder, name):
    batch, groups = CASES[name]
    config = reference_config(**groups)
    networks, params, _ = reference_networks(config, folder)
    views, inputs = reference_views(folder, batch), dict.fromkeys(config.losses)
    if config.difference.weight:
        inputs["difference"] = edit(
            folder, batch, "random" if name.endswith("genrandom") else "fitted"
        )
    if config.mlm.weight:
        inputs["mlm"] = reference_masked(folder, batch, views.rows)
    grads, metrics = compiled_grad(params, networks, config, views, inputs)
    values, arrays = outputs(folder)
    check_metrics(config, metrics, values[name], diffcse=name.startswith("diffcse"))
    check_gradients(name, config, grads, values[name], arrays)
    if name.endswith(WITHOUT_ARRAYS):
        return

    cls = starting_embeddings(folder, batch)
    projector = networks.bind("projector", params)
    assert_near(projector(cls), arrays[f"{name}.z"])
    if name.startswith(("simcse.", "diffcse")):
        assert_near(cls, arrays[f"{name}.encoder_cls"])
    if config.contrast.negatives == "off_dropout":
        assert_near(projector(cls[:: views.num_views]), arrays[f"{name}.z0"])
    if not name.startswith("diffcse"):
        return

    edited, numbers = inputs["difference"], values[name]
    np.testing.assert_array_equal(edited.rows.input_ids, arrays[f"{name}.e_inputs"])
    np.testing.assert_array_equal(edited.labels, arrays[f"{name}.replaced"])
    assert edited.labels.sum() == numbers["n_replaced"]
    assert (edited.labels & (views.rows.input_ids == 102)).sum() == numbers["n_replaced_at_sep"]
    np.testing.assert_allclose(
        metrics["rtd_share_kept"], 1 - numbers["n_replaced"] / numbers["n_valid"], rtol=1e-6
    )
    condition = cls if config.difference.condition == "pooled" else projector(cls)
    discriminator = networks.bind("discriminator", params)
    states = discriminator(edited.rows.padded(), condition=condition)[-1]
    assert_near(states, arrays[f"{name}.disc_hidden"])
    assert_near(networks.bind("token_classifier", params)(states), arrays[f"{name}.electra_logits"])
    if name == "diffcse.unsup.bn.lam0.005":
        over_real = reference_config(difference={"loss_positions": "real"})
        _, metrics = compiled_grad(params, networks, over_real, views, inputs)
        np.testing.assert_allclose(
            metrics["loss_difference"], numbers["rtd_mean_over_valid_tokens"], rtol=1e-5
        )


def check_metrics(config: Config, metrics, values, *, diffcse: bool) -> None:
    losses = {"loss": values["total"]}
    if "contrastive" in values:
        losses["loss_contrast"] = values["contrastive"]
    if config.difference.weight:
        losses["loss_difference"] = values["rtd"]
    if config.mlm.weight:
        losses["loss_mlm"] = values["mlm"]
    if config.dcl.weight:
        losses["loss_dcl"] = values[f"dcl_tau{config.dcl.temperature:.0f}_original_fn"]
    for metric, value in losses.items():
        np.testing.assert_allclose(metrics[metric], value, rtol=1e-4, atol=5e-7, err_msg=metric)
    others = {"similarity_positive": "pos_avg", "similarity_negative": "neg_avg"} if diffcse else {}
    if config.difference.weight:
        others |= {"rtd_accuracy": "electra_acc", "rtd_accuracy_replaced": "electra_rep_acc"}
        others |= {"rtd_accuracy_kept": "electra_fix_acc"}
    for metric, theirs in others.items():
        np.testing.assert_allclose(metrics[metric], values[theirs], rtol=1e-5, err_msg=metric)


def check_gradients(name: str, config: Config, grads: Params, values, arrays) -> None:
    total = values["grad_norm_total"]
    if total < 1e-6:  # two equal views: the gradient is rounding noise
        assert optax.tree.norm(grads) < 1e-6
        return
    np.testing.assert_allclose(optax.tree.norm(grads), total, rtol=1e-4)
    ours, theirs = by_reference_name(grads), values["grad_norms"]
    assert not set(ours) - set(theirs)
    # what we lack gets no gradient there
    assert not any(theirs[parameter] for parameter in set(theirs) - set(ours))
    for parameter, grad in ours.items():
        # PyTorch's float32 norm, which is 2e-4 off for a matrix as large as the vocabulary, is what
        # the reference has.
        norm = torch.tensor(np.ascontiguousarray(grad)).norm().item()
        if vanishes(parameter, config):
            assert norm < 1e-7 * total
            continue
        np.testing.assert_allclose(norm, theirs[parameter], rtol=1e-4, err_msg=parameter)
        if f"{name}.grad.{parameter}" in arrays:
            assert_near(grad, arrays[f"{name}.grad.{parameter}"])


def vanishes(parameter: str, config: Config) -> bool:
    """True if the gradient is zero in exact arithmetic, so that either side's value is rounding noise.

    A key's bias adds the same to all logits of a query, which softmax ignores; what the last block
    adds to every sentence alike, the BatchNorm after it takes away.
    """
    before_batch_norm = (
        config.model.projector == "batchnorm" and config.difference.condition == "projected"
    )
    return parameter.endswith("attention.self.key.bias") or (
        before_batch_norm and parameter == "bert.encoder.layer.5.output.LayerNorm.bias"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("simcse.lr3e-5", {**SIMCSE, "optim": {"learning_rate": 3e-5}}),
        ("diffcse.lr7e-6.lam0.005", {"optim": {"learning_rate": 7e-6}}),
        (
            "simcsepp.lr3e-5.m0.9_tau5_w0.1",
            {**off_dropout(0.9), **dcl(0.1, 5.0), "optim": {"learning_rate": 3e-5}},
        ),
    ],
)
def test_twenty_steps_of_training(name, groups, monkeypatch):
    folder = REFERENCES[-1]
    expected = json.loads((folder / "train.json").read_text())[name]
    config = reference_config(**groups, mesh={"data": 1})
    networks, params, frozen = reference_networks(config, folder)
    views = reference_views(folder, "pair")
    given = lambda _, frozen, rows, key: reference_masked(folder, "pair", rows)  # noqa: E731
    monkeypatch.setattr(MaskOptions, "masked", given)

    mesh, optimizer = make_mesh(config), make_optimizer(config.optim, total_steps=20)
    step, rate = (
        make_train_step(networks, config, optimizer, mesh),
        learning_rate_schedule(config.optim, 20),
    )
    state = initial_state(params, optimizer, config, mesh)
    start = cls_embeddings(networks, state.params, views)
    rows = []
    for index in range(20):
        state, metrics = step(state, frozen, views, root_key(config))
        rows.append((metrics["loss"], metrics["grad_norm"], rate(index)))
    losses, norms, rates = np.array(rows, np.float64).T
    np.testing.assert_allclose(rates, expected["lrs"], rtol=1e-6)
    # The smallest losses, 3.5e-5, are differences of numbers near 1, which float32 rounds by 6e-8.
    np.testing.assert_allclose(losses, expected["losses"], rtol=1e-4, atol=6e-8)
    np.testing.assert_allclose(norms, expected["grad_norms_before_clip"], rtol=1e-3)
    moved = cls_embeddings(networks, state.params, views) - start
    stored = np.load(folder / "train.npz")[f"{name}.sent_emb_after"]
    assert_near(moved, stored - start[:, : stored.shape[1]])


def cls_embeddings(networks: Networks, params: Params, views: Batch) -> np.ndarray:
    return np.asarray(networks.bind("encoder", params)(views.rows)[-1][:, 0])
