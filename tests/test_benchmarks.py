"""The benchmarks: what they count, that both sides compute the same, that each command leaves its record."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from benchmarks import (
    encode,
    flops,
    input_pipeline,
    measure,
    torch_twin,
    train_step,
    workload,
)
from diffcse_jax.batch import TokenRows
from diffcse_jax.config import Config
from diffcse_jax.losses.diffcse import Edited
from diffcse_jax.models import hf, parameters
from diffcse_jax.models.forward import Computation
from diffcse_jax.models.transformer import Transformer
from diffcse_jax.training.networks import build
from diffcse_jax.training.step import loss_of_batch

ROOT = Path(__file__).parents[1]
SETTINGS = train_step.Settings(
    size="tiny", objective="diffcse", length=12, batch_size=8, precision="float32", distinct_batches=1
)
SIZES = hf.transformer_config(workload.ENCODERS["tiny"], source="test")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMPLEMENTATION_KEYS = {
    "step_seconds", "sentences_per_second", "compile_seconds", "peak_memory_bytes", "peak_rss_bytes",
    "flops_per_second", "share_of_peak", "loss",
}  # fmt: skip


class Sides:
    """Both sides with the same weights and without dropout."""

    def __init__(self, objective_name: str):
        groups = train_step.OBJECTIVES[objective_name]
        model = groups.get("model", {}) | {"hidden_dropout": (0.0,), "attention_dropout": (0.0,)}
        self.config = Config.from_dict(
            {**groups, "model": model, "generator": {"dropout": False}, "precision": "float32"}
        )
        vocabulary = workload.vocabulary("tiny")
        self.generator = workload.random_checkpoint(workload.GENERATORS["tiny"], seed=1)
        encoder = workload.random_checkpoint(workload.ENCODERS["tiny"], seed=0)
        self.networks, params, _ = build(self.config, encoder, self.generator, vocabulary)
        # Far from where training starts, where all sentences look alike.
        self.params = {name: 5.0 * value if name.endswith("kernel") else value for name, value in params.items()}
        hf_config = workload.ENCODERS["tiny"] | NO_DROPOUT
        self.twin = torch_twin.Twin(self.config, hf_config, hf_config, vocabulary)
        self._copy()
        (views,) = SETTINGS.batches()
        self.views = jax.tree.map(jnp.asarray, views)
        self.rows = tokens_of(views.anchors)

    def _copy(self) -> None:
        networks = ["encoder"] + ["discriminator"] * ("difference" in self.config.losses)
        for name in networks:
            tensors = hf.to_hf(parameters.subset(self.params, name), "transformer", SIZES)
            getattr(self.twin, name).load_state_dict({key: torch.tensor(value) for key, value in tensors.items()})
        heads = {"dense": "0"} if self.config.model.projector == "mlp" else {"expand": "0", "contract": "3"}
        for ours, theirs in heads.items():
            copy_dense(self.twin.projector.get_submodule(theirs), parameters.subset(self.params, f"projector.{ours}"))
        if "difference" in self.config.losses:
            copy_dense(self.twin.token_classifier, parameters.subset(self.params, "token_classifier"))

    def our_loss(self, edited: Edited | None = None) -> float:
        corruptions = dict.fromkeys(self.config.losses) | ({"difference": edited} if edited else {})

        @jax.jit
        def loss(params: parameters.Params) -> jax.Array:
            key = jax.random.key(0)  # read by nothing: every rate is 0
            computation = Computation(self.networks, params)
            return loss_of_batch(self.config, computation, self.views, corruptions, key)[0]

        return float(loss(self.params))


def tokens_of(rows: TokenRows) -> list[torch.Tensor]:
    return [torch.tensor(values, dtype=torch.long) for values in (rows.input_ids, rows.attention_mask)]


def copy_dense(layer: torch.nn.Linear, params: parameters.Params) -> None:
    state = {"weight": torch.from_numpy(np.asarray(params["kernel"]).T.copy())}
    if "bias" in params:
        state["bias"] = torch.from_numpy(np.array(params["bias"]))
    layer.load_state_dict(state)


@pytest.mark.parametrize("objective_name", ["simcse", "simcsepp"])
def test_the_twin_has_our_contrastive_loss(objective_name):
    sides = Sides(objective_name)
    theirs = sides.twin(*sides.rows).item()
    np.testing.assert_allclose(theirs, sides.our_loss(), rtol=1e-4)
    assert theirs > 1e-3


def test_the_twin_has_our_difference_loss(monkeypatch):
    sides = Sides("diffcse")
    rng = np.random.default_rng(0)
    input_ids, attention_mask = (rows.repeat_interleave(2, dim=0) for rows in sides.rows)
    filled = torch.from_numpy(np.where(rng.random(input_ids.shape) < 0.3, 150, input_ids))
    edited, replaced = torch_twin.restore(filled, input_ids, attention_mask)
    monkeypatch.setattr(sides.twin, "edit", lambda *rows: (edited, replaced))
    rows = sides.views.rows._replace(input_ids=jnp.asarray(edited.int().numpy()))
    ours = Edited(rows, jnp.asarray(replaced.numpy()))
    sides.config = dataclasses.replace(
        sides.config, difference=dataclasses.replace(sides.config.difference, weight=1.0)
    )
    sides.twin.config = sides.config
    np.testing.assert_allclose(sides.twin(*sides.rows).item(), sides.our_loss(ours), rtol=1e-4)
    assert replaced.any()


def test_flops_by_hand():
    # Hidden 16, 1 block, feed-forward 64, vocabulary 200; 8 sentences of 12 positions, 9 of them real: 16 rows.
    block = 4 * 2 * 16 * 16 + 2 * 2 * 12 * 16 + 2 * 2 * 16 * 64
    passed = 16 * 12 * block
    contrast = 2 * 8 * 8 * 16
    batch = flops.BatchSize(SIZES, SIZES, examples=8, views=2, length=12, mean_tokens=9.0)

    def count(name: str) -> float:
        return flops.step_flops(Config.from_dict(train_step.OBJECTIVES[name]), batch)

    mlp, batchnorm = 2 * 16 * 16, 2 * (2 * 16 * 32)
    assert count("simcse") == 3 * (passed + 16 * mlp + contrast)
    assert count("simcsepp") == 3 * (passed + passed // 2 + 24 * mlp + contrast + 2 * 8 * 16 * 16)
    vocabulary = 2 * 16 * 16 + 2 * 16 * 200
    classifier = 16 * 12 * 2 * 16 * 2
    generator = passed + 16 * 8 * vocabulary
    assert count("diffcse") == 3 * (2 * passed + 16 * batchnorm + contrast + classifier) + generator


def test_flops_of_a_transformer_are_nearly_those_xla_counts():
    sizes = hf.transformer_config(workload.ENCODERS["minilm"], source="test")
    transformer = functools.partial(Transformer, sizes)
    definition = parameters.definition(transformer)

    def forward(params, ids, mask):
        return parameters.bind(definition, params)(TokenRows(ids, mask))[-1]

    ids = jax.ShapeDtypeStruct((4, 32), jnp.int32)
    counted = jax.jit(forward).lower(parameters.shapes(transformer), ids, ids).cost_analysis()["flops"]
    # XLA counts norms, softmax and activations too.
    assert 1.0 < counted / flops.transformer_flops(sizes, rows=4, length=32) < 1.05


@pytest.mark.slow
def test_train_step_command(tmp_path):
    output = tmp_path / "results" / "tiny.json"
    options = ["--size", "tiny", "--length", "12", "--packing", "off", "--steps", "2"]
    train_step.main([*options, "--output", str(output)])
    record = json.loads(output.read_text())
    assert record["command"].startswith("python -m benchmarks.train_step --size tiny")
    assert {"machine", "versions", "device", "settings", "mean_tokens", "step_flops", "ratios"} <= record.keys()
    assert record["implementations"].keys() == {"ours", "torch_eager"}
    for side in record["implementations"].values():
        assert side.keys() >= IMPLEMENTATION_KEYS
        assert np.isfinite(side["loss"])
    medians = {name: side["step_seconds"]["median"] for name, side in record["implementations"].items()}
    assert record["ratios"] == {"torch_eager": medians["torch_eager"] / medians["ours"]}


@pytest.mark.slow
def test_encode_command(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "worker", in_this_process)
    output = tmp_path / "encode.json"
    others = ["sentence-transformers", "transformers"]
    encode.main(["--sentences", "8", "--rounds", "1", "--against", *others, "--output", str(output)])
    record = json.loads(output.read_text())
    assert record["ratios"].keys() == set(others)
    assert all(0 < difference < 1e-5 for difference in record["max_abs_difference"].values())
    assert record["settings"]["sentences"] == 8


@contextlib.contextmanager
def in_this_process(build: Callable[..., measure.Implementation], *arguments: Any) -> Iterator[measure.Worker]:
    """A worker that is no process of its own."""
    side = build(*arguments)

    def run(steps: int) -> float:
        for _ in range(steps):
            side.step()
        side.wait()
        return 1.0

    yield measure.Worker(run(1), run, side.facts)


def test_input_pipeline_command(tmp_path):
    output = tmp_path / "pipeline.json"
    input_pipeline.main(
        ["--sentences", "1000", "2000", "--tokenize", "500", "--seconds", "0.2", "--output", str(output)]
    )
    record = json.loads(output.read_text())
    assert [row["sentences"] for row in record["batches"]] == [1000, 2000]
    for row in record["batches"]:
        assert row["sentences_per_second"] > 0
        assert row.keys() >= {"rss_growth_bytes", "build_seconds", "shuffle_seconds"}
    assert [row["sentences"] for row in record["tokenizing"]] == [500]
