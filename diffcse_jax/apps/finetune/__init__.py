"""Fine-tuning on labelled tasks: rows, an encoder with a head for each task, and training.

See docs/finetuning.md.
"""

import contextlib
import csv
import dataclasses
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int, PRNGKeyArray, Shaped
from safetensors.numpy import load_file

from diffcse_jax import hosts, io
from diffcse_jax.api import export_with_curves, in_workdir
from diffcse_jax.apps.finetune.mixture import Mixture, by_ratio, resting
from diffcse_jax.batch import Vocabulary
from diffcse_jax.config import Config, flat
from diffcse_jax.data.batches import BatchSource
from diffcse_jax.data.token_store import Corpus, Row
from diffcse_jax.documents.document import digest, is_in_share
from diffcse_jax.documents.ledger import Ledger, Place
from diffcse_jax.documents.ledger import usable as usable
from diffcse_jax.documents.open import open_table
from diffcse_jax.documents.tables.layout import texts_of_row
from diffcse_jax.documents.tables.values import listed
from diffcse_jax.documents.text.lines import extension as extension
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import CheckpointError, ConfigError, DataError, NoSentencesError, counted
from diffcse_jax.evaluation import CachedEncoder, Encoder
from diffcse_jax.evaluation.dev import DevEvaluation
from diffcse_jax.evaluation.metrics import Metric, paired_interval
from diffcse_jax.evaluation.sts import correlations
from diffcse_jax.hosts import log_line
from diffcse_jax.losses.finetune import (
    AVERAGE,
    LabelledTask,
    build_head,
    features,
    head_of,
    score_name,
    task_loss,
)
from diffcse_jax.models import layers
from diffcse_jax.models.layers import Params
from diffcse_jax.run_folder.checkpoints import read_encoder, read_parameters, saved_steps
from diffcse_jax.run_folder.finding import CHECKPOINTS, find_run
from diffcse_jax.run_folder.records import Measured, Outcomes, read_baseline
from diffcse_jax.run_folder.start import HEADS, open_run
from diffcse_jax.training import networks
from diffcse_jax.training.generator import HeadTraining, check_finite, make_head_step, train_head
from diffcse_jax.training.loop import Run
from diffcse_jax.training.networks import StartingCheckpoint
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.sharding import make_mesh, packing_of, replicated, resolved, shards_of
from diffcse_jax.training.tokens import open_tokens
from diffcse_jax.training.train import train_and_select

# Rows


class LabelledRow(NamedTuple):
    """A row of a task."""

    line: int  # the first one of the row, from 1
    texts: tuple[str, ...]  # its sentence, or its two sentences
    id: str
    # The number of its class, or its value. Before the classes are known it is text, and in a test
    # row it is empty.
    label: Any


def labels_of(rows: Sequence[LabelledRow]) -> Shaped[np.ndarray, " rows"]:
    """Return the number of each row's class (int32), or its value (float32)."""
    labels = np.array([row.label for row in rows])
    return labels.astype(np.int32 if labels.dtype.kind == "i" else np.float32)


@dataclasses.dataclass(frozen=True)
class TaskData:
    """A task with known classes, and its rows."""

    name: str
    task: LabelledTask
    file: Path  # of the training rows
    train: list[LabelledRow]
    dev: list[LabelledRow]
    test: list[LabelledRow]  # without labels; empty if the task has no test_file


