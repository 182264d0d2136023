"""A run from the score of its starting checkpoint to its verdict, once everything is read."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from diffcse_jax import hosts
from diffcse_jax.data.batches import make_batches
from diffcse_jax.errors import ConfigError
from diffcse_jax.hosts import log_line
from diffcse_jax.models.layers import Params
from diffcse_jax.run_folder import records
from diffcse_jax.run_folder.checkpoints import Checkpoints
from diffcse_jax.run_folder.records import Record
from diffcse_jax.run_folder.state import TrainState
from diffcse_jax.training.loop import CompiledShapes, Run, loop
from diffcse_jax.training.optimizer import warn_of_warmup
from diffcse_jax.training.selection import select
from diffcse_jax.training.sharding import by_rules, shard_batch
from diffcse_jax.training.step import initial_state, make_train_step, root_key


def train_and_select(run: Run) -> str:
    """Train networks on batches, select a model, and return the verdict.

    Training resumes from the last checkpoint, if there is one.
    """
    config, mesh, evaluation = run.config, run.mesh, run.evaluation
    state = initial_state(run.built.params, run.optimizer, config, mesh)
    frozen = jax.device_put(run.built.frozen, by_rules(run.built.frozen, mesh, config))
    batches = make_batches(run.source)
    template = Record(
        step=0,
        pooler=config.encoding_pooler,
        dev={},
        dev_metric=evaluation.metric,
        text=run.text,
        dev_text=evaluation.text,
    )
    with Checkpoints(run.workdir, template) as checkpoints:
        state, position = checkpoints.restore(state)
        step = int(state.step)
        if step:
            batches.set_state(position)
            log_line(f"resumed at step {step} of {len(run.source)} from {run.workdir}")
        warn_of_warmup(config.optim, len(run.source))
        train_step = make_train_step(run.built.networks, run.computing, run.optimizer, mesh)
        root = root_key(config)
        with _compiled_meanwhile(run, train_step, state, frozen, root) as compiled:
            baseline = _measure_baseline(run, resumed=step > 0)
        if jax.process_index() == 0:
            records.record_start(
                run.workdir, config, text=run.text, step=step, chunk_size=run.chunk_size
            )
        if not run.ends_at(step, baseline):
            loop(
                run,
                baseline,
                checkpoints,
                train_step,
                state,
                frozen=frozen,
                root=root,
                batches=batches,
                compiled=compiled,
            )
    return hosts.decided_by_first(lambda: select(run, baseline))


@contextlib.contextmanager
def _compiled_meanwhile(
    run: Run,
    train_step: jax.stages.Wrapped,
    state: TrainState,
    frozen: Params,
    root: PRNGKeyArray,
) -> Iterator[CompiledShapes]:
    """Compile the train step in a thread during the block, which scores the starting checkpoint.

    This is for new runs on a CPU. A resumed run only reads the scores, and may turn out to have
    ended. For accelerators the compiler times its kernels, which other work would disturb.

    Args:
        run: The run.
        train_step: The train step. `jax.jit` keeps what is compiled for it.
        state: The state before the next step.
        frozen: The frozen parameters.
        root: The step's root key.

    Yields:
        The shapes of batches for which the step is compiled when the block ends.
    """
    compiled = CompiledShapes()
    resumed = int(state.step) > 0
    if resumed or jax.default_backend() != "cpu" or jax.process_count() > 1:
        yield compiled
        return
    batch = shard_batch(run.source[0], run.mesh)
    compiled.announce(batch)

    def compile_step() -> None:
        # If this fails, the first step fails in the same way, and its error is reported.
        with contextlib.suppress(Exception):
            train_step.lower(state, frozen, batch, root).compile()

    thread = threading.Thread(target=compile_step)
    thread.start()
    try:
        yield compiled
    finally:
        # Also after an error or Ctrl-C: a process that ends while XLA compiles may crash.
        thread.join()


def _measure_baseline(run: Run, *, resumed: bool) -> Record:
    """Return the dev scores of the starting checkpoint, as recorded, or measured now."""

    def measure() -> dict[str, Any]:
        record = records.read_baseline(run.workdir) if resumed else None
        if record is None:
            log_line(f"scoring {run.base.name} before training")
            model = run.model_of(run.built.params) if run.model_of else run.base.encoder(run.config)
            scores, outcomes = run.evaluation.measure(model)
            record = Record(
                step=0,
                pooler=run.base.pooler(run.config),
                dev=scores,
                dev_metric=run.evaluation.metric,
                text=run.text,
                outcomes=outcomes,
                dev_text=run.evaluation.text,
                unknown=run.unknown,
            )
            records.write_baseline(run.workdir, record)
        return dataclasses.asdict(record)

    baseline = Record(**hosts.decided_by_first(measure))
    limited = run.evaluation.drift_metric
    limit = run.config.eval.max_drop
    if limited and limit and limited not in baseline.dev:
        raise ConfigError(
            f"eval.max_drop={limit:g} limits {limited}, but this run began with other dev data: it "
            f"has {', '.join(sorted(baseline.dev))}. Restore eval.data_dir, or use a new --workdir."
        )
    return baseline
