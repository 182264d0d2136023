"""The model that a finished run gives. All weights of a model are one number: 0 at the start, else the step."""

import dataclasses
import shutil
from functools import partial
from unittest import mock

import numpy as np
import pytest
from test_checkpoints import HF_CONFIG, state_of
from tiny_networks import ENCODER, SIMCSE, config_of
from transformers import PreTrainedTokenizerFast

from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.evaluation.dev import DevEvaluation
from diffcse_jax.models.sentence_folder import RecordedPooler
from diffcse_jax.run_folder.checkpoints import Checkpoints, read_encoder
from diffcse_jax.run_folder.records import Measured, Record, read_selection, write_baseline
from diffcse_jax.run_folder.start import open_run
from diffcse_jax.training import train as selection
from diffcse_jax.training.loop import Run
from diffcse_jax.training.networks import StartingCheckpoint
from diffcse_jax.training.train import check_interpolation, select

AVG = {"model": {"projector": "none", "pooler": "avg"}}
THIRDS = (1 / 3, 2 / 3, 1.0)
HOLD = ("halves_retrieval",)
BASELINE = Record(0, "avg_top2", {"mrr": 60.0, "guard": 80.0}, "mrr", "text", [[60.0] * 20])
MEASURED = {  # by the mean weight
    1.0: Measured({"mrr": 59.0, "guard": 79.5}, [[59.0] * 20]),
    2.0: Measured({"mrr": 65.0, "guard": 79.0}, [[65.0] * 20]),
    3.0: Measured({"mrr": 65.0, "guard": 75.0}, [[65.0] * 20]),
    4.0: Measured({"mrr": 64.0, "guard": 70.0}, [[64.0] * 20]),
}


def weight_of(encoder) -> float:
    checkpoint = getattr(encoder, "checkpoint", encoder)
    (weight,) = {float(array.mean()) for array in checkpoint.transformer.values()}
    return weight


EVALUATION = mock.Mock(
    spec=DevEvaluation,
    metric="mrr",
    text="dev",
    drift_metric="guard",
    chosen=mock.Mock(
        units="20 queries", aspect="", remark="", interval=lambda start, model: (model[0][0] - start[0][0] - 1.5, 6.5)
    ),
    measure=lambda encoder: MEASURED[round(weight_of(encoder), 5)],
    held=lambda encoder: {"halves": weight_of(encoder)},
    regressions=lambda start, model: ["halves 1.00 against 2.00"] if model["halves"] > 2 else [],
)


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    """Finishes a run with checkpoints at steps, and gives the encoder that is read from its workdir."""
    model = partial(mock.Mock, spec=selection.SentenceEncoder)
    monkeypatch.setattr(selection.SentenceEncoder, "from_saved", lambda saved: model(checkpoint=saved.checkpoint))
    monkeypatch.setattr(StartingCheckpoint, "encoder", lambda start, config: start.checkpoint)
    constant = {name: np.zeros_like(array) for name, array in ENCODER.transformer.items()}
    checkpoint = dataclasses.replace(ENCODER, hf_config=HF_CONFIG, transformer=constant)
    tokenizer = mock.Mock(spec=PreTrainedTokenizerFast)
    start = StartingCheckpoint("tiny", checkpoint, tokenizer, RecordedPooler("avg_top2"))

    def finish(*steps, **options):
        config = config_of(SIMCSE, AVG, {"eval": {"guard": True, **options}})
        open_run(tmp_path, config, checkpoint, tokenizer, None)
        write_baseline(tmp_path, BASELINE)
        with Checkpoints(tmp_path, Record(0, "avg", {}, "mrr", "text", dev_text="dev")) as checkpoints:
            for step in steps:
                checkpoints.save(state_of(step), {}, MEASURED[step])
        run = mock.Mock(spec=Run, config=config, workdir=tmp_path, evaluation=EVALUATION, base=start)
        run.keeps_quality = partial(Run.keeps_quality, run)
        verdict = select(run, BASELINE)
        assert read_selection(tmp_path).verdict == verdict
        return read_encoder(tmp_path), verdict

    return finish