def read_task(name: str, task: LabelledTask, folder: Path, on_bad_line: str) -> TaskData:
    """Read and split the files of a task, which are relative to a folder."""
    key = f"finetune.tasks.{name}"
    if len(task.texts) not in (1, 2):
        raise ConfigError(
            f"{key}.texts={task.texts}: give one column for single sentences, two for pairs"
        )
    if task.is_pair and not task.features:
        raise ConfigError(
            f"{key}.features is empty. Name what the head reads, such as ('difference', 'product')"
        )
    file, dev_file, test_file = (
        folder / io.expand_path(name) for name in (task.file, task.dev_file, task.test_file)
    )
    read = partial(_read, task, key, on_bad_line)

    rows = read(file, "file")
    if task.kind == "classification":
        task = dataclasses.replace(
            task, labels=task.labels or _classes({row.label for row in rows})
        )
        if len({*task.labels}) < max(2, len(task.labels)):
            raise DataError(
                f"{file}: {key} has the classes {task.labels}. Give two or more different classes"
            )
    train = _numbered(task, key, file, rows)
    if task.dev_file:
        dev = _numbered(task, key, dev_file, read(dev_file, "dev_file"))
    else:
        sides: dict[bool, list[LabelledRow]] = {True: [], False: []}
        for row in train:
            # The order of a pair's texts does not matter.
            text = "\n".join(sorted(" ".join(text.casefold().split()) for text in row.texts))
            sides[is_in_share(digest(text), task.dev_share)].append(row)
        dev, train = sides[True], sides[False]
    if not (train and dev):
        raise DataError(
            f"{file}: {key} has no {'dev' if train else 'training'} rows. Give dev_file or "
            "dev_share"
        )
    trained = {row.label for row in train}
    if missing := [label for number, label in enumerate(task.labels) if number not in trained]:
        raise DataError(
            f"{file}: {key} has no training row of class {missing[0]!r}. Add rows of that class, "
            f"give {key} a dev_file or another dev_share, or remove the class"
        )
    test = read(test_file, "test_file") if task.test_file else []
    splits = {"training row{s}": train, "dev row{s}": dev, "row{s} to predict": test}
    sizes = ", ".join(counted(len(rows), what) for what, rows in splits.items() if rows)
    log_line(
        f"task {name}: {sizes}" + (f"; classes {', '.join(task.labels)}" if task.labels else "")
    )
    return TaskData(name, task, file, train, dev, test)


def _read(
    task: LabelledTask, key: str, on_bad_line: str, file: Path, option: str
) -> list[LabelledRow]:
    """Return the rows of a file, with their labels as text."""
    source = f"{file} ({key}.{option})"
    if problem := io.why_unreadable(file):
        raise DataError(f"{key}.{option}: {problem}. Relative paths start at finetune.data_dir")
    label = "" if option == "test_file" else task.label
    columns = [*dict.fromkeys(filter(None, (*task.texts, label, task.id)))]
    table = open_table(file, source)
    if missing := next((column for column in columns if column not in table.columns), None):
        raise DataError(f"{source}: no column {missing!r}. It has: {listed(table.columns)}")
    ledger = Ledger(source, strict=on_bad_line == "error", refuse_empty=True)
    rows = []
    for line, values in table.rows(columns, ledger):
        place = Place(source, line)
        values_as_text = texts_of_row(values, columns, place, ledger)
        if values_as_text is None:
            continue
        fields = dict(zip(columns, values_as_text, strict=True))
        texts = tuple(fields[column] for column in task.texts)
        rows.append(
            LabelledRow(
                line, texts, fields.get(task.id, str(line)), _canonical(fields.get(label, ""))
            )
        )
    if not rows:
        raise NoSentencesError(f"{source}: no usable row ({ledger.summary()})")
    if account := ledger.summary():
        log_line(f"{file}: {account}")
    return rows


def _canonical(label: str) -> str:
    """Return a whole number without decimals, `1` for `1.0`, and other labels as they are."""
    return re.sub(r"^(-?(?:0|[1-9][0-9]*))\.0*$", r"\1", label)


def _classes(labels: set[str]) -> tuple[str, ...]:
    """Return the labels in order. If all are numbers, they are ordered by value."""
    with contextlib.suppress(ValueError):
        return tuple(sorted(sorted(labels), key=float))
    return tuple(sorted(labels))


def _numbered(
    task: LabelledTask, key: str, file: Path, rows: Sequence[LabelledRow]
) -> list[LabelledRow]:
    """Return rows with the numbers of classes, or values, in place of labels as text."""
    numbers = {_canonical(label.strip()): number for number, label in enumerate(task.labels)}
    expected = f"a finite number for {key}"
    if numbers:
        expected = f"a class of {key}. Known: {', '.join(task.labels)}"
    found = []
    for row in rows:
        try:
            found.append(row._replace(label=numbers[row.label] if numbers else float(row.label)))
            if not math.isfinite(found[-1].label):
                raise ValueError(row.label)
        except (KeyError, ValueError) as error:
            raise DataError(f"{file}, line {row.line}: {row.label!r} is not {expected}") from error
    return found


