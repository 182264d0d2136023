"""Which checkpoints are kept, which is the best, and that nothing stays open. Whole runs are in test_resume.py."""

import math
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tiny_networks import ENCODER, SIMCSE, config_of
from transformers import PreTrainedTokenizerFast

from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.models import parameters
from diffcse_jax.storage.checkpoint import Checkpoints, TrainState, read_encoder
from diffcse_jax.storage.selection import Measured
from diffcse_jax.storage.workdir import start_workdir

CONFIG = config_of(SIMCSE, {"model": {"projector": "none", "pooler": "avg"}})
HF_CONFIG = {
    "model_type": "bert", "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "hidden_act": "gelu", "max_position_embeddings": 16, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "pad_token_id": 0,
}  # fmt: skip


def opened(workdir: Path, text: str = "text") -> Checkpoints:
    return Checkpoints(workdir, CONFIG, dev_metric="stsb", text=text)


def state_of(step: int) -> TrainState:
    params = {name: jnp.full_like(array, step) for name, array in ENCODER.transformer.items()}
    return TrainState(jnp.int32(step), parameters.prefixed(params, "encoder"), {}, {"count": jnp.int32(step)})


def saved(workdir: Path, scores: dict[int, float | None]) -> Path:
    """The workdir of a run that was started anew for every one of its checkpoints."""
    encoder = ENCODER.__class__(ENCODER.folder, HF_CONFIG, ENCODER.config, ENCODER.transformer, None, None)
    start_workdir(workdir, CONFIG, encoder, mock.Mock(spec=PreTrainedTokenizerFast), None)
    for step, score in scores.items():
        with opened(workdir) as checkpoints:
            checkpoints.save(state_of(step), {"next": step}, Measured({} if score is None else {"stsb": score}, []))
    return workdir


def kept(workdir: Path) -> set[int]:
    return {int(folder.name) for folder in (workdir / "checkpoints").iterdir()}


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ({1: 80.0, 2: 80.0, 3: 80.0, 4: 80.0}, 1),
        ({1: 79.0, 2: 80.0, 3: 80.0, 4: 79.5, 5: 80.0}, 2),
        ({1: 79.0, 2: 80.0, 3: 80.0, 4: 81.0}, 4),
        ({1: math.nan, 2: 80.0, 3: math.nan, 4: None}, 2),
        ({1: None, 2: None, 3: None}, 3),
    ],
)
def test_of_equal_scores_the_earliest_checkpoint_is_the_best(scores, best, tmp_path):
    saved(tmp_path, scores)
    assert kept(tmp_path) == {best, *sorted(scores)[-2:]}
    encoder = read_encoder(tmp_path)
    assert encoder.step == best
    assert encoder.transformer["embeddings.word.embedding"][0, 0] == best


def test_equal_scores_within_one_process(tmp_path):
    with opened(tmp_path) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(state_of(step), {}, Measured({"stsb": 80.0}, []))
    assert kept(tmp_path) == {1, 3, 4}


def test_a_checkpoint_that_is_not_eligible_is_no_best_one(tmp_path):
    with opened(tmp_path) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(state_of(step), {}, Measured({"stsb": 80.0 + step}, []), eligible=step < 3)
    assert kept(tmp_path) == {2, 3, 4}


def test_the_newest_state_is_restored(tmp_path):
    saved(tmp_path, {1: 80.0, 2: 79.0})
    with opened(tmp_path) as checkpoints:
        state, data_state = checkpoints.restore(state_of(0))
    assert data_state == {"next": 2}
    jax.tree.map(np.testing.assert_array_equal, state, state_of(2))


def test_a_checkpoint_that_is_not_there_is_named_with_those_that_are(tmp_path):
    saved(tmp_path, {1: 80.0, 2: 79.0})
    with pytest.raises(CheckpointError, match=r"no complete checkpoint .*/checkpoints/7; there are: 1, 2"):
        read_encoder(tmp_path / "checkpoints/7")


def test_checkpoints_that_cannot_be_restored_are_closed(tmp_path):
    saved(tmp_path, {1: 80.0})
    close = ocp.CheckpointManager.close
    with mock.patch.object(ocp.CheckpointManager, "close", autospec=True, side_effect=close) as closed:
        checkpoints = opened(tmp_path, text="other")
        with pytest.raises(ConfigError, match=r"the text of data\.train_file is not"), checkpoints:
            checkpoints.restore(state_of(0))
        closed.assert_called_once()
