"""The benchmarks: what they count, that both sides compute the same, that each command leaves its record."""

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from benchmarks import components, flops, input_pipeline, measure, torch_twin, train_step, workload
from diffcse_jax.config import Config
from diffcse_jax.edits import Vocabulary
from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.models import parameters, pretrained
from diffcse_jax.models.transformer import Transformer
from diffcse_jax.training.networks import build
from diffcse_jax.training.objective import Corruptions, Edited, as_views, objective

ROOT = Path(__file__).parents[1]
SETTINGS = train_step.Settings(size="tiny", objective="diffcse", length=12, batch_size=8, precision="float32")
SIZES = pretrained.transformer_config(workload.ENCODERS["tiny"], source="test")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# torch.compile warns of what PyTorch itself uses.
COMPILED = pytest.param(True, marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")])
IMPLEMENTATION_KEYS = {
    "step_seconds", "sentences_per_second", "compile_seconds", "peak_memory_bytes", "peak_rss_bytes",
    "flops_per_second", "share_of_peak", "loss",
}  # fmt: skip


class Sides:
    """Both sides with the same weights and without dropout."""

    def __init__(self, objective_name: str):
        groups = train_step.OBJECTIVES[objective_name]
        model = groups.get("model", {}) | {"hidden_dropout": (0.0,), "attention_dropout": (0.0,)}
        self.config = Config.from_dict({**groups, "model": model, "generator": {"dropout": False}})
        vocabulary = workload.vocabulary("tiny")
        self.generator = workload.random_checkpoint(workload.GENERATORS["tiny"], seed=1)
        encoder = workload.random_checkpoint(workload.ENCODERS["tiny"], seed=0)
        self.networks, params, self.batch_stats, self.frozen = build(self.config, encoder, self.generator, vocabulary)
        # Far from where training starts, where all sentences look alike.
        self.params = {name: 5.0 * value if name.endswith("kernel") else value for name, value in params.items()}
        hf_config = workload.ENCODERS["tiny"] | NO_DROPOUT
        self.twin = torch_twin.Twin(self.config, hf_config, hf_config, vocabulary)
        self._copy()
        batch = workload.synthetic_batches("tiny", 1, batch_size=8, length=12)[0]
        assert batch["attention_mask"].sum(axis=-1).max() == 12  # so that both count the same padding
        self.batch = batch
        self.rows = [torch.from_numpy(batch[name][:, 0]).long() for name in ("input_ids", "attention_mask")]

    def _copy(self) -> None:
        networks = ["encoder"] + ["discriminator"] * self.config.uses_difference
        for name in networks:
            tensors = pretrained.to_hf(parameters.subset(self.params, name), "transformer", SIZES)
            getattr(self.twin, name).load_state_dict({key: torch.tensor(value) for key, value in tensors.items()})
        heads = {"dense": "0"} if self.config.model.projector == "mlp" else {"expand": "0", "contract": "3"}
        for ours, theirs in heads.items():
            copy_dense(self.twin.projector.get_submodule(theirs), parameters.subset(self.params, f"projector.{ours}"))
        if self.config.uses_difference:
            copy_dense(self.twin.token_classifier, parameters.subset(self.params, "token_classifier"))

    def our_loss(self, edited: Edited | None = None) -> float:
        views = as_views({name: jnp.asarray(rows) for name, rows in self.batch.items()})
        key = jax.random.key(0)  # read by nothing: every rate is 0
        loss, _ = jax.jit(functools.partial(objective, networks=self.networks, config=self.config, views=views))(
            self.params, self.batch_stats, corruptions=Corruptions(edited, None), key=key
        )
        return float(loss)


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
    ours = Edited(jnp.asarray(edited.int().numpy()), jnp.asarray(replaced.numpy()))
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


@pytest.mark.parametrize("compiled", [False, COMPILED])
def test_the_twin_learns(compiled):
    torch.manual_seed(0)
    sides = Sides("simcsepp")
    config = dataclasses.replace(sides.config, optim=dataclasses.replace(sides.config.optim, learning_rate=1e-2))
    step = torch_twin.make_step(sides.twin, config, total_steps=100, compiled=compiled)
    losses = [step(*sides.rows).item() for _ in range(10)]
    np.testing.assert_allclose(losses[0], sides.our_loss(), rtol=1e-4)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("compiled", [False, COMPILED])
def test_the_twin_has_negatives_without_dropout(compiled):
    # At a ratio near 0 the loss depends on the negatives alone; at a learning rate of 0 nothing else changes it.
    groups = {"contrast": {"negatives": "off_dropout", "negative_ratio": 1e-6}, "optim": {"learning_rate": 0.0}}
    config = Config.from_dict(train_step.OBJECTIVES["simcse"] | groups)
    twin = torch_twin.Twin(config, workload.ENCODERS["tiny"], workload.GENERATORS["tiny"], workload.vocabulary("tiny"))
    step = torch_twin.make_step(twin, config, total_steps=100, compiled=compiled)
    batch = workload.synthetic_batches("tiny", 1, batch_size=8, length=12)[0]
    rows = [torch.from_numpy(batch[name][:, 0]).long() for name in ("input_ids", "attention_mask")]
    losses = [step(*rows).item() for _ in range(3)]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-4)
    assert twin.encoder.training


