"""Steps of several tasks: each batch is of one task, and the networks of the other tasks rest."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int

from diffcse_jax.batch import Batch
from diffcse_jax.data.batches import BatchSource
from diffcse_jax.models.layers import Params
from diffcse_jax.training.optimizer import keep_counters


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """Random access to batches of several tasks."""

    sources: Mapping[str, BatchSource]  # by task, each with as many batches as `order` asks for
    order: Int[np.ndarray, " batches"]  # the number of the source of each batch

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Batch:
        number = self.order[index]
        source = list(self.sources.values())[number]
        return source[int(np.count_nonzero(self.order[:index] == number))]


def by_ratio(ratios: Sequence[int], steps: int, seed: int) -> Int[np.ndarray, " steps"]:
    """Order the sources in blocks.

    Each block has `ratios` batches of the sources, in a random order.
    """
    block = np.repeat(np.arange(len(ratios)), ratios)
    generator = np.random.default_rng([seed, 0])
    blocks = [generator.permutation(block) for _ in range(math.ceil(steps / len(block)))]
    return np.concatenate([np.zeros(0, np.int64), *blocks])[:steps]


def resting(
    optimizer: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer with a separate state for each network.

    A network whose gradient is all 0 does not change. PyTorch does the same with parameters that a
    step does not use: their gradient is None. With a common state, the head of a rare task would
    drift at every step, moved by its old moments and by weight decay.
    """

    def init(params: Params) -> dict[str, optax.OptState]:
        return {network: optimizer.init(part) for network, part in _by_network(params).items()}

    def update(
        updates: Params,
        state: dict[str, optax.OptState],
        params: Params | None = None,
        *,
        good: jax.Array | bool = True,
    ) -> tuple[Params, dict[str, optax.OptState]]:
        assert params is not None
        weights = _by_network(params)
        new_updates = Params()
        new_state = {}
        for network, part in _by_network(updates).items():
            used = jnp.stack([jnp.any(gradient != 0) for gradient in part.values()]).any()
            scaled, after = optimizer.update(
                part, state[network], weights[network], good=used & good
            )
            new_updates |= {name: jnp.where(used, value, 0.0) for name, value in scaled.items()}
            new_state[network] = keep_counters(used, after, state[network])
        return new_updates, new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _by_network(params: Params) -> dict[str, Params]:
    """Group parameters by network, the first part of their names."""
    parts: dict[str, Params] = {}
    for name, value in params.items():
        parts.setdefault(name.partition(".")[0], Params())[name] = value
    return parts
