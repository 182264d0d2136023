"""Orbax checkpoints of a run.

A checkpoint holds separate items, so that parameters can be read alone: `params`, `opt_state`, `batch_stats`, `data`
(the iterator's state) and `record` (step, pooler, dev scores, what identifies the text).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from diffcse_jax.config import Config
from diffcse_jax.errors import ConfigError
from diffcse_jax.training.step import TrainState
from diffcse_jax.workdir import restore_items


class Checkpoints:
    """The checkpoints of a workdir: the last two and the best one are kept; saving goes on in the background."""

    def __init__(self, workdir: Path, config: Config, *, dev_metric: str, text: str):
        """Opens the checkpoints of a workdir.

        Args:
            workdir: where they are.
            config: the run's configuration.
            dev_metric: the dev score that chooses the best one.
            text: what identifies the tokenised training text.
        """
        self._pooler = config.encoding_pooler
        self._dev_metric = dev_metric
        self._text = text
        self._folder = workdir / "checkpoints"
        score = lambda metrics: metrics["score"]  # noqa: E731
        # `best_fn` alone may delete the newest step; the policy keeps both, `best_fn` makes scores survive a restart.
        self._manager = ocp.CheckpointManager(
            self._folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                best_fn=score,
                preservation_policy=AnyPreservationPolicy(
                    [LatestN(2), BestN(get_metric_fn=score, n=1, keep_checkpoints_without_metrics=False)]
                ),
                cleanup_tmp_directories=True,
            ),
        )

    @property
    def latest_step(self) -> int | None:
        """The newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, state: TrainState, data_state: Mapping[str, Any], dev: Mapping[str, float]) -> None:
        """Starts saving; returns as soon as the arrays are copied. `dev` is empty where nothing was evaluated.

        A step that is saved already is left as it is.
        """
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        record = {
            "step": step,
            "pooler": self._pooler,
            "dev": dict(dev),
            "dev_metric": self._dev_metric,
            "text": self._text,
        }
        items = {"params": state.params, "opt_state": state.opt_state, "batch_stats": {"": {}} | state.batch_stats}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                **{name: ocp.args.StandardSave(item) for name, item in items.items()},
                data=ocp.args.JsonSave(dict(data_state)),
                record=ocp.args.JsonSave(record),
            ),
            metrics={"score": dev[self._dev_metric]} if dev else None,
        )

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The newest state, placed as `like` is, and the data iterator's state.

        Raises:
            CheckpointError: a damaged checkpoint.
            ConfigError: the text or the dev metric is no longer what it was.
        """
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        step = self._manager.latest_step()
        restored = restore_items(
            self._manager,
            step,
            self._folder,
            params=ocp.args.StandardRestore(abstract.params),
            opt_state=ocp.args.StandardRestore(abstract.opt_state),
            batch_stats=ocp.args.StandardRestore({"": {}} | abstract.batch_stats),
            data=ocp.args.JsonRestore(),
            record=ocp.args.JsonRestore(),
        )
        self._check_same_run(restored.record)
        batch_stats = {name: value for name, value in restored.batch_stats.items() if name}
        step_array = jax.device_put(np.int32(step), like.step.sharding)
        return TrainState(step_array, restored.params, batch_stats, restored.opt_state), restored.data

    def _check_same_run(self, record: Mapping[str, Any]) -> None:
        if record["text"] != self._text:
            raise ConfigError(
                f"the text of data.train_file is not the one that the run in {self._folder.parent} began with (or its "
                "tokenizer has changed); restore it, or give another --workdir"
            )
        if record["dev_metric"] != self._dev_metric:
            raise ConfigError(
                f"the run in {self._folder.parent} chose its best checkpoint by {record['dev_metric']}, now it would "
                f"be {self._dev_metric}; give the same evaluation data (eval.data_dir), or another --workdir"
            )

    def wait(self) -> None:
        """Blocks until everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then releases the manager."""
        self._manager.close()