def test_flops_by_hand():
    # Hidden 16, 2 blocks, feed-forward 64, vocabulary 200; 8 sentences of 12 positions, 9 of them real: 16 rows.
    block = 4 * 2 * 16 * 16 + 2 * 2 * 12 * 16 + 2 * 2 * 16 * 64
    passed = 16 * 12 * 2 * block
    contrast = 2 * 8 * 8 * 16
    common = {"batch_size": 8, "length": 12, "mean_tokens": 9.0}

    def count(name: str) -> int:
        config = dataclasses.replace(SETTINGS, objective=name).config()
        return flops.step_flops(config, SIZES, SIZES, **common)

    mlp, batchnorm = 2 * 16 * 16, 2 * (2 * 16 * 32)
    assert count("simcse") == 3 * (passed + 16 * mlp + contrast)
    assert count("simcsepp") == 3 * (passed + passed // 2 + 24 * mlp + contrast + 2 * 8 * 16 * 16)
    vocabulary = 16 * 8 * (2 * 16 * 16 + 2 * 16 * 200)
    classifier = 16 * 12 * 2 * 16 * 2
    assert count("diffcse") == 3 * (2 * passed + 16 * batchnorm + contrast + classifier) + passed + vocabulary


def test_flops_of_a_transformer_are_nearly_those_xla_counts():
    sizes = pretrained.transformer_config(workload.ENCODERS["minilm"], source="test")
    transformer = functools.partial(Transformer, sizes)
    definition = parameters.definition(transformer)

    def forward(params, ids, mask):
        return parameters.bind(definition, params)(ids, mask)["last_hidden_state"]

    ids = jax.ShapeDtypeStruct((4, 32), jnp.int32)
    counted = jax.jit(forward).lower(parameters.shapes(transformer), ids, ids).cost_analysis()["flops"]
    # XLA counts norms, softmax and activations too.
    assert 1.0 < counted / flops.transformer_flops(sizes, rows=4, length=32) < 1.05


def test_synthetic_lengths_are_those_of_sentences():
    for longest in (32, 64, 128):
        lengths = workload.synthetic_lengths(np.random.default_rng(0), 100_000, longest)
        np.testing.assert_allclose(lengths.mean() / longest, 24.2 / 32, rtol=0.01)
        assert lengths.max() == longest


def test_synthetic_batches_are_sentences():
    first, second = workload.synthetic_batches("tiny", 2, batch_size=8, length=12)
    ids, mask = first["input_ids"], first["attention_mask"]
    assert ids.shape == mask.shape == (8, 1, 12)
    assert (ids[..., 0] == workload.CLS).all()
    assert (ids[mask == 0] == workload.PAD).all()
    np.testing.assert_array_equal((ids == workload.SEP).sum(axis=-1), 1)
    assert not np.array_equal(ids, second["input_ids"])


@pytest.mark.parametrize(
    "objective_name", ["simcse", *(pytest.param(name, marks=pytest.mark.slow) for name in ("simcsepp", "diffcse"))]
)
def test_our_side_steps(objective_name):
    side = train_step.ours(dataclasses.replace(SETTINGS, objective=objective_name))
    side.step()
    side.wait()
    first = side.facts()
    side.step()
    assert np.isfinite(first["loss"])
    assert side.facts()["loss"] != first["loss"]
    assert first["planned_memory_bytes"] > 0


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


def test_share_of_peak():
    assert measure.share_of_peak(98.9e12, "NVIDIA H200", "bfloat16") == pytest.approx(0.1)
    assert measure.share_of_peak(1e12, "TPU v5 lite", "float32") is None
    assert measure.share_of_peak(1e12, "cpu", "float32") is None


@pytest.mark.slow
def test_the_step_runs_where_only_its_own_packages_are():
    script = """
import sys
sys.modules |= dict.fromkeys(["grain", "ml_collections", "tensorflow_datasets", "torch"])
from benchmarks import encode, train_step
side = train_step.ours(train_step.Settings("tiny", "simcse", length=12, batch_size=8, precision="float32"))
side.step()
print(side.facts()["loss"])
"""
    finished = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert np.isfinite(float(finished.stdout))


@pytest.mark.slow
def test_train_step_command(tmp_path):
    output = tmp_path / "results" / "tiny.json"
    train_step.main(["--size", "tiny", "--batch_size", "8", "--length", "12", "--steps", "2", "--output", str(output)])
    record = json.loads(output.read_text())
    assert record["command"].startswith("python -m benchmarks.train_step --size tiny")
    assert {"machine", "versions", "device", "settings", "mean_tokens", "step_flops", "ratios"} <= record.keys()
    assert record["implementations"].keys() == {"ours", "torch_eager"}
    for side in record["implementations"].values():
        assert side.keys() >= IMPLEMENTATION_KEYS
    medians = {name: side["step_seconds"]["median"] for name, side in record["implementations"].items()}
    assert record["ratios"] == {"torch_eager": medians["torch_eager"] / medians["ours"]}


@pytest.mark.slow
def test_a_step_that_is_not_run_is_planned(tmp_path):
    output = tmp_path / "plan.json"
    size = ["--size", "tiny", "--length", "12", "--steps", "0", "--output", str(output)]
    planned = []
    for options in ([], ["--chunk_size", "8"]):
        train_step.main([*size, *options])
        planned.append(json.loads(output.read_text())["implementations"]["ours"]["planned_memory_bytes"])
    whole, chunks = planned
    assert chunks < whole / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--block", "0"], "--steps must be at least 0 and --block at least 1"),
        (["--length", "513"], "--length: the models have 512 positions"),
        (["--chunk_size", "48"], "--chunk_size 48 does not divide --batch_size 64"),
        (["--torch", "none", "eager"], "--torch: none stands alone"),
        (["--size", "tiny", "--text", "README.md"], "--size tiny does not have"),
    ],
)
def test_train_step_refuses(options, message, capsys):
    with pytest.raises(SystemExit):
        train_step.main(options)
    assert message in capsys.readouterr().err


