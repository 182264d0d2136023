"""What is said while the train step is compiled."""

import threading
from unittest import mock

import jax.numpy as jnp
import pytest

from diffcse_jax.data.rows import Views
from diffcse_jax.storage.checkpoint import TrainState
from diffcse_jax.training.programs import Programs


@pytest.fixture
def step():
    """A step whose compilation takes as long as a test wants it to."""
    step = mock.Mock(may_end=threading.Event())

    def compiled():
        assert step.may_end.wait(20)
        return lambda state, frozen, views: (state, {})

    step.lower.return_value.compile = compiled
    return step


STATE = TrainState(jnp.int32(0), {}, {}, (), jnp.int32(0))


def views(length: int) -> Views:
    tokens = jnp.zeros((2, 2, length), jnp.int32)
    return Views(tokens, tokens, None)


def test_compiling_is_said_where_training_waits_for_it(step, capsys):
    threading.Timer(0.2, step.may_end.set).start()
    with Programs(step, STATE, {}, map(views, (8, 12, 16))) as programs:
        programs(STATE, views(8))
        line = "compiling the train step (1 of at most 3), for batches of 2 x 2 x 8 positions\n"
        assert capsys.readouterr().err == line
        programs._programs[(2, 2, 16, 0)].result()
        programs(STATE, views(16))  # compiled beside training
        assert not capsys.readouterr().err
        step.may_end.clear()
        threading.Timer(0.2, step.may_end.set).start()
        programs(STATE, views(20))
        line = "compiling the train step (4 of at most 4), for batches of 2 x 2 x 20 positions\n"
        assert capsys.readouterr().err == line