@pytest.mark.parametrize(
    ("steps", "options", "weight", "opening", "exported"),
    [
        ((1, 2), {}, 2.0, "Better than tiny: mrr 65.00, was 60.00 (+5.00, 95% interval +3.50 to +6.50 over", "step 2"),
        ((1,), {"keep_start": True}, 0.0, "warning: Not better than tiny", "tiny unchanged"),
        ((4,), {"interpolate": (0.25, 0.5, 1.0)}, 2.0, "Better", "0.5 x step 4 + 0.5 x the starting checkpoint"),
        ((3,), {"interpolate": THIRDS, "max_drop": 1.0}, 2.0, "Better", "0.666667 x step 3 + 0.333333 x the"),
        ((4,), {"max_drop": 1.0}, 4.0, "warning: Better than tiny", "step 4 anyway."),
        ((4,), {"max_drop": 1.0, "keep_start": True}, 0.0, "warning: Not clearly better than tiny", "tiny unchanged."),
        ((4,), {"hold": HOLD, "keep_start": True}, 0.0, "warning: Not clearly better than tiny", "tiny unchanged ("),
        ((4,), {"hold": HOLD, "keep_start": True, "interpolate": (0.5,)}, 2.0, "Better", "0.5 x step 4 + 0.5 x the"),
    ],
)
def test_what_is_exported(steps, options, weight, opening, exported, chosen):
    saved, verdict = chosen(*steps, **options)
    assert weight_of(saved) == pytest.approx(weight)
    assert verdict.startswith(opening)
    assert f" Exported {exported}" in verdict
    fails = "interpolate" not in options
    assert ("No model keeps guard within eval.max_drop=1 of 80.00." in verdict) == ("max_drop" in options and fails)
    assert (" But other queries got worse: halves 1.00 against" in verdict) == ("hold" in options and fails)
    assert saved.selection.verdict == verdict
    assert saved.baseline == BASELINE
    if weight == 0:
        assert (saved.pooler, saved.step, saved.dev) == ("avg_top2", 0, BASELINE.dev)
    else:
        assert saved.pooler == "avg"
        assert saved.dev == MEASURED[weight].scores


@pytest.mark.parametrize(
    ("score", "outcomes", "objection"),
    [
        (61.0, [[61.0] * 20], "; the interval includes 0, so this may be chance)."),
        (65.0, [[65.0] * 9] * 2, "; fewer than 20 are too few, so this may be chance)."),
    ],
)
def test_a_doubtful_gain_keeps_the_start_if_asked_to(score, outcomes, objection, chosen, monkeypatch):
    monkeypatch.setitem(MEASURED, 2.0, Measured({"mrr": score, "guard": 80.0}, outcomes))
    saved, verdict = chosen(2)
    assert weight_of(saved) == 2
    assert verdict.endswith(f"{objection} Exported step 2.")
    saved, verdict = chosen(keep_start=True)
    assert weight_of(saved) == 0
    assert verdict.startswith("warning: Not clearly better than tiny")
    assert verdict.endswith(f"{objection} Exported tiny unchanged (eval.keep_start=False would export step 2).")


def test_the_earlier_choice_stays_where_no_new_one_can_be_made(chosen, tmp_path):
    assert weight_of(chosen(1)[0]) == 1
    assert not (tmp_path / "selected.safetensors").exists()
    chosen(keep_start=True)
    assert (tmp_path / "selected.safetensors").is_file()
    for file in (tmp_path / "checkpoints/1/params").rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="checkpoints/1"):
        chosen(keep_start=False)
    assert weight_of(read_encoder(tmp_path)) == 0


def test_no_other_checkpoint_takes_the_place_of_the_selected_one(chosen, tmp_path):
    chosen(1, 2)
    shutil.rmtree(tmp_path / "checkpoints/2")
    with pytest.raises(CheckpointError, match=r"no complete checkpoint .*/checkpoints/2\. There are: 1$"):
        read_encoder(tmp_path)


def test_interpolation_needs_the_same_parameters():
    halfway = {"eval": {"interpolate": (0.5,)}}
    kept = {"model": {"pooler": "cls", "projector": "mlp", "projector_train_only": False}}
    start = StartingCheckpoint("tiny", ENCODER, mock.MagicMock(spec=PreTrainedTokenizerFast), RecordedPooler())
    with pytest.raises(ConfigError, match=r"eval\.interpolate=\(0\.5,\) needs a starting checkpoint with all trained"):
        check_interpolation(config_of(SIMCSE, kept, halfway), start)
    check_interpolation(config_of(SIMCSE, AVG, halfway), start)