# The model


@dataclasses.dataclass
class TaskModel:
    """An encoder with a head for each task."""

    encoder: Encoder
    tasks: Mapping[str, LabelledTask]  # by name; their classes are known
    heads: Mapping[str, Params]  # by task, as NumPy arrays

    @classmethod
    def from_run(cls, path: str | Path) -> "TaskModel":
        """Load the model that a fine-tuning has selected so far, or one of its checkpoints.

        Raises a `CheckpointError` if the path is neither.
        """
        path = io.expand_path(path)
        saved = read_encoder(path)
        tasks = saved.config.finetune.tasks
        if not tasks:
            raise CheckpointError(
                f"{path} is not a fine-tuning: its configuration has no finetune.tasks"
            )
        params, _ = read_parameters(path)
        heads = {name: layers.subset(params, head_of(name)) for name in tasks}
        return cls(SentenceEncoder.from_saved(saved), tasks, heads)

    def predict(
        self, name: str, texts: Sequence[str] | Sequence[tuple[str, ...]], batch_size: int = 64
    ) -> list[str] | list[float]:
        """Return the predicted class, or value, of each sentence or pair.

        Raises a `ConfigError` if there is no such task, or if a row has the wrong number of
        sentences.
        """
        if name not in self.tasks:
            raise ConfigError(f"there is no task {name!r}. Known: {', '.join(self.tasks)}")
        task = self.tasks[name]
        rows = [(text,) if isinstance(text, str) else tuple(text) for text in texts]
        if wrong := next((row for row in rows if len(row) != len(task.texts)), None):
            raise ConfigError(
                f"task {name} takes rows of {len(task.texts)}: {task.texts}; got {wrong!r}"
            )
        values = self.decide(name, rows, batch_size).tolist() if rows else []
        return [task.labels[value] for value in values] if task.labels else values

    def decide(
        self, name: str, texts: Sequence[tuple[str, ...]], batch_size: int
    ) -> Shaped[np.ndarray, " rows"]:
        """Return the predicted class numbers, or the values, of rows of one or two sentences."""
        task = self.tasks[name]
        sides = embed(self.encoder, texts, batch_size)
        outputs = np.asarray(_head_outputs(task, self.heads[name], sides))
        if task.loss == "cross_entropy":
            return outputs.argmax(axis=1)
        if task.loss == "squared_error":
            return outputs[:, 0]
        return (outputs[:, 0] > 0).astype(np.int64)


def embed(
    encoder: Any, texts: Sequence[tuple[str, ...]], batch_size: int, **options: Any
) -> Float32[np.ndarray, "sides rows hidden"]:
    """Return the embeddings of the first sentences of rows and, for pairs, of the second."""
    sentences = [text for row in texts for text in row]
    embeddings = encoder.encode(sentences, batch_size, prompt=encoder.prompts.default, **options)
    return np.moveaxis(embeddings.reshape(len(texts), -1, embeddings.shape[-1]), 1, 0)


@partial(jax.jit, static_argnames="task")
def _head_outputs(
    task: LabelledTask, head: Params, sides: Float[Array, "sides rows hidden"]
) -> Float[Array, "rows outputs"]:
    definition = layers.definition(build_head(task, sides.shape[-1]))
    with jax.default_matmul_precision("highest"):
        return layers.bind(definition, head)(features(task, tuple(sides)))


