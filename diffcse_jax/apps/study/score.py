"""Training a run, and its scores."""

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffcse_jax import api
from diffcse_jax.apps.finetune import run_finetune
from diffcse_jax.apps.study.run import EVALUATION, RESULTS, StudyRun
from diffcse_jax.config import OWN_POOLER
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.evaluation import EvaluationSettings, runner
from diffcse_jax.evaluation.backends import load_encoder
from diffcse_jax.evaluation.dev import build_dev_evaluation
from diffcse_jax.evaluation.results import scores_by_column
from diffcse_jax.export.card import portable
from diffcse_jax.losses.finetune import score_name
from diffcse_jax.run_folder.checkpoints import saved_steps
from diffcse_jax.run_folder.finding import CHECKPOINTS
from diffcse_jax.run_folder.records import (
    Selection,
    origin,
    read_metrics,
    read_selection,
    read_starts,
)
from diffcse_jax.training.networks import open_start
from diffcse_jax.training.queries import open_text
from diffcse_jax.training.sharding import make_mesh

# Digests in `starts.jsonl` by what they are of.
INPUTS = {
    "model.name_or_path": "starting checkpoints",
    "generator.name_or_path": "generators",
    "text": "texts",
}
LAST_STEPS = 100  # over which what training logs is averaged


def train_and_score(run: StudyRun) -> dict[str, Any]:
    """Train a run, score it and write its `evaluation.json`.

    Returns:
        What tables need: `asked` (the tasks), `config`, `metric` (the dev metric), `dev` (its
        score), `dev_text` (identifies the text of the dev metric), `scores` by column, and `notes`.
        Of a trained encoder also the steps of the `best` and the `last` checkpoint, its `curve`
        (dev score by step), `training` (`means_at_end`), and `inputs` (digests of the starting
        weights and of the text). The metric of a fine-tuning is the average over its labelled
        tasks, and the scores are those of the tasks.
    """
    if run.seed is None:
        return _score_start(run)
    # A run with results is trained, and its text may be gone. A fine-tuning writes predictions
    # after the export.
    if run.start or not (run.is_trained and (run.folder / RESULTS).is_file()):
        (run_finetune if run.start else api.run)(run.config, run.folder)
    selection = read_selection(run.folder)
    assert selection, "training ends with the selection"
    results = _results_of_training(run, selection)
    if not run.start:
        _add_training(run, selection, results)
        _score_checkpoints(run, selection, results)
    return results


def _results_of_training(run: StudyRun, selection: Selection) -> dict[str, Any]:
    """Return the results that encoders and fine-tunings share."""
    record = selection.record
    notes = []
    if run.start:
        about = f"fine-tuned from {run.start.row}; scores x 100 on dev rows of the tasks"
        notes.append(f"{run.row}: {about}")
    if selection.interpolation < 1:
        notes.append(f"{run.label}: {origin(selection.interpolation, record.step)}")
    of_tasks = itertools.starmap(score_name, run.config.finetune.tasks.items())
    return {
        "asked": run.asked,
        "config": run.config.to_dict(),
        "metric": record.dev_metric,
        "dev": record.dev[record.dev_metric],
        "dev_text": record.dev_text,
        "scores": {name: record.dev[name] for name in of_tasks},
        "notes": notes,
    }


def _add_training(run: StudyRun, selection: Selection, results: dict[str, Any]) -> None:
    """Add how training went, and what it started from."""
    logged = read_metrics(run.folder)
    column = f"dev/{results['metric']}"
    results["best"] = selection.record.step
    results["last"] = max(saved_steps(run.folder / CHECKPOINTS), default=selection.record.step)
    results["training"] = means_at_end(logged)
    results["inputs"] = digests_of_inputs(run.folder)
    results["curve"] = [[row["step"], row[column]] for row in logged if column in row]


