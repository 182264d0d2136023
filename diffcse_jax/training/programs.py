"""The train step compiled for the shapes of a run's batches: the first one at once, the others beside training."""

import concurrent.futures
from collections.abc import Hashable, Iterable
from typing import Any

import jax

from diffcse_jax.batch import Batch
from diffcse_jax.losses.base import Metrics
from diffcse_jax.models.parameters import Params
from diffcse_jax.run_folder.checkpoints import TrainState
from diffcse_jax.training.metrics import report

Key = tuple[Hashable, ...]
Program = Any  # jax.stages.Compiled: (state, frozen parameters, batch) -> (state, metrics)


class Programs:
    """Compiled steps by the shape of a batch. A shape that was not foreseen is compiled when it comes.

    Args:
        step: from `make_train_step`.
        state: a state of the run; read for shapes and placement alone.
        frozen: the frozen parameters.
        batches: one batch of each foreseen shape, placed on the mesh, the first one needed first.
    """

    def __init__(self, step: Any, state: TrainState, frozen: Params, batches: Iterable[Batch]):
        self._step, self._frozen = step, frozen
        self._like = _abstract((state, frozen))
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="compiling")
        self._programs: dict[Key, concurrent.futures.Future[Program]] = {}
        for views in batches:
            self._start(views)

    def __enter__(self) -> "Programs":
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def __call__(self, state: TrainState, views: Batch) -> tuple[TrainState, Metrics]:
        """A step; waits for its program where that is not ready."""
        key = _key(views)
        if key not in self._programs:
            self._start(views)
        program = self._programs[key]
        if not program.done():
            number, count = list(self._programs).index(key) + 1, len(self._programs)
            which = f" ({number} of at most {count})" if count > 1 else ""
            report(f"compiling the train step{which}, for batches of {_described(key)}")
        return program.result()(state, self._frozen, views)

    def _start(self, views: Batch) -> None:
        arguments = (*self._like, _abstract(views))
        self._programs[_key(views)] = self._thread.submit(lambda: self._step.lower(*arguments).compile())


def _abstract(arrays: Any) -> Any:
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), arrays)


def _key(views: Batch) -> Key:
    """The task, examples, views, length, and tokens that are computed of all of these (0: no layout)."""
    slots = views.layout.positions.size if views.layout else 0
    return (", ".join(views.labels or ()), *views.input_ids.shape, slots)


def _described(key: Key) -> str:
    task, examples, views, length, slots = key
    sizes = f"{examples} x {views} x {length}" + (f" positions ({slots:,} with tokens)" if slots else " positions")
    return f"{task}, {sizes}" if task else sizes
