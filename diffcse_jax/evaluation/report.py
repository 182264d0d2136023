"""Evaluation results: the content of `results.json`, and the table for people."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffcse_jax.errors import ConfigError
from diffcse_jax.evaluation import expand_groups, own_pairs

Results = dict[str, Any]

LABEL = 26  # width of the first column


def with_aggregation(tasks: Mapping[str, Mapping[str, Any]], aggregation: str) -> dict[str, dict[str, Any]]:
    """The tasks with the coefficients of one aggregation in front, where they have subsets to aggregate."""
    return {name: {**scores, **scores.get("aggregations", {}).get(aggregation, {})} for name, scores in tasks.items()}


def missing_reason(paths: Sequence[Path]) -> str:
    """The message about a task whose files are not there."""
    return f"not found: {paths[0]}" + (f" and {len(paths) - 1} more of its files" if len(paths) > 1 else "")


def averages(tasks: Mapping[str, Mapping[str, Any]], mode: str) -> dict[str, float | None]:
    """Mean score of each group, of scores rounded to two decimals as published tables do; None unless all are there."""
    means: dict[str, float | None] = {"sts": None, "transfer": None}
    score = {"sts": "spearman", "transfer": "devacc" if mode == "dev" else "acc"}
    for group in means:
        names = expand_groups([group], mode)
        if all(name in tasks for name in names):
            means[group] = round(sum(round(tasks[name][score[group]], 2) for name in names) / len(names), 2)
    return means


def check_writable(path: Path) -> None:
    """Tries to open the file of `write`, before hours are spent on results; changes no file.

    Raises:
        ConfigError: it cannot be written.
    """
    with _naming_output(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()


def write(content: Results, path: Path) -> None:
    """Writes `results.json`, at once: a reader never sees half of it.

    Raises:
        ConfigError: the path cannot be written.
    """
    with _naming_output(path):
        partial = path.with_name(f"{path.name}.tmp")
        partial.write_text(json.dumps(rounded(content), indent=2) + "\n", encoding="utf-8")
        partial.replace(path)


def rounded(value: Any) -> Any:
    """The same structure with scores rounded to two decimals, or to four where they are smaller than 10."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return round(value, 2) if abs(value) >= 10 else round(value, 4)
    return value


def label(results: Results) -> str:
    """The model, and the width of its vectors where they are cut."""
    width = results["truncate_dim"]
    return f"{results['model']}, {width} dimensions" if width else results["model"]


def table(results: Results) -> str:
    """The scores for a reader at a terminal."""
    lines = [" | ".join(_heading(results))]
    for keys, draw_section in ((("spearman",), _sts_section), (("acc", "devacc"), _transfer_section)):
        section = {name: scores for name, scores in results["tasks"].items() if any(key in scores for key in keys)}
        lines += draw_section(section) if section else []
    lines += _probe_lines(results["tasks"]) + _own_lines(results["tasks"])
    not_official = results.get("not_official", {})
    mark = "   not of the official data" if not_official else ""
    lines += [
        f"{'average ' + group:<{LABEL}}{mean:>8.2f}{mark}"
        for group, mean in results["averages"].items()
        if mean is not None
    ]
    lines += [f"{name:<{LABEL}} not the official data: {reason}" for name, reason in not_official.items()]
    lines += [f"{name:<{LABEL}} missing: {reason}" for name, reason in results["missing"].items()]
    return "\n".join(lines)


@contextlib.contextmanager
def _naming_output(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--output: cannot write {path}: {error}") from error


def _heading(results: Results) -> list[str]:
    """The settings that the scores depend on, without defaults that go without saying."""
    heading = [label(results), f"pooler {results['pooler']}", results["mode"], results["backend"]]
    if results["similarity"] != "cosine":
        heading.append(f"{results['similarity']} similarity")
    if results["post"]:
        dimension = f" to {results['post_dimension']} dimensions" if results["post_dimension"] else ""
        heading.append(f"{results['post']}{dimension}")
    return heading


def _sts_section(tasks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = [f"{'task':<{LABEL}}{'Spearman':>8}{'Pearson':>10}{'pairs':>8}{'dev Spearman':>14}"]
    for name, scores in tasks.items():
        dev = f"{scores['dev']['spearman']:>14.2f}" if "dev" in scores else ""
        lines.append(f"{name:<{LABEL}}{scores['spearman']:>8.2f}{scores['pearson']:>10.2f}{scores['n']:>8}{dev}")
    return lines


def _transfer_section(tasks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    columns = {"acc": "accuracy", "devacc": "dev accuracy", "f1": "F1"}
    lines = [f"{'task':<{LABEL}}" + "".join(f"{title:>14}" for title in columns.values())]
    for name, scores in tasks.items():
        cells = (f"{scores[key]:>14.2f}" if key in scores else " " * 14 for key in columns)
        lines.append(f"{name:<{LABEL}}" + "".join(cells).rstrip())
    return lines


def _probe_lines(tasks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = []
    if geometry := tasks.get("geometry"):
        lines.append(f"{'alignment':<{LABEL}}{geometry['alignment']:>8.3f}   uniformity {geometry['uniformity']:.3f}")
        means = (f"{group['ratings']}: {group['mean']:.2f}" for group in geometry["similarity_by_rating"] if group["n"])
        lines.append(f"{'similarity':<{LABEL}} by rating  {'   '.join(means)}")
    if retrieval := tasks.get("retrieval"):
        recalls = "   ".join(f"@{k} {retrieval[f'recall@{k}']:.2f}" for k in (1, 5, 10))
        lines.append(f"{'recall':<{LABEL}} {recalls}   ({retrieval['n']} queries)")
        for example in retrieval["examples"]:
            lines.append(f"  {example['query']}")
            lines += [f"    {score:.2f} {text}" for text, score in example["hits"]]
    return lines


def _own_lines(tasks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The scores on files of one's own."""
    lines = []
    for name, scores in tasks.items():
        if own_pairs.own_task(name):
            numbers = "   ".join(f"{key} {value:.2f}" for key, value in scores.items() if key != "n")
            lines.append(f"{own_pairs.title(name):<{LABEL}} {numbers}   ({scores['n']} pairs)")
    return lines