def test_a_text_that_is_too_short_is_named(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"one\ntwo\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\n")
    assert workload.read_sentences(tmp_path / "text.txt", 2) == ["one", "two"]
    for name, message in (("text.txt", "has 2 lines, 3 are needed"), ("bytes.txt", "decode"), ("none.txt", "No such")):
        with pytest.raises(DataError, match=f"--text .*{name}.*{message}"):
            workload.read_sentences(tmp_path / name, 3)


def test_a_record_that_cannot_be_written_is_printed(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="the record is printed above"):
        measure.write_record(tmp_path / "file/record.json", "benchmarks.encode", [], {"ratios": {"torch": 2.0}})
    assert json.loads(capsys.readouterr().out)["ratios"] == {"torch": 2.0}


def test_components_command(tmp_path):
    output = tmp_path / "components.json"
    components.main(["--size", "tiny", "--sentences", "4", "--rounds", "1", "--output", str(output)])
    parts = json.loads(output.read_text())["parts"]
    assert len(parts) == 8
    for part in parts.values():
        assert part["seconds"].keys() == {components.AS_IS, *part["ratios"]}


def test_the_libraries_attention_computes_the_same():
    same = components.attention("tiny", rows=4, length=10, backward=True)
    as_is, library = (jax.tree.leaves(compute()) for compute in same.values())
    for one, other in zip(as_is, library, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_encode_command(tmp_path):
    from benchmarks import encode

    output = tmp_path / "encode.json"
    others = ["sentence-transformers", "transformers"]
    encode.main(["--sentences", "24", "--rounds", "1", "--against", *others, "--output", str(output)])
    record = json.loads(output.read_text())
    assert record["ratios"].keys() == set(others)
    assert all(0 < difference < 1e-5 for difference in record["max_abs_difference"].values())
    assert record["settings"]["sentences"] == 24


@pytest.mark.slow
def test_a_worker_that_fails_is_an_error_here():
    with (
        pytest.raises(RuntimeError, match="worker of ours ended"),
        measure.worker(train_step.ours, dataclasses.replace(SETTINGS, objective="none")),
    ):
        pass


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
