"""The scores of one run: `python -m diffcse_jax.study.score FOLDER [TASK ...]`, which a study calls after training.

Writes `evaluation.json`, and last `results.json`:
`{"asked": tasks, "pooler": ..., "metric": of dev, "dev": its score, "dev_text": what identifies the text that it is
measured on, "scores": {column: ...}, "missing": {...}}`, and `"origin": ...` where what the run gave is no checkpoint
but its start, or weights between the two.
Of a fine-tuning the metric is the average over its labelled tasks, and the scores are theirs.
"""

import sys
from pathlib import Path
from typing import Any

from diffcse_jax.config import OWN_POOLER, Config
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.errors import reported_to_user
from diffcse_jax.evaluation import results as tables
from diffcse_jax.evaluation import runner
from diffcse_jax.evaluation.dev import build_dev_evaluation
from diffcse_jax.hosts import keep_compiled
from diffcse_jax.io import disk_errors, read_json, write_json
from diffcse_jax.losses.finetune import score_name
from diffcse_jax.models import hf, pooling_modules
from diffcse_jax.run_folder.records import origin
from diffcse_jax.run_folder.saved_encoder import read_encoder
from diffcse_jax.study.runs import EVALUATION, RESULTS, RUN, SAFE
from diffcse_jax.training.start import with_own_pooler


def main() -> None:
    """The command line."""
    folder, *tasks = sys.argv[1:]
    with reported_to_user():
        keep_compiled()
        score(Path(folder), tasks)


def score(folder: Path, tasks: list[str]) -> None:
    """Scores the run in a folder and writes its results.

    Raises:
        UserError: data or a model that cannot be used.
    """
    record = read_json(folder / RUN)
    config = Config.from_dict(record["config"])
    is_start = record["seed"] is None
    model = config.model.name_or_path if is_start else record["workdir"]
    pooler = pooler_of_start(record["pooler"], config) if is_start else None
    settings = settings_of_evaluation(tasks, config, pooler)
    labelled: dict[str, float] = {}
    mixed: dict[str, str] = {}
    if pooler:
        metric, dev, text = dev_score_of(model, config, settings)
    else:
        saved = read_encoder(Path(model))
        pooler, metric, dev, text = saved.pooler, saved.dev_metric, saved.dev[saved.dev_metric], saved.dev_text
        labelled = {name: saved.dev[name] for name in names_of_scores(config) if name in saved.dev}
        mixed = {"origin": origin(saved.interpolation, saved.step)} if saved.interpolation != 1 else {}
    results: dict[str, Any] = {"asked": tasks, "pooler": pooler, "metric": metric, "dev": dev, "dev_text": text} | mixed
    evaluation: dict[str, Any] = {"tasks": {}, "averages": {}, "missing": {}}
    if tasks:
        evaluation = runner.evaluate_model(model, settings)
        with disk_errors(folder, safe=SAFE):
            tables.write_results(evaluation, folder / EVALUATION)
        print(tables.describe(evaluation))
    results |= {name: evaluation.get(name, {}) for name in ("missing", "not_official")}
    results |= {"scores": tables.scores_by_column(evaluation) | labelled}
    with disk_errors(folder, safe=SAFE):
        write_json(folder / RESULTS, results)


def names_of_scores(config: Config) -> list[str]:
    """The dev scores of labelled tasks."""
    return [score_name(name, task) for name, task in config.finetune.tasks.items()]


def settings_of_evaluation(tasks: list[str], config: Config, pooler: str | None) -> runner.Settings:
    """Those of published tables: test splits, cosine similarity, subsets of a task together."""
    return runner.Settings(
        tasks=",".join(tasks),
        data_dir=config.eval.data_dir,
        pooler=pooler,
    )


def dev_score_of(model: str, config: Config, settings: runner.Settings) -> tuple[str, float, str]:
    """The dev metric of a training, the score of a model that was not trained, and what identifies the text."""
    corpus = open_corpus(config.data)
    evaluation = build_dev_evaluation(config, lambda: (row[0] for row in corpus))
    scores = evaluation.measure(runner.load(model, settings)).scores
    return evaluation.metric, scores[evaluation.metric], evaluation.text


def pooler_of_start(pooler: str, config: Config) -> str:
    """The pooler; for `own` the one that the model records, or else that of its training."""
    if pooler != OWN_POOLER:
        return pooler
    record = pooling_modules.recorded(hf.read(config.model.name_or_path))
    return record.pooler if record else with_own_pooler(config, None).encoding_pooler


if __name__ == "__main__":
    main()
