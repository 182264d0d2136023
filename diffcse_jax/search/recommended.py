"""The way to search that a training run has found to be best."""

from collections.abc import Mapping
from typing import Any

from diffcse_jax.errors import CheckpointError
from diffcse_jax.hosts import log_line
from diffcse_jax.io import expand_path, read_json_object
from diffcse_jax.run_folder.finding import SEARCH, finished_export
from diffcse_jax.search.modes import MODES


def recommended(model: str | None, mode: str | None = None) -> tuple[str, float | None]:
    """Return the mode of search, and the weight of BM25, that a run recommends for its model.

    Unless a mode was asked for, also print what the run recommends.

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
    if not mode:
        log_line(f"notice: {_described(model, advice)}")
    mode = mode or best
    return mode, weight if mode == best == "hybrid" else None


def _described(model: str | None, advice: Mapping[str, Any]) -> str:
    """Return what a run recommends, and how its own model is searched."""
    instead = advice.get("instead")
    mode = f"--mode {advice['mode']}"
    if instead:
        options = " ".join(f"--{name} {value}" for name, value in instead.items() if value)
        how = f"Its own model is searched with {mode}"
        if advice["mode"] == "lexical":
            how = f"This search is by words alone ({mode}), without its own model"
        return f"the run of {model} recommends {options}. {how}"
    others = "" if advice["mode"] == "dense" else ". --mode dense compares embeddings only"
    return f"{model} recommends {mode}, which is used{others}"
