"""The scores of one run: a study calls `python -m diffcse_jax.apps.study.score FOLDER [TASK ...]` after training.

It writes `evaluation.json` and, last, `results.json`: `{"asked": tasks, "pooler", "metric": the dev metric, "dev": its
score, "dev_text": identifies the text of the dev metric, "scores": {column: score}, "missing": {task: reason}}`, and
`"origin"` if the run selected no checkpoint but the starting checkpoint, or weights between the two. The metric of a
fine-tuning is the average over its labelled tasks, and the scores are those of the tasks.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from diffcse_jax.apps.study.plan import EVALUATION, RESULTS, read_record
from diffcse_jax.apps.study.table import SAFE
from diffcse_jax.config import OWN_POOLER, Config
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.errors import reported_to_user
from diffcse_jax.evaluation import results, runner
from diffcse_jax.evaluation.dev import build_dev_evaluation
from diffcse_jax.hosts import keep_compiled
from diffcse_jax.io import disk_errors, write_json
from diffcse_jax.losses.finetune import score_name
from diffcse_jax.models import hf, pooling_modules
from diffcse_jax.run_folder.records import origin
from diffcse_jax.run_folder.saved_encoder import read_encoder
from diffcse_jax.training.networks import with_own_pooler


def score(folder: Path, tasks: list[str]) -> None:
    """Score the run in a folder and write its results.

    Raises:
        UserError: Data or a model cannot be used.
    """
    record = read_record(folder)
    config, is_start = Config.from_dict(record["config"]), record["seed"] is None
    model = config.model.name_or_path if is_start else record["workdir"]
    settings = runner.Settings(tasks=",".join(tasks), data_dir=config.eval.data_dir)
    found: dict[str, Any] = {"asked": tasks}
    labelled: dict[str, float] = {}
    if is_start:
        settings = dataclasses.replace(settings, pooler=pooler_of_start(record["pooler"], config))
        corpus = open_corpus(config.data)
        dev = build_dev_evaluation(config, lambda: (row[0] for row in corpus))
        scores = dev.measure(runner.load(model, settings)).scores
        found |= {"pooler": settings.pooler, "metric": dev.metric, "dev": scores[dev.metric], "dev_text": dev.text}
    else:
        saved = read_encoder(Path(model))
        found |= {"pooler": saved.pooler, "metric": saved.dev_metric, "dev": saved.dev[saved.dev_metric]}
        found |= {"dev_text": saved.dev_text}
        found |= {"origin": origin(saved.interpolation, saved.step)} if saved.interpolation != 1 else {}
        names = [score_name(name, task) for name, task in config.finetune.tasks.items()]
        labelled = {name: saved.dev[name] for name in names if name in saved.dev}
    evaluation: dict[str, Any] = {"tasks": {}, "averages": {}, "missing": {}, "not_official": {}}
    if tasks:
        evaluation = runner.evaluate_model(model, settings)
        print(results.describe(evaluation))
    found |= {name: evaluation[name] for name in ("missing", "not_official")}
    with disk_errors(folder, safe=SAFE):
        if tasks:
            results.write_results(evaluation, folder / EVALUATION)
        write_json(folder / RESULTS, found | {"scores": results.scores_by_column(evaluation) | labelled})


def pooler_of_start(pooler: str, config: Config) -> str:
    """Return the pooler; for `own` the one that the starting checkpoint records, or else the one of its training."""
    if pooler != OWN_POOLER:
        return pooler
    recorded = pooling_modules.recorded(hf.read(config.model.name_or_path))
    return recorded.pooler if recorded else with_own_pooler(config, None).encoding_pooler


if __name__ == "__main__":
    with reported_to_user():
        keep_compiled()
        score(Path(sys.argv[1]), sys.argv[2:])
