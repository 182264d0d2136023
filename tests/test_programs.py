"""What is said while the train step is compiled."""

import threading
from unittest import mock

import jax.numpy as jnp

from diffcse_jax.batch import Batch
from diffcse_jax.run_folder.checkpoints import TrainState
from diffcse_jax.training import step
from diffcse_jax.training.step import Programs

STATE = TrainState(jnp.int32(0), {}, (), jnp.int32(0))


def views(length: int) -> Batch:
    tokens = jnp.zeros((2, 2, length), jnp.int32)
    return Batch(tokens, tokens, None)


def test_compiling_is_said_where_training_waits_for_it(monkeypatch):
    """Here it lasts until that was said."""
    may_end, said = threading.Event(), []
    monkeypatch.setattr(step, "log_line", lambda message: (said.append(message), may_end.set()))

    def compiled():
        assert may_end.wait(60)
        return lambda state, frozen, views: (state, {})

    train_step = mock.Mock()
    train_step.lower.return_value.compile = compiled
    with Programs(train_step, STATE, {}, map(views, (8, 12, 16))) as run:
        run(STATE, views(8))
        assert said == ["compiling the train step (1 of at most 3) for batches of 2 x 2 x 8 tokens"]
        run._programs["", 2, 2, 16, 0].result()
        run(STATE, views(16))  # compiled beside training
        assert len(said) == 1
        may_end.clear()
        run(STATE, views(20))
        assert said[1:] == ["compiling the train step (4 of at most 4) for batches of 2 x 2 x 20 tokens"]