@dataclasses.dataclass(frozen=True)
class TasksMetric(Metric):
    """The average score of the tasks, which chooses the checkpoint."""

    tasks: Sequence[TaskData]

    def interval(self, before: Outcomes, after: Outcomes) -> tuple[float, float]:
        golds = [
            labels_of(data.dev).astype(float) if data.task.kind == "regression" else None
            for data in self.tasks
        ]
        return paired_interval(before, after, golds, ranked=False)

    @property
    def units(self) -> str:
        return counted(self.sample[0], "dev row{s}")

    @property
    def sample(self) -> tuple[int, str]:
        return sum(len(data.dev) for data in self.tasks), "dev rows"

    def measure(self, model: Any) -> Measured:
        """Return the scores of a `TaskModel`, and the outcome of each dev row.

        An outcome is a value, or for classes 0 (wrong) or 100 (correct).
        """
        scores = {}
        outcomes = []
        for data in self.tasks:
            name = score_name(data.name, data.task)
            labels = labels_of(data.dev)
            values = model.decide(data.name, [row.texts for row in data.dev], self.batch_size)
            if data.task.kind == "classification":
                values = 100.0 * (values == labels)
                scores[name] = float(values.mean())
            else:  # 0 if values are constant
                scores[name] = correlations(values.astype(float), labels.astype(float))["pearson"]
            outcomes.append(values.astype(float).tolist())
        return Measured(scores | {AVERAGE: sum(scores.values()) / len(scores)}, outcomes)


class TaskEvaluation(DevEvaluation):
    """The dev evaluation of a fine-tuning.

    Its models are not encoders, so it caches no embeddings.
    """

    def measure(self, model: TaskModel) -> Measured:
        return self.chosen.measure(model)


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
            with path.open("w", encoding="utf-8", newline="") as file:
                lines = zip([row.id for row in rows], texts, strict=True)
                csv.writer(file, lineterminator="\n").writerows([("id", "prediction"), *lines])
    log_line(f"wrote the heads to {workdir / 'tasks'} and the predictions to {predictions}")


# Training


