"""Train a run, from its configuration to the selected model."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from diffcse_jax import hosts
from diffcse_jax.batch import Batch
from diffcse_jax.config import Config
from diffcse_jax.data.augmentation import open_augmentation
from diffcse_jax.data.batches import SAMPLE, Batches, BatchSource, batches_per_epoch, make_batches
from diffcse_jax.data.corpus import Corpus, Place
from diffcse_jax.data.pair_builders import stored_length
from diffcse_jax.data.sampling import Crops, Neighbours, examples_of
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.data.stored_vectors import open_vectors
from diffcse_jax.data.token_store import TokenStore, build_or_open
from diffcse_jax.data.tokenizer import load_tokenizer
from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.evaluation.dev import build_dev_evaluation
from diffcse_jax.hosts import log_line
from diffcse_jax.io import expand_path, sha256, why_unreadable
from diffcse_jax.models import hf
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.transformer import TransformerConfig
from diffcse_jax.run_folder.checkpoints import Checkpoints
from diffcse_jax.run_folder.folder import check_run, open_run
from diffcse_jax.run_folder.records import Record, read_baseline, record_start, write_baseline
from diffcse_jax.training import networks
from diffcse_jax.training.callbacks import Callback
from diffcse_jax.training.generator import own_generator
from diffcse_jax.training.loop import Evaluation, Run, loop
from diffcse_jax.training.networks import StartingCheckpoint, recorded_pooler, with_own_pooler
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.selection import check_drift_metric, check_interpolation, select
from diffcse_jax.training.sharding import by_rules, make_mesh, packing_of, resolved, shard_batch, shards_of
from diffcse_jax.training.step import Programs, initial_state, make_train_step

Examples = TokenStore | Neighbours | Crops


def train(config: Config, workdir: Path, callbacks: Sequence[Callback] = ()) -> str:
    """Train until `train.steps` or `train.epochs` is reached, from the start or from the last checkpoint in the folder.

    `eval.patience` and `eval.max_drop` may end training earlier.

    Args:
        config: The configuration.
        workdir: The run folder.
        callbacks: Called at steps, evaluations and saves.

    Returns:
        How the selected model, which the run folder now holds, compares with the starting checkpoint, as text.

    Raises:
        UserError: A configuration, checkpoint or text cannot be used, or too many losses are NaN or infinite.
        Interrupted: A signal or a callback asked to stop. Everything is saved.
    """
    # 1. Checks that take no time: the configuration, the devices, the files.
    if labelled := config.settings_that_need("labels"):
        raise ConfigError(f"{' and '.join(labelled)}: `diffcse finetune` trains labelled tasks. Run that instead.")
    mesh = make_mesh(config)
    config = resolved(config, mesh)
    corpus = open_corpus(config.data)
    hosts.decided_by_first(partial(_check_files, config))

    # 2. The models that the run reads, and whether they fit together.
    hardware = mesh.devices.flat[0].platform, mesh.shape["data"]
    encoder = hf.read(config.model.name_or_path, needs_mlm_head=config.generator_is_start).on(*hardware)
    tokenizer = load_tokenizer(encoder.folder)
    asked = config.model.pooler
    base = StartingCheckpoint(config.model.name_or_path, encoder, tokenizer, recorded_pooler(encoder, asked))
    config = with_own_pooler(config, base.recorded)
    if description := base.describe_pooler(asked, config):
        log_line(description)
    check_interpolation(config, base)
    sizes = networks.for_run(encoder.config, config)
    vocabulary = networks.vocabulary_of(config, tokenizer, encoder.config.vocab_size)
    named_generator = config.needs("generator") and not config.trains_generator_head
    generator = networks.load_generator(config, encoder, tokenizer).on(*hardware) if named_generator else None
    teachers = networks.load_teachers(config, tokenizer)
    networks.check_max_length(config, encoder.config, config.model.name_or_path)
    check_run(workdir, config)

    # 3. Text to tokens, examples and batches.
    max_length, cache_dir, quiet = stored_length(config.data), config.data.cache_dir, jax.process_index() > 0
    store = build_or_open(corpus, tokenizer, max_length, cache_dir, quiet=quiet)
    vectors = {name: open_vectors(each, corpus, store, quiet=quiet) for name, each in teachers.stores.items()}
    examples = _open_examples(config, store, sizes)
    requested, config = config, with_fitting_batch(config, len(examples), mesh)
    total_steps = config.train.steps or config.train.epochs * batches_per_epoch(len(examples), config.train.batch_size)
    source = BatchSource(
        examples,
        batch_size=config.train.batch_size,
        steps=total_steps,
        seed=config.train.seed,
        pad_token_id=encoder.config.pad_token_id,
        shards=shards_of(mesh),
        packing=packing_of(config, mesh, chunks=config.train.chunks, anchors=config.needs("anchors")),
        next_sentence=config.needs("next_sentence"),
        augmentation=open_augmentation(config.data, tokenizer),
        vectors=vectors,
    )
    evaluation = build_dev_evaluation(config, lambda: (row[0] for row in corpus), lambda: base.encoder(config))
    digests = {**teachers.digests, **_synonyms_digest(config)}
    open_run(workdir, requested, encoder, tokenizer, generator, digests)

    # 4. Networks and optimizer. A generator of the run's own is trained first.
    if config.trains_generator_head:
        text = examples if isinstance(examples, Crops) else store
        generator = own_generator(config, encoder, text, vocabulary, mesh, workdir)
    built = networks.build(config, encoder, generator, vocabulary, teachers.by_name, projector=base.head)

    # 5. The loop and the selection.
    return run_training(
        config,
        workdir,
        mesh=mesh,
        base=base,
        built=built,
        optimizer=make_optimizer(config.optim, total_steps),
        source=source,
        text=store.name,
        evaluation=evaluation,
        sentences=partial(_sentences_of_step, corpus, source, tokenizer),
        callbacks=callbacks,
    )


def run_training(
    config: Config,
    workdir: Path,
    *,
    mesh: Mesh,
    base: StartingCheckpoint,
    built: networks.Built,
    optimizer: optax.GradientTransformationExtraArgs,
    source: Batches,
    text: str,
    evaluation: Evaluation,
    sentences: Callable[[int], Sequence[Any]],
    callbacks: Sequence[Callback] = (),
    model: Callable[[Params], Any] | None = None,
) -> str:
    """Train networks on batches, from the start or from the last checkpoint, and select a model.

    Args:
        config: The configuration.
        workdir: The run folder, which exists.
        mesh: The devices.
        base: The starting checkpoint.
        built: The networks.
        optimizer: Updates the trained parameters.
        source: All batches.
        text: Identifies the text that the batches are made of.
        evaluation: The dev evaluation.
        sentences: Returns the sentences of a step's batch, as JSON values.
        callbacks: Called at steps, evaluations and saves.
        model: Makes what is evaluated from the trained parameters; from the initial ones it makes the baseline. None:
            the sentence encoder; the baseline is then the starting checkpoint as its users use it.

    Returns:
        The verdict of the selection, as `train` does.

    Raises:
        UserError: As `train`.
    """
    batches, total_steps = make_batches(source), len(source)
    state = initial_state(built.params, optimizer, config, mesh)
    frozen = jax.device_put(built.frozen, by_rules(built.frozen, mesh, config))

    with Checkpoints(workdir, config, dev_metric=evaluation.metric, dev_text=evaluation.text, text=text) as checkpoints:
        # Resume, if an earlier run in this folder saved a checkpoint.
        if checkpoints.latest_step is not None:
            state, position = checkpoints.restore(state)
            batches.set_state(position)
            log_line(f"resumed at step {int(state.step)} of {total_steps} from {workdir}")
        step = int(state.step)
        first = (lambda: base.encoder(config)) if model is None else partial(model, built.params)
        baseline = _measure_baseline(base, config, workdir, evaluation, text, first, resumed=step > 0)
        check_drift_metric(config, evaluation, baseline)
        if jax.process_index() == 0:
            record_start(workdir, config, text=text, step=step)
        # Compile the step for the shapes of the batches to come, and train.
        run = Run(config, workdir, total_steps, evaluation, checkpoints, base, baseline, sentences, callbacks, model)
        if not run.ends_at(step):
            train_step = make_train_step(built.networks, config, optimizer, mesh)
            with Programs(train_step, state, frozen, _expected_batches(source, step, mesh)) as programs:
                loop(run, lambda state, batch: programs(state, shard_batch(batch, mesh)), state, batches)
    return hosts.decided_by_first(lambda: select(workdir, config, evaluation, base, baseline).verdict)


def with_fitting_batch(config: Config, examples: int, mesh: Mesh) -> Config:
    """Return the configuration with a batch of at most as many examples as there are, and say so if it shrinks.

    The batch stays divisible by the devices of the data axis and by the chunks.

    Raises:
        DataError: There are too few examples for the smallest batch.
    """
    train, generator, devices = config.train, config.generator, mesh.shape["data"]
    if config.trains_generator_head and examples < generator.head_batch_size:
        generator = dataclasses.replace(generator, head_batch_size=max(examples // devices * devices, devices))
        config = dataclasses.replace(config, generator=generator)
    if examples >= train.batch_size:
        return config
    chunk = train.batch_size // train.chunks
    unit = chunk if train.chunks > 1 and examples >= chunk else devices
    size = examples // unit * unit
    if size < 2:
        raise DataError(
            f"{config.data.train_file} gives {examples:,} training examples, too few for a batch on {devices} "
            "devices. Give more text."
        )
    log_line(
        f"notice: the text gives {examples:,} training examples, fewer than train.batch_size={train.batch_size}. "
        f"Training with batches of {size}."
    )
    return dataclasses.replace(config, train=dataclasses.replace(train, batch_size=size))


def _check_files(config: Config) -> None:
    """Check that the files of dev pairs and synonyms can be read, before any model is loaded."""
    files = {"data.synonyms_file": config.data.synonyms_file if config.data.augmentation == "synonyms" else ""}
    if {"pairs_retrieval", "pairs_spearman"}.intersection((config.eval.metric, *config.eval.beside)):
        files["eval.pairs_file"] = config.eval.pairs_file
    for key, file in files.items():
        if file and file != "docstrings" and (reason := why_unreadable(expand_path(file))):
            raise DataError(f"{key}: {reason}")


def _measure_baseline(
    base: StartingCheckpoint,
    config: Config,
    workdir: Path,
    evaluation: Evaluation,
    text: str,
    first: Callable[[], Any],
    *,
    resumed: bool,
) -> Record:
    """Return the dev scores of the starting checkpoint: recorded when the run began, or measured now."""

    def measure() -> dict[str, Any]:
        record = read_baseline(workdir) if resumed else None
        if record is None:
            log_line(f"scoring {base.name} before training")
            scores, outcomes = evaluation.measure(first())
            pooler, metric = base.pooler(config), evaluation.metric
            record = Record(0, pooler, scores, metric, text, outcomes, dev_text=evaluation.text)
            write_baseline(workdir, record)
        return dataclasses.asdict(record)

    return Record(**hosts.decided_by_first(measure))


def _open_examples(config: Config, store: TokenStore, sizes: TransformerConfig) -> Examples:
    """Return the examples that batches are made of.

    Raises:
        ConfigError: A loss or the augmentation cannot use the text's columns.
        DataError: No document gives a pair.
    """
    with_next = config.needs("next_sentence")
    examples = examples_of(store, config.data, next_sentence=with_next)
    if isinstance(examples, Neighbours):
        units = f"{examples.columns[0]}s"
        log_line(f"skipped {examples.left_out:,} of {len(store):,} {units}: the last one of a document has no next one")
    columns = len(examples.columns) - with_next
    for loss in config.losses.values():
        loss.check_columns(columns)
    if config.data.augmentation != "none" and columns > 1:
        raise ConfigError(
            f"data.augmentation={config.data.augmentation!r} changes second views of single sentences, but the text "
            f"has {columns} columns. Use data.augmentation='none', or name one column in data.columns."
        )
    if columns == 1 and (description := networks.describe_equal_views(sizes, config)):
        log_line(f"warning: {description}")
    return examples


def _sentences_of_step(
    corpus: Corpus, source: BatchSource, tokenizer: PreTrainedTokenizerFast, step: int
) -> list[dict[str, Any]]:
    """Return the sentences of a step's batch, decoded from tokens, with their lines. It reads the text again."""
    rows = source.text_rows(step - 1).tolist()
    texts = tokenizer.batch_decode(source[step - 1].input_ids[:, 0], skip_special_tokens=True)
    places: dict[int, Place] = {}
    with contextlib.suppress(DataError):  # the text is no longer there
        wanted = set(rows)
        numbered = enumerate(itertools.islice(corpus.numbered(), max(rows) + 1))
        places = {row: place for row, (place, _) in numbered if row in wanted}
    return [{"line": places.get(row), "sentence": text} for row, text in zip(rows, texts, strict=True)]


def _synonyms_digest(config: Config) -> Mapping[str, str]:
    """Return the digest of the table of synonyms by its key, if the augmentation reads one."""
    if config.data.augmentation != "synonyms":
        return {}
    return {"data.synonyms_file": sha256([expand_path(config.data.synonyms_file)])}


def _expected_batches(source: Batches, step: int, mesh: Mesh) -> Iterator[Batch]:
    """Yield a batch of each shape among the next steps, in the order in which they are needed."""
    shapes = source.shapes_of(range(step, min(len(source), step + SAMPLE)))
    return (shard_batch(source[index], mesh) for index in shapes.values())
