"""Steps that were not applied, because their loss or gradient is no finite number: found, described, counted."""

import collections
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diffcse_jax.errors import UserError
from diffcse_jax.io import append_line, disk_errors
from diffcse_jax.losses.base import Metrics
from diffcse_jax.training.metrics import report

REMEMBERED = 100  # steps whose metrics are kept until it is known whether one of them was bad


class BadSteps:
    """Watches the metrics of all steps at the price of those that are logged.

    A row of metrics has the number of bad steps so far. Only where it has grown are the metrics of the steps since the
    last row fetched from the device, to find the step, its objective or parameter, and its sentences, which are
    written to `WORKDIR/report/bad_steps.jsonl`.

    Args:
        workdir: the run's folder.
        limit: so many are borne.
        already: so many there were when the run was resumed.
        parameters: the names of the trained parameters.
        sentences: those of the batch of a step, as JSON.
    """

    def __init__(
        self,
        workdir: Path,
        *,
        limit: int,
        already: int,
        parameters: Sequence[str],
        sentences: Callable[[int], Sequence[Any]],
    ):
        self._path, self._limit, self._known = workdir / "report" / "bad_steps.jsonl", limit, already
        self._parameters, self._sentences = sorted(parameters), sentences
        self._recent: collections.deque[tuple[int, Metrics]] = collections.deque(maxlen=REMEMBERED)

    def remember(self, step: int, metrics: Metrics) -> None:
        """Keeps the metrics of a step, on the device."""
        self._recent.append((step, metrics))

    def check(self, step: int, row: dict[str, float]) -> None:
        """Tells of the bad steps since the last row.

        Raises:
            UserError: there were too many.
        """
        number = int(row["bad_steps"])
        if number > self._known:
            seen = [(at, metrics) for at, metrics in self._recent if at <= step]
            hints = [self._described(at, metrics) for at, metrics in seen if not _finite(metrics)]
            hint = hints[-1] if hints else f"they were before step {step - REMEMBERED}"
            count = "1 step was" if number == 1 else f"{number} steps were"
            told = f"{count} not applied so far, the latest because of a number that is not finite: {hint}"
            self._known = number
            if number > self._limit:
                raise UserError(
                    f"{told}. That is more than train.max_bad_steps={self._limit}, seen with loss {row['loss']} and "
                    f"gradient norm {row['grad_norm']} at step {step}"
                )
            report(f"warning: {told}")
        while self._recent and self._recent[0][0] <= step:
            self._recent.popleft()

    def _described(self, step: int, metrics: Metrics) -> str:
        """A bad step in words, as far as it is known; its sentences are written to a file."""
        values = {name: float(value) for name, value in metrics.items()}
        names = [name for name, value in values.items() if name.startswith("loss_") and not math.isfinite(value)]
        index = int(values.get("bad_gradient", 0))
        if names:
            where = ", ".join(f"{name} is {values[name]}" for name in names)
        elif index:
            where = f"the gradient of {self._parameters[index - 1]}"
        else:
            where = f"loss {values['loss']}, gradient norm {values['grad_norm']}"
        sentences = list(self._sentences(step))
        line = json.dumps({"step": step, "where": where, "sentences": sentences}, ensure_ascii=False)
        with disk_errors(self._path, safe="The checkpoints are whole."):
            self._path.parent.mkdir(exist_ok=True)
            append_line(self._path, line)
        return f"{where} at step {step} (its sentences are in {self._path})"


def _finite(metrics: Metrics) -> bool:
    return math.isfinite(float(metrics["loss"])) and math.isfinite(float(metrics["grad_norm"]))
