"""The benchmarks: what they count, that both sides compute the same, and their records."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from benchmarks import (
    compile_all,
    components,
    loss_gradients,
    profile_step,
    search_collections,
    startup,
    torch_twin,
    train_step,
    workload,
)
from diffcse_jax.config import Config
from diffcse_jax.losses.diffcse import Edited
from diffcse_jax.models import hf, layers
from diffcse_jax.models.forward import Computation
from diffcse_jax.training.networks import build
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.sharding import make_mesh
from diffcse_jax.training.step import initial_state, loss_of_batch, make_train_step, root_key

SETTINGS = train_step.Settings(
    size="tiny",
    objective="diffcse",
    length=12,
    batch_size=8,
    precision="float32",
    distinct_batches=1,
)
SIZES = hf.transformer_config(workload.ENCODERS["tiny"], source="test")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def test_the_twin_has_our_loss(monkeypatch):
    """With the same weights and no dropout; far from where training starts, because all sentences look alike there."""
    groups = train_step.OBJECTIVES["diffcse"]
    model = groups.get("model", {}) | {"hidden_dropout": (0.0,), "attention_dropout": (0.0,)}
    changes = {
        "model": model,
        "generator": {"dropout": False},
        "difference": {"weight": 1.0},
        "precision": "float32",
    }
    config, vocabulary = Config.from_dict({**groups, **changes}), workload.vocabulary("tiny")
    encoder, generator = (
        workload.random_checkpoint(sizes["tiny"], seed=seed)
        for seed, sizes in enumerate((workload.ENCODERS, workload.GENERATORS))
    )
    networks, params, _ = build(config, encoder, generator, vocabulary)
    params = {
        name: 5.0 * value if name.endswith("kernel") else value for name, value in params.items()
    }
    hf_config = workload.ENCODERS["tiny"] | NO_DROPOUT
    random_networks = torch_twin.random_encoder(hf_config), torch_twin.random_generator(hf_config)
    twin = torch_twin.Twin(config, *random_networks, vocabulary)
    for name in ("encoder", "discriminator"):
        tensors = hf.to_hf(layers.subset(params, name), "transformer", SIZES)
        getattr(twin, name).load_state_dict(
            {key: torch.tensor(value) for key, value in tensors.items()}
        )
    heads = {"projector.expand": twin.projector[0], "projector.contract": twin.projector[3]}
    for name, layer in (heads | {"token_classifier": twin.token_classifier}).items():
        head = {
            key: torch.from_numpy(np.array(value))
            for key, value in layers.subset(params, name).items()
        }
        layer.load_state_dict(
            {"weight": head["kernel"].T} | ({"bias": head["bias"]} if "bias" in head else {})
        )

    (batch,) = SETTINGS.batches()
    sentences = [torch.tensor(values, dtype=torch.long) for values in batch.anchors[:2]]
    input_ids, attention_mask = (rows.repeat_interleave(2, dim=0) for rows in sentences)
    filled = torch.from_numpy(
        np.where(np.random.default_rng(0).random(input_ids.shape) < 0.3, 150, input_ids)
    )
    edited, replaced = torch_twin.restore(filled, input_ids, attention_mask)
    monkeypatch.setattr(twin, "edit", lambda *rows: (edited, replaced))
    batch = jax.tree.map(jnp.asarray, batch)
    rows = batch.rows._replace(input_ids=jnp.asarray(edited.int().numpy()))
    inputs = dict.fromkeys(config.losses) | {
        "difference": Edited(rows, jnp.asarray(replaced.numpy()))
    }

    @jax.jit
    def loss(params: layers.Params) -> jax.Array:
        key = jax.random.key(0)  # read by nothing: every rate is 0
        return loss_of_batch(config, Computation(networks, params), batch, inputs, key)[0]

    assert replaced.any()
    np.testing.assert_allclose(twin(*sentences).item(), float(loss(params)), rtol=1e-4)


@pytest.mark.parametrize("condition", ["projected", "none"])
def test_norms_of_gradients_are_of_the_encoder(condition):
    """A discriminator without h leaves the encoder no gradient of the difference."""
    groups = train_step.OBJECTIVES["diffcse"] | {"precision": "float32"}
    config = Config.from_dict(groups | {"difference": {"weight": 2.0, "condition": condition}})
    encoder, generator = (
        workload.random_checkpoint(sizes["tiny"], seed=seed)
        for seed, sizes in enumerate((workload.ENCODERS, workload.GENERATORS))
    )
    networks, params, frozen = build(config, encoder, generator, workload.vocabulary("tiny"))
    mesh = make_mesh(config)
    optimizer = make_optimizer(config.optim, 10)
    state = initial_state(params, optimizer, config, mesh)
    batch = jax.tree.map(jnp.asarray, SETTINGS.batches()[0])
    rows = []
    step = loss_gradients.MeasuredStep(
        make_train_step(networks, config, optimizer, mesh),
        loss_gradients.make_norms(networks, config, mesh),
        {name: loss.weight for name, loss in config.losses.items()},
        rows,
    )
    state, metrics = step(state, jax.device_put(frozen), batch, root_key(config))
    (row,) = rows
    assert row["step"] == int(state.step) == 1
    assert 0 < row["norms"]["contrast"] < float(metrics["grad_norm"])
    assert (row["norms"]["difference"] > 0) == (condition == "projected")
    assert row["weighted"]["difference"] == 2.0 * row["norms"]["difference"]


@pytest.mark.slow
def test_train_step_command(tmp_path):
    output = tmp_path / "results" / "tiny.json"
    options = ["--size", "tiny", "--length", "12", "--packing", "off", "--steps", "2"]
    train_step.main([*options, "--output", str(output)])
    record = json.loads(output.read_text())
    assert record["command"].startswith("python -m benchmarks.train_step --size tiny")
    assert {
        "machine",
        "versions",
        "device",
        "settings",
        "mean_tokens",
        "step_flops",
    } <= record.keys()
    sides = record["implementations"]
    assert sides.keys() == {"ours", "torch_eager"}
    assert all(np.isfinite(side["loss"]) and side["share_of_peak"] != 0 for side in sides.values())
    assert sides["ours"]["step_seconds"].keys() == {"median", "min", "max", "turns"}
    medians = {name: side["step_seconds"]["median"] for name, side in sides.items()}
    assert record["ratios"] == {"torch_eager": medians["torch_eager"] / medians["ours"]}


def test_starts_are_compared_by_medians():
    ours, theirs = [(1.0, 2.0), (2.0, 2.0), (9.0, 2.0)], [(6.0, 2.0)] * 3
    record = startup._summary({"ours": ours, "sentence_transformers": theirs})
    assert record["ratios"] == {"sentence_transformers": {"processor": 3.0, "clock": 1.0}}
    assert record["ours"]["processor"] == {"median": 2.0, "min": 1.0, "max": 9.0, "turns": 3}


def test_kernels_of_a_profile_are_counted_by_step_and_kind():
    names = ["gemm_fusion_dot_1", "input_reduce_fusion_2", "gemm_fusion_dot_1", "fusion_3"]
    events = [SimpleNamespace(name=name, duration_ns=2e6) for name in names]
    gpu = SimpleNamespace(name="/device:GPU:0", lines=[SimpleNamespace(events=events)])
    host = SimpleNamespace(name="/host:CPU", lines=[SimpleNamespace(events=events)])
    kernels = profile_step.kernels_of([gpu, host], steps=2)
    program = "  %fusion.3 = f32[8,4]{1,0} fusion(%a), kind=kLoop"
    found = profile_step.summary(kernels, [program])
    assert next(iter(kernels.items())) == ("gemm_fusion_dot_1", (2.0, 1.0))
    assert (found["kernel_milliseconds"], found["kernels_per_step"]) == (4.0, 2.0)
    assert found["kinds"]["matrix products"] == 2.0
    assert found["kinds"]["other elementwise"] == 1.0
    assert {each["kernel"]: each["result"] for each in found["longest"]}[
        "fusion_3"
    ] == "f32[8,4]{1,0}"


def test_a_compiled_program_is_recorded_in_a_few_lines_and_shown():
    collectives = [
        {"kind": "all-reduce", "carries": "gradients", "count": 2, "bytes": 3_000_000},
        {"kind": "reduce-scatter", "carries": "gradients", "count": 1, "bytes": 2_000_000},
        {"kind": "all-gather", "carries": "counts", "count": 9, "bytes": 400},
    ]
    memory = {"arguments": 2**29, "temporaries": 2**29, "total": 2**30, "available": 2**34}
    cycles = {"total": 70, "by_category": {"matrix products": 30, "optimizer": 40}}
    record = {
        "batch_size": 64,
        "compile_seconds": 12.345,
        "memory_per_chip": memory,
        "fits": True,
        "collectives": collectives,
        "estimated_cycles": cycles,
        "dearest": [{"cycles": 30}],
    }
    program = {"arguments": "--target v5e:2x2 --config adapt"} | compile_all.compact(record)
    assert program["moved"] == {"gradients": 5_000_000}
    assert program["cycles"] == {"total": 70, "matrix products": 30, "optimizer": 40}
    row = "| adapt | v5e:2x2 | 1.00 of 16.00 GiB | yes | gradients 5.0 MB |"
    assert compile_all.table([program]).splitlines()[-1] == row


def test_a_collection_is_recorded_with_the_score_of_each_seed():
    def scores(**by_system: float) -> dict:
        return {
            name.replace("_", " + "): {"ndcg@10": {"a": value, "b": value + 2}}
            for name, value in by_system.items()
        }

    start = {"scores": scores(BM25=40, start=50, start_BM25=60), "made": [], "weight": 0.1}
    runs = [
        {"scores": scores(trained=52 + seed, trained_BM25=61), "made": [], "seconds": 9.0}
        for seed in (0, 1)
    ]
    record = search_collections.summarise(start, {"ours": runs})
    assert record["ndcg@10"] == {
        "BM25": [41],
        "start": [51],
        "start + BM25": [61],
        "trained": [53, 54],
        "trained + BM25": [62, 62],
    }
    assert record["tests"]["start -> trained"]["difference"] == 2.5
    assert record["runs"] == {"ours": [{"seconds": 9.0}] * 2}
    ways = [("", "lexical", 3), ("minilm", "dense", 2), ("this model", "hybrid", 1)]
    made = [
        {"encoder": encoder, "mode": mode, "score": score, "weight": 0.2}
        for encoder, mode, score in ways
    ]
    asked = {"BM25": {"a": 40}, "start": {"a": 50}, "trained + BM25 0.2": {"a": 55}}
    run = {"made": made, "all": asked, "recommended": "start"}
    costs = {"tau": pytest.approx(-1), "lost": 15, "lost_recommended": 5}
    assert search_collections.agreement(run) == costs


def test_variants_of_attention_compute_the_same():
    """A fault: the library's attention got tokens and features in each other's place."""
    with jax.numpy_rank_promotion("allow"):  # JAX's own attention needs it
        first, *others = (
            compute() for compute in components.attention("tiny", 4, 6, backward=False).values()
        )
    np.testing.assert_allclose(others, [first], rtol=1e-4)
