"""The content of `study.json`: the scores of a study's runs, their differences, and notes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diffcse_jax.apps.study import table
from diffcse_jax.apps.study.plan import Plan
from diffcse_jax.apps.study.run import NOT_STARTED, StudyRun
from diffcse_jax.apps.study.score import INPUTS
from diffcse_jax.config import flat, machine_keys
from diffcse_jax.export.card import portable
from diffcse_jax.io import json_digest


def summarize(plan: Plan) -> table.Summary:
    """Return the content of `study.json`.

    It has the scores of all runs that are done, and the states of the others.
    """
    groups: dict[str, list[dict[str, Any]]] = {"encoders": [], "finetunings": []}
    states: dict[str, str] = {}  # of the runs that are not done
    notes = ["n: seeds; mean ± standard deviation (of a sample) over several seeds"]
    titles: dict[tuple[str, str], str] = {}  # the columns of dev metrics by metric and text
    for row, runs in plan.rows.items():
        scores: dict[str, dict[str, float]] = {}
        training: dict[str, dict[str, float]] = {}
        for run in runs:
            results, state = run.look()
            if results is None:
                states[run.label] = state
                continue
            seed = "-" if run.seed is None else str(run.seed)
            scores[seed] = _columns(run, results, titles)
            training[seed] = results.get("training", {})
            notes += results["notes"]
        group = groups["finetunings" if runs[0].start else "encoders"]
        first: table.Seeds = next((each["scores"] for each in group if not each["is_start"]), {})
        group.append(
            {
                "row": row,
                "is_start": runs[0].seed is None,
                "n": len(scores),
                "scores": scores,
                "training": training,
                "difference": table.differences(first, scores),
                "published": plan.study.published.get(row, {}),
            }
        )
    notes += _notes(plan, states)
    return {
        "study": plan.name,
        "source": plan.study.source,
        "dev_columns": [*titles.values()],
        **groups,
        "comparisons": _comparisons(plan, [*groups["encoders"], *groups["finetunings"]]),
        "open": states,
        "notes": [*dict.fromkeys(notes)],
    }


def _comparisons(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the differences between the pairs of rows that the study names."""
    scores = {row["row"]: row["scores"] for row in rows}
    return [
        {
            "row": row,
            "against": against,
            "difference": table.differences(scores[against], scores[row]),
        }
        for against, row in plan.study.comparisons
    ]


def _notes(plan: Plan, states: Mapping[str, str]) -> Iterator[str]:
    """Yield the notes on the whole study: the source, runs that are not done, and warnings."""
    if plan.study.published:
        yield f"published: {plan.study.source}, with its own checkpoints, text and number of steps"
    for label, state in states.items():
        if state != NOT_STARTED:
            yield f"{label}: {state}"
    yield from recorded_otherwise(plan)
    yield from mixed_inputs(plan)
    for row, runs in plan.rows.items():
        waiting = [run for run in runs if states.get(run.label) == NOT_STARTED]
        seeds = [str(run.seed) for run in waiting if run.seed is not None]
        which = f", seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}" if seeds else ""
        if waiting:
            yield f"{NOT_STARTED}: {row}{which}"


def recorded_otherwise(plan: Plan) -> Iterator[str]:
    """Yield warnings of runs that a record has more than once, or with other settings."""
    for record in {id(run.record): run.record for run in plan.runs if run.record}.values():
        if repeated := ", ".join(record.repeated()):
            yield (
                f"warning: {record.path} has several lines with different scores for {repeated}. "
                "The last one counts. Remove the others"
            )
    for row, runs in plan.rows.items():
        for run in runs:
            if run.record and not run.look()[0] and (how := run.record.difference(run.key)):
                yield f"warning: {run.record.path} has {row} with other settings: {how}"
                break


def mixed_inputs(plan: Plan) -> Iterator[str]:
    """Yield what differs between runs that should share it.

    A record knows folders by their names only, so runs of two machines may have started from
    different weights. Texts are compared between runs that read and tokenise them alike.
    """
    # The labels of runs, by kind, name and settings, and then by digest.
    digests: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for run in plan.runs:
        results, _ = run.look()
        values = flat(portable(run.config))
        reading = {
            key: value
            for key, value in values.items()
            if key.startswith("data.") and key not in machine_keys()
        }
        as_tokens = json_digest([reading, values["model.name_or_path"]])
        for kind, digest in (results or {}).get("inputs", {}).items():
            is_text = kind == "text"
            name = values["data.train_file" if is_text else kind]
            group = (kind, name, as_tokens if is_text else "")
            digests.setdefault(group, {}).setdefault(digest, []).append(run.label)
    for (kind, name, _), labels in digests.items():
        if len(labels) > 1:
            parts = " | ".join(", ".join(each) for each in labels.values())
            yield f"warning: {len(labels)} different {INPUTS[kind]} are called {name}: {parts}"


def _columns(
    run: StudyRun, results: Mapping[str, Any], titles: dict[tuple[str, str], str]
) -> dict[str, float]:
    """Return the scores by column: the dev metric first, but the average of a fine-tuning last.

    Rows that measure a dev metric on different text get different columns. New columns are added to
    `titles`.
    """
    metric, dev = results["metric"], results["dev"]
    if run.start:
        return results["scores"] | {metric: dev}
    title = "STS-B dev" if metric == "stsb_spearman" else f"dev {metric}"
    is_first = all(known != metric for known, _ in titles)
    column = titles.setdefault(
        (metric, results["dev_text"]), title if is_first else f"{title}, text of {run.row}"
    )
    return {column: dev} | results["scores"]
