"""The way to search that a training run has found to be best."""

from collections.abc import Mapping
from typing import Any

from diffcse_jax.errors import CheckpointError
from diffcse_jax.io import expand_path, read_json_object
from diffcse_jax.run_folder.finding import SEARCH, finished_export
from diffcse_jax.search.modes import MODES


def recommended(model: str | None, mode: str | None = None) -> tuple[str, float | None]:
    """Return the mode of search, and the weight of BM25, that a run recommends for its model.

    Args:
        model: The run's folder or its export. For other models the mode is `dense`.
        mode: The mode that was asked for, if any. Only the weight is recommended then.
    """
    folder = expand_path(model or "")
    advice: Mapping[str, Any] = {}
    if model:
        folder = finished_export(folder) or folder
    if model and (folder / SEARCH).is_file():
        advice = read_json_object(folder / SEARCH)
    if not advice:
        return mode or "dense", None
    best, weight = advice.get("mode"), advice.get("weight")
    if best not in MODES or not isinstance(weight, int | float) or not 0 <= weight <= 1:
        raise CheckpointError(
            f"{folder / SEARCH}: expected a `mode` of {', '.join(MODES)} and a `weight` from 0 to 1"
        )
    mode = mode or best
    return mode, weight if mode == best == "hybrid" else None
