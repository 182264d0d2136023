"""Evaluation results: what `results.json` holds, and the table for people."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffcse_jax.evaluation import GROUPS, expand_groups

Results = dict[str, Any]


def with_aggregation(tasks: Mapping[str, Mapping[str, Any]], aggregation: str) -> dict[str, dict[str, Any]]:
    """The tasks with the coefficients of one aggregation in front, where they have subsets to aggregate."""
    return {name: {**scores, **scores.get("aggregations", {}).get(aggregation, {})} for name, scores in tasks.items()}


def missing_reason(paths: Sequence[Path]) -> str:
    """What to tell about a task whose files are not there."""
    return f"not found: {paths[0]}" + (f" and {len(paths) - 1} more of its files" if len(paths) > 1 else "")


def averages(tasks: Mapping[str, Mapping[str, Any]], mode: str) -> dict[str, float | None]:
    """Mean score of each group, of scores rounded to two decimals as published tables do; None unless all are there."""
    means: dict[str, float | None] = {"sts": None, "transfer": None}
    for group in GROUPS:
        names = expand_groups([group], mode)
        if all(name in tasks for name in names):
            means[group] = round(sum(round(tasks[name]["spearman"], 2) for name in names) / len(names), 2)
    return means


def write(results: Results, path: Path) -> None:
    """Writes `results.json`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded(results), indent=2) + "\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    """The same structure with numbers rounded to two decimals."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    return round(value, 2) if isinstance(value, float) else value


def table(results: Results) -> str:
    """The scores for a reader at a terminal."""
    lines = [f"{results['model']} | pooler {results['pooler']} | {results['mode']} | {results['backend']}"]
    lines.append(f"{'task':<16}{'Spearman':>10}{'Pearson':>10}{'pairs':>8}{'dev Spearman':>14}")
    for name, scores in results["tasks"].items():
        dev = f"{scores['dev']['spearman']:>14.2f}" if "dev" in scores else ""
        lines.append(f"{name:<16}{scores['spearman']:>10.2f}{scores['pearson']:>10.2f}{scores['n']:>8}{dev}")
    lines += [
        f"{'average ' + group:<16}{mean:>10.2f}" for group, mean in results["averages"].items() if mean is not None
    ]
    lines += [f"{name:<16}   missing: {reason}" for name, reason in results["missing"].items()]
    return "\n".join(lines)
