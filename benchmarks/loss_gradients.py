"""Compare how strongly the losses of a run pull at its encoder, step by step.

    python -m benchmarks.loss_gradients --config diffcse_base --output FILE.json \
        --config.train.steps=50 --config.data.train_file=TEXT.txt ...

The command trains as `diffcse train` does with the same configuration. Before each step, it
computes the gradient of each loss with respect to the encoder's parameters, on the step's own
batch, edits and dropout. The record has a row for each step:

    step      the number of the step
    norms     the gradient's norm by loss, without the weight of the loss
    weighted  this norm times the weight of the loss
"""

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, PRNGKeyArray

from benchmarks import measure
from diffcse_jax.batch import Batch
from diffcse_jax.config import Config, configuration, read_overrides
from diffcse_jax.errors import ConfigError, reported_to_user
from diffcse_jax.losses import Metrics
from diffcse_jax.models.forward import Networks
from diffcse_jax.models.layers import Params
from diffcse_jax.run_folder.state import TrainState
from diffcse_jax.training import train
from diffcse_jax.training.step import loss_of_step, make_train_step


def make_norms(networks: Networks, config: Config, mesh: Mesh) -> jax.stages.Wrapped:
    """Return a compiled function with the arguments of the train step.

    It returns the norm of each loss's gradient at the encoder, before clipping.
    """

    def norms(
        state: TrainState, frozen: Params, batch: Batch, root: PRNGKeyArray
    ) -> dict[str, Float[Array, ""]]:
        loss = loss_of_step(networks, config, mesh, state.step, frozen, batch=batch, root=root)

        def one(params: Params, name: str) -> Float[Array, ""]:
            return loss(params)[1][f"loss_{name}"]

        found = {}
        for name in config.losses:
            grads = jax.grad(one)(state.params, name)
            of_encoder = {key: value for key, value in grads.items() if key.startswith("encoder.")}
            found[name] = optax.tree.norm(of_encoder)
        return found

    return jax.jit(norms)


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """Measures the norms of a step, appends them to `rows`, and takes the step."""

    step: jax.stages.Wrapped
    norms: jax.stages.Wrapped
    weights: Mapping[str, float]
    rows: list[dict[str, Any]]

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """Lower the train step, which is compiled while the starting checkpoint is scored."""
        return self.step.lower(*arguments)

    def __call__(
        self, state: TrainState, frozen: Params, batch: Batch, root: PRNGKeyArray
    ) -> tuple[TrainState, Metrics]:
        """Measure, then take the step."""
        norms = {name: float(norm) for name, norm in self.norms(state, frozen, batch, root).items()}
        weighted = {name: self.weights[name] * norm for name, norm in norms.items()}
        self.rows.append({"step": int(state.step) + 1, "norms": norms, "weighted": weighted})
        return self.step(state, frozen, batch, root)


def measure_run(config: Config) -> list[dict[str, Any]]:
    """Train in a temporary folder, and return the rows."""
    rows: list[dict[str, Any]] = []
    weights = {name: loss.weight for name, loss in config.losses.items()}

    def make_measured(
        networks: Networks,
        config: Config,
        optimizer: optax.GradientTransformationExtraArgs,
        mesh: Mesh,
    ) -> MeasuredStep:
        step = make_train_step(networks, config, optimizer, mesh)
        return MeasuredStep(step, make_norms(networks, config, mesh), weights, rows)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(train, "make_train_step", make_measured),
    ):
        train.train_in_folder(config, Path(folder) / "run")
    return rows


def main() -> None:
    """Measure the run of a configuration, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="a file as those in configs/, or its name")
    parser.add_argument("--output", type=Path, help="JSON file for the record (default: print it)")
    options, rest = parser.parse_known_args()
    name, config = configuration(options.config, read_overrides(rest))
    if len(config.losses) < 2:
        raise ConfigError(
            f"{name} has one loss, {', '.join(config.losses)}. There is nothing to compare."
        )
    rows = measure_run(config)
    weighted = {
        loss: measure.spread([row["weighted"][loss] for row in rows]) for loss in config.losses
    }
    record = {"config": measure.changed_keys(config.to_dict()), "weighted": weighted}
    measure.write_record(options.output, "benchmarks.loss_gradients", sys.argv[1:], record)


if __name__ == "__main__":
    with reported_to_user():
        main()
