"""What a fine-tuning writes besides the encoder: its heads and its predictions."""

import csv
import dataclasses
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from diffcse_jax import io
from diffcse_jax.apps.finetune.model import TaskModel
from diffcse_jax.apps.finetune.tasks import TaskData
from diffcse_jax.hosts import log_line


def write_outputs(workdir: Path, tasks: Sequence[TaskData], batch_size: int) -> None:
    """Write the heads of a run and its predictions.

    Heads go to `tasks/TASK/`, predictions to `predictions/TASK-dev.csv` and `-test.csv`.
    """
    model = TaskModel.from_run(workdir)
    predictions = workdir / "predictions"
    predictions.mkdir(exist_ok=True)
    for data in tasks:
        folder = workdir / "tasks" / data.name
        folder.mkdir(parents=True, exist_ok=True)
        io.write_tensors(folder / "head.safetensors", model.heads[data.name])
        io.write_json(
            folder / "task.json", dataclasses.asdict(data.task) | {"pooler": model.encoder.pooler}
        )
        for split, rows in {"dev": data.dev, "test": data.test}.items():
            if not rows:
                continue
            values = model.predict(data.name, [row.texts for row in rows], batch_size)
            texts = [value if isinstance(value, str) else f"{value:.6g}" for value in values]
            path = predictions / f"{data.name}-{split}.csv"
            file = StringIO()
            lines = zip([row.id for row in rows], texts, strict=True)
            csv.writer(file, lineterminator="\n").writerows([("id", "prediction"), *lines])
            io.write_text(path, file.getvalue())
    log_line(f"wrote the heads to {workdir / 'tasks'} and the predictions to {predictions}")
