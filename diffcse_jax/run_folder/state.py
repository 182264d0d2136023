"""The state of a run: what a step changes and a checkpoint keeps.

It stands apart from `checkpoints`, so that the train step does not import Orbax.
"""

from typing import NamedTuple

import jax
import optax

from diffcse_jax.models.layers import Params


class TrainState(NamedTuple):
    """The state of a run after a step.

    Randomness is a function of (seed, step) and has no state of its own.
    """

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    bad_steps: jax.Array  # number of skipped steps, whose loss or gradient was NaN or infinite