def _score_checkpoints(run: StudyRun, selection: Selection, results: dict[str, Any]) -> None:
    """Score the selected encoder and, if the study asks for it, the last checkpoint."""
    _add_scores(run, results, str(run.folder))
    if not run.scores_last:
        return
    last = results["last"]
    if last == selection.record.step and selection.interpolation == 1:
        results["scores"] |= {f"{name} (last)": score for name, score in results["scores"].items()}
    else:
        _add_scores(run, results, str(run.folder / CHECKPOINTS / str(last)), " (last)")


def digests_of_inputs(folder: Path) -> dict[str, str]:
    """Return the digests of the weights that a run started from, and of its text."""
    first: dict[str, Any] = next(iter(read_starts(folder)), {})
    digests = first.get("digests", {})
    return {name: value for name, value in digests.items() if name in INPUTS}


def means_at_end(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means of what training logged in its last `LAST_STEPS` steps, by name."""
    logged = [row for row in rows if "loss" in row and row["step"] > rows[-1]["step"] - LAST_STEPS]
    return {
        name: statistics.fmean(values)
        for name in (logged[-1] if logged else {})
        if name != "step" and all(name in row for row in logged)
        for values in [[row[name] for row in logged]]
    }


def _score_start(run: StudyRun) -> dict[str, Any]:
    """Return the results of the starting checkpoint, as `train_and_score`."""
    model = run.config.model.name_or_path
    name = portable(run.config)["model"]["name_or_path"]  # a record may be read elsewhere
    settings = _settings(run)
    if run.pooler == OWN_POOLER:
        # The one that the checkpoint records, or else the one of its training.
        config, start, _ = open_start(run.config, make_mesh(run.config))
        applied = start.checkpoint.sentence_head.applied(start.pooler(config))
        settings = dataclasses.replace(settings, pooler=applied)
    split = open_text(run.config)[0] if run.config.trains_queries else None
    corpus = open_corpus(run.config.data, split)
    measured = build_dev_evaluation(run.config, corpus.first_texts, split=split)
    dev = measured.measure(load_encoder(model, settings)).scores
    results = {
        "asked": run.asked,
        "config": run.config.to_dict(),
        "metric": measured.metric,
        "dev": dev[measured.metric],
        "dev_text": measured.text,
        "scores": {},
        "notes": [f"{run.row}: {name} before training, pooler {settings.pooler}"],
    }
    _add_scores(run, results, model, pooler=settings.pooler)
    return results


def _settings(run: StudyRun) -> EvaluationSettings:
    return EvaluationSettings(
        tasks=",".join(run.tasks), data_dir=run.config.eval.data_dir, pooler=run.pooler
    )


def _add_scores(
    run: StudyRun,
    results: dict[str, Any],
    model: str,
    suffix: str = "",
    *,
    pooler: str | None = None,
) -> None:
    """Score a model on the tasks of a run, and add scores and notes to its results.

    Args:
        run: The run. Without a suffix, its `evaluation.json` gets the scores of test splits.
        results: The results.
        model: The run, one of its checkpoints, or the starting checkpoint.
        suffix: Added to the names of columns.
        pooler: The pooler; None for the recorded one.
    """
    settings = dataclasses.replace(_settings(run), pooler=pooler)
    dev = dataclasses.replace(settings, tasks=",".join(run.dev_tasks), mode="dev")
    for each in (settings, dev):
        if not each.tasks:
            continue
        scored = runner.evaluate_model(model, each)
        of_dev = " dev" if each is dev else ""
        if each is settings and not suffix:
            runner.write_results(scored, run.folder / EVALUATION)
        for column, score in scores_by_column(scored).items():
            results["scores"][f"{column}{of_dev}{suffix}"] = score
        for task, reason in scored["missing"].items():
            results["notes"].append(f"{task}{of_dev}: no score: {reason}")
        for task, how in scored["not_official"].items():
            results["notes"].append(f"{task}{of_dev}: not the official data: {how}")
