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
import sentence_transformers
import torch
from tiny_model import write_tiny_model

from benchmarks import (
    adaptation_recipes,
    components,
    encode,
    flops,
    input_pipeline,
    measure,
    torch_twin,
    train_step,
    workload,
)
from diffcse_jax.batch import TokenRows, Vocabulary
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


def test_the_twin_edits_as_the_authors_do():
    sides = Sides("diffcse")
    input_ids, attention_mask = sides.rows
    torch.manual_seed(0)
    edited, replaced = sides.twin.edit(input_ids, attention_mask)
    assert (edited[:, 0] == input_ids[:, 0]).all()
    assert (edited[attention_mask == 0] == 0).all()
    assert not replaced[attention_mask == 0].any()
    torch.testing.assert_close(replaced, (edited != input_ids) & (attention_mask > 0))


def test_the_twin_masks_ordinary_tokens_80_10_10():
    twin = torch_twin.Twin(
        Config(), workload.ENCODERS["tiny"], workload.GENERATORS["tiny"], Vocabulary(200, workload.MASK, (0, 101))
    )
    torch.manual_seed(0)
    input_ids = torch.full((200, 500), 150)
    input_ids[:, 0] = 101
    masked = twin.mask_tokens(input_ids)
    assert (masked[:, 0] == 101).all()
    body = masked[:, 1:]
    shares = [(body == workload.MASK).float().mean(), ((body != workload.MASK) & (body != 150)).float().mean()]
    np.testing.assert_allclose(shares, [0.3 * 0.8, 0.3 * 0.1], rtol=0.03)


def learning_twin(dropout: bool) -> Callable[[], float]:
    """Steps on one batch under a loss of nothing but the negatives: at a ratio near 0 the positives do not count."""
    groups = {"contrast": {"negatives": "off_dropout", "negative_ratio": 1e-6}, "optim": {"learning_rate": 1e-3}}
    config = Config.from_dict(train_step.OBJECTIVES["simcse"] | groups)
    hf_config = workload.ENCODERS["tiny"] | ({} if dropout else NO_DROPOUT)
    torch.manual_seed(0)
    twin = torch_twin.Twin(config, hf_config, hf_config, workload.vocabulary("tiny"))
    with torch.no_grad():  # far from where training starts, where all sentences look alike
        for matrix in (parameter for parameter in twin.parameters() if parameter.ndim == 2):
            matrix *= 5.0
    step = torch_twin.make_step(twin, config, total_steps=100, compiled=False)
    (views,) = SETTINGS.batches()
    return lambda: step(*tokens_of(views.anchors)).item()


def test_the_twin_learns_from_negatives_without_dropout():
    with_dropout, without = learning_twin(dropout=True), learning_twin(dropout=False)
    losses, expected = ([step() for _ in range(5)] for step in (with_dropout, without))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert losses[-1] < losses[0] - 0.1


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
        return parameters.bind(definition, params)(TokenRows(ids, mask))["last_hidden_state"]

    ids = jax.ShapeDtypeStruct((4, 32), jnp.int32)
    counted = jax.jit(forward).lower(parameters.shapes(transformer), ids, ids).cost_analysis()["flops"]
    # XLA counts norms, softmax and activations too.
    assert 1.0 < counted / flops.transformer_flops(sizes, rows=4, length=32) < 1.05


def test_turns_alternate_and_the_step_before_each_is_not_counted():
    calls = []

    def side(name: str, seconds: float) -> measure.Worker:
        def run(steps: int) -> float:
            calls.append((name, steps))
            return seconds * steps

        return measure.Worker(1.0, run, dict)

    seconds = measure.alternate({"ours": side("ours", 1.0), "torch": side("torch", 3.0)}, steps=4, block=2)
    assert calls == [("ours", 1), ("ours", 2), ("torch", 1), ("torch", 2)] * 2
    assert seconds == {"ours": [2.0, 2.0], "torch": [6.0, 6.0]}
    sides = {name: measure.summary(values, first_call=10.0, items=8) for name, values in seconds.items()}
    assert measure.ratios(sides) == {"torch": 3.0}
    assert sides["ours"]["compile_seconds"] == 8.0
    assert sides["ours"]["sentences_per_second"] == 4.0


TINY_STEP = ["--size", "tiny", "--length", "12", "--packing", "off"]


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


def test_components_command(tmp_path):
    output = tmp_path / "components.json"
    components.main(["--size", "tiny", "--sentences", "4", "--rounds", "1", "--output", str(output)])
    parts = json.loads(output.read_text())["parts"]
    assert len(parts) == 9
    for part in parts.values():
        assert part["seconds"].keys() == {components.AS_IS, *part["ratios"]}


def test_the_libraries_attention_computes_the_same():
    same = components.attention("tiny", rows=4, length=10, backward=True)
    as_is, library = (jax.tree.leaves(compute()) for compute in same.values())
    for one, other in zip(as_is, library, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


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


def test_what_recipes_are_trained_on():
    rows = [("A title", "Its rest."), ("Another", "And more.")]
    pairs = adaptation_recipes.columns("pairs", rows, seed=1)
    assert pairs == {"anchor": ["A title", "Another"], "positive": ["Its rest.", "And more."]}
    sentences = [" ".join(f"w{i}" for i in range(length)) for length in (1, 2, 400)]
    rows = [(sentence,) for sentence in sentences]
    assert adaptation_recipes.columns("simcse", rows, seed=1) == {"anchor": sentences, "positive": sentences}
    damaged = adaptation_recipes.columns("tsdae", rows, seed=1)
    assert damaged["original"] == sentences
    words = [text.split() for text in damaged["damaged"]]
    assert all(set(kept) <= set(text.split()) for kept, text in zip(words, sentences, strict=True))
    assert (len(words[0]), words[2]) == (1, sorted(words[2], key=lambda word: int(word[1:])))
    assert abs(len(words[2]) - 160) < 4 * (400 * 0.4 * 0.6) ** 0.5  # standard deviations


@pytest.mark.slow
def test_adaptation_recipes_command(tmp_path, monkeypatch, minilm_dir):
    monkeypatch.setattr(adaptation_recipes, "_alone", lambda function, *arguments: function(*arguments))
    text, pairs, output = (tmp_path / name for name in ("text.txt", "pairs.tsv", "record.json"))
    text.write_text("".join(f"Subject {i} is this. It has the number {i * i} of all.\n\n" for i in range(80)))
    pairs.write_text("a\tb\nc\td\n")
    plain = write_tiny_model(tmp_path / "plain", minilm_dir, blocks=1)
    model = tmp_path / "model"
    sentence_transformers.SentenceTransformer(str(plain)).save(str(model))  # it records its pooler
    options = ["--steps", "2", "--batch_size", "8", "--max_length", "16", "--held_out", "0.2", "--output", output]
    options += ["--text", text, "--model", model, "--tasks", f"pairs_retrieval:{pairs}"]
    adaptation_recipes.main(list(map(str, options)))
    record = json.loads(output.read_text())
    sides = record["sides"]
    assert list(sides) == ["start", "ours", "pairs", "simcse", "tsdae"]
    assert record["config"]["train"]["steps"] == 2
    for name, side in sides.items():
        assert list(side["scores"]) == [f"pairs_retrieval:{pairs}"]
        assert name == "start" or min(side["seconds"], side["processor_seconds"], side["learning_rate"]) > 0


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