def train_task_head(
    config: Config,
    data: TaskData,
    start: Params,
    frozen: SentenceEncoder,
) -> Params:
    """Train the head of a task on embeddings of the frozen encoder.

    This takes `finetune.heads_steps` steps, or else `finetune.heads_epochs` passes, at most
    `train.steps`.

    Returns:
        The head with the best dev score.
    """
    options = config.finetune
    name = data.name
    task = data.task
    rows = len(data.train)
    size = config.train.batch_size
    passes = options.heads_epochs * rows // size
    steps = options.heads_steps or min(passes, config.train.steps or passes)
    log_line(f"task {name}: embedding {counted(rows, 'row{s}')}")
    texts = [row.texts for row in data.train]
    sides = embed(frozen, texts, config.eval.batch_size, show_progress=True)
    labels = labels_of(data.train)
    seed = [config.train.seed_of("order"), zlib.crc32(name.encode())]
    generator = np.random.default_rng(seed)
    order = [generator.permutation(rows) for _ in range(steps * size // rows + 1)]

    def batches() -> Iterator[tuple[Any, ...]]:
        for index, chosen in enumerate(np.concatenate(order)[: steps * size].reshape(steps, size)):
            yield sides[:, chosen], labels[chosen], np.int32(index)

    training = _head_training(config, task, start, steps, jax.random.key(seed[0] ^ seed[1]))
    metric = TasksMetric(AVERAGE, config.eval.batch_size, [data])
    encoder = CachedEncoder(frozen)
    best = start
    best_score = -np.inf

    def keep_best(step: int, head: Params) -> None:
        nonlocal best, best_score
        if step != steps and (config.eval.every == 0 or step % config.eval.every):
            return
        score = metric.measure(TaskModel(encoder, {name: task}, {name: head})).scores[AVERAGE]
        if score > best_score:
            best = {key: np.array(array) for key, array in head.items()}
            best_score = score

    last = train_head(f"head of {name}", training, batches(), steps, keep_best)
    rate = options.heads_learning_rate
    check_finite(f"the head of {name}", last, "finetune.heads_learning_rate", rate)
    found = f"{score_name(name, task)} {best_score:.2f}"
    log_line(f"head of {name}: {counted(steps, 'step{s}')}, {found}")
    return {key: np.asarray(array) for key, array in best.items()}


def _head_training(
    config: Config,
    task: LabelledTask,
    start: Params,
    steps: int,
    key: PRNGKeyArray,
) -> HeadTraining:
    """Return the start of a head's training, and its step of embeddings, labels and an index."""
    options = config.finetune
    rate, decay = options.heads_learning_rate, options.heads_weight_decay
    own = dataclasses.replace(config.optim, learning_rate=rate, weight_decay=decay)
    optimizer = make_optimizer(own, steps)

    def loss(
        head: Params,
        sides: Float[Array, "sides rows hidden"],
        labels: Shaped[Array, " rows"],
        index: Int[Array, ""],
    ) -> Float[Array, ""]:
        definition = layers.definition(build_head(task, sides.shape[-1]))
        network = layers.bind(definition, head)
        return task_loss(task, network, tuple(sides), labels, jax.random.fold_in(key, index))

    # The default of accelerators is below float32.
    loss = jax.default_matmul_precision("highest")(loss)
    return HeadTraining(start, optimizer.init(start), make_head_step(loss, optimizer))


def _train_heads(
    config: Config,
    data: Sequence[TaskData],
    frozen: SentenceEncoder,
    params: Params,
    *,
    folder: Path,
    text: str,
) -> None:
    """Train the heads on embeddings of the frozen encoder.

    If the folder holds heads that were trained on this text, nothing is done.
    """
    weights, record = folder / "heads.safetensors", folder / "heads.json"
    remedy = f"Remove {folder} to train them again"
    if record.is_file() and io.read_sealed(record, remedy).get("text") == text:
        return
    log_line("stage 1 of 2: training the heads on embeddings of the frozen encoder")
    heads = Params()
    for each in data:
        head = layers.subset(params, head_of(each.name))
        heads |= layers.prefixed(train_task_head(config, each, head, frozen), head_of(each.name))
    with io.disk_errors(folder, safe="The encoder and the texts are unchanged."):
        folder.mkdir(parents=True, exist_ok=True)
        io.write_tensors(weights, heads)
        io.write_sealed(record, {"text": text}, [weights])  # last: the heads are complete


def _check(config: Config) -> None:
    """Refuse settings that fine-tuning does not support."""
    if "finetune" not in config.losses:
        raise ConfigError("nothing to fine-tune: give finetune.tasks, with finetune.weight above 0")
    if others := [f"{name}.weight" for name in config.losses if name != "finetune"]:
        raise ConfigError(
            f"fine-tuning trains labelled tasks only. Set {' and '.join(others)} to 0"
        )
    if config.model.projector != "none" and not config.keeps_projector:
        raise ConfigError(
            "model.projector is dropped after training, but heads read the final embeddings. Use "
            "'none'"
        )
    if config.data.augmentation != "none":
        raise ConfigError(
            "data.augmentation: fine-tuning reads labelled rows as they are. Use 'none'"
        )
    for key in ("keep_start", "interpolate", "hold", "beside", "guard", "max_drop"):
        if getattr(config.eval, key):
            raise ConfigError(
                f"eval.{key}: fine-tuning scores only the dev rows of its tasks. Leave it out"
            )


def open_start_or_run(config: Config, mesh: Mesh) -> tuple[Config, StartingCheckpoint, Vocabulary]:
    """Open the starting checkpoint, which may also be a run or one of its checkpoints.

    Returns:
        The configuration with its pooler resolved, the starting checkpoint and the tokenizer's
        vocabulary.
    """
    path = io.expand_path(config.model.name_or_path)
    if not find_run(path):
        return networks.open_start(config, mesh)
    saved = read_encoder(path)
    return networks.prepare_start(config, mesh, saved.checkpoint, saved.recorded)


def tune(config: Config, workdir: Path) -> tuple[list[TaskData], str]:
    """Train in one stage or two, and resume if stopped.

    Return the rows of the tasks, and the verdict.
    """
    # 1. The encoder to start from, and the rows.
    mesh = make_mesh(config)
    config = resolved(config, mesh)
    _check(config)
    config, start, vocabulary = open_start_or_run(config, mesh)
    folder = io.expand_path(config.finetune.data_dir)
    bad = config.data.on_bad_line
    size = config.train.batch_size
    data = [read_task(name, task, folder, bad) for name, task in config.finetune.tasks.items()]
    if few := next((each for each in data if len(each.train) < size), None):
        rows = counted(len(few.train), "training row{s}")
        raise DataError(
            f"{few.file}: task {few.name} has {rows}, fewer than train.batch_size={size}. Lower it"
        )
    classes = {f"finetune.tasks.{each.name}.labels": each.task.labels for each in data}
    config = Config.from_dict(flat(config.to_dict()) | classes)
    tasks = config.finetune.tasks
    train = config.train
    splits = [rows for each in data for rows in (each.train, each.dev)]
    text = io.json_digest([[(row.texts, row.label) for row in rows] for rows in splits])[:32]

    # 2. The batches of all tasks.
    steps = train.steps or train.epochs * (sum(len(each.train) for each in data) // size)
    order = by_ratio([task.ratio for task in tasks.values()], steps, train.seed_of("order"))
    counts = np.bincount(order, minlength=len(data)).tolist()
    sources = {
        each.name: _batches(config, each, start, mesh, count)
        for each, count in zip(data, counts, strict=True)
    }
    source = Mixture(sources, order)

    # 3. The networks. The heads may be trained first.
    open_run(
        workdir, config, start.checkpoint, start.tokenizer, None, prompts=start.recorded.prompts
    )
    built = networks.build(
        config, start.checkpoint, None, vocabulary, projector=start.recorded.head
    )
    # It resumes from the heads in a checkpoint.
    resumes = saved_steps(workdir / CHECKPOINTS) and read_baseline(workdir)
    if config.finetune.stages == "heads_first" and not resumes:
        frozen = start.encoder(config, built.params)
        of_heads = workdir / HEADS
        hosts.decided_by_first(
            lambda: _train_heads(config, data, frozen, built.params, folder=of_heads, text=text)
        )
        heads = load_file(of_heads / "heads.safetensors")
        built = built._replace(params=built.params | heads)
        log_line("stage 2 of 2: training the encoder and the heads")

    # 4. Training.
    def model_of(params: Params) -> TaskModel:  # processes that share parameters must all call this
        heads = {name: layers.subset(params, head_of(name)) for name in tasks}
        heads = jax.device_put(heads, replicated(mesh))
        return TaskModel(start.encoder(config, params), tasks, jax.tree.map(np.asarray, heads))

    def sentences_of(step: int) -> list[str]:
        return start.tokenizer.batch_decode(
            source[step - 1].rows.input_ids, skip_special_tokens=True
        )

    run = Run(
        config=config,
        workdir=workdir,
        mesh=mesh,
        base=start,
        built=built,
        optimizer=make_optimizer(config.optim, steps, around=resting),
        source=source,
        text=text,
        evaluation=TaskEvaluation(TasksMetric(AVERAGE, config.eval.batch_size, data), text),
        sentences=sentences_of,
        model_of=model_of,
    )
    return data, train_and_select(run)


def _batches(
    config: Config, data: TaskData, start: StartingCheckpoint, mesh: Mesh, steps: int
) -> BatchSource:
    """Return the batches of one task."""
    columns = data.task.texts
    prompt = start.recorded.prompts.default
    rows = [(row.line, row.texts) for row in data.train]

    def read(_: Ledger) -> Iterator[list[Row]]:
        file = str(data.file)
        yield [Row(texts, number, Place(file, line)) for number, (line, texts) in enumerate(rows)]

    corpus = Corpus(str(data.file), columns, read, partial(io.json_digest, rows))
    length = config.data.max_length
    cache = config.data.cache_dir
    prompts = [prompt] * len(columns)
    return BatchSource(
        open_tokens(corpus, start.tokenizer, length, cache, prompts=prompts),
        batch_size=config.train.batch_size,
        steps=steps,
        seed=config.train.seed_of("order"),
        pad_token_id=start.checkpoint.config.pad_token_id,
        shards=shards_of(mesh),
        packing=packing_of(config, mesh, chunks=config.train.chunks),
        labels={data.name: labels_of(data.train)},
    )


def run_finetune(config: Config, workdir: Path) -> str:
    """Fine-tune, export and predict: the work of `diffcse finetune`.

    Return the verdict of the last stage.
    """

    def finish() -> None:
        export_with_curves(workdir)
        with io.disk_errors(workdir, safe="The checkpoints are complete."):
            write_outputs(workdir, data, config.eval.batch_size)
        print(verdict)

    with in_workdir(config, workdir):
        data, verdict = tune(config, workdir)
        # The other processes wait, because their exit would end the first one.
        hosts.decided_by_first(finish)
    return verdict
