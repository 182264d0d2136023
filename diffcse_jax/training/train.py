"""A run: from a configuration to a trained, evaluated, checkpointed workdir."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from diffcse_jax.data.augmentation import Augmentation, open_augmentation
from diffcse_jax.data.batches import SAMPLE, Batches, BatchSource, batches_per_epoch, make_batches
from diffcse_jax.data.corpus import Corpus, Place
from diffcse_jax.data.pair_builders import stored_length
from diffcse_jax.data.sampling import Crops, Neighbours, examples_of
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.data.stored_vectors import SentenceVectors, open_vectors
from diffcse_jax.data.token_store import TokenStore, build_or_open
from diffcse_jax.data.tokenizer import load_tokenizer
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.io import expand_path, sha256
from diffcse_jax.models import hf
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.transformer import TransformerConfig
from diffcse_jax.run_folder.checkpoints import Checkpoints
from diffcse_jax.run_folder.folder import check_run, open_run
from diffcse_jax.run_folder.records import Record, read_baseline, record_start, write_baseline
from diffcse_jax.training import networks
from diffcse_jax.training.callbacks import Callback
from diffcse_jax.training.generator import own_generator
from diffcse_jax.training.loop import Run, loop
from diffcse_jax.training.metrics import report
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.programs import Programs
from diffcse_jax.training.selection import Evaluation, check_guard, check_interpolation, select
from diffcse_jax.training.sharding import by_rules, make_mesh, packing_of, resolved, shard_batch, shards_of
from diffcse_jax.training.start import Start, recorded_pooler, with_own_pooler
from diffcse_jax.training.step import initial_state, make_train_step

BuildEvaluation = Callable[[Config, Callable[[], Iterable[str]], Callable[[], SentenceEncoder]], Evaluation]


def train(config: Config, workdir: Path, build_evaluation: BuildEvaluation, callbacks: Sequence[Callback] = ()) -> str:
    """Trains until `train.steps` or `train.epochs` is reached, from the start or from the workdir's last checkpoint.

    `eval.patience` and `eval.max_drop` end it earlier.

    Args:
        config: the run.
        workdir: where it lives.
        build_evaluation: makes the dev evaluation from the configuration, a pass over the training sentences and a
            function that gives the encoder which training starts from.
        callbacks: are told of what happens.

    Returns:
        How the model that the run gives, which the workdir now holds, compares with the start, in words.

    Raises:
        UserError: a configuration, checkpoint or text that cannot be used; too many losses that are no numbers.
        Interrupted: after SIGINT, SIGTERM or a callback's request, with everything saved.
    """
    # 1. Refused before any text is read: a mesh, a model, a generator, a teacher or a workdir that cannot be used.
    if labelled := config.settings_that_need("labels"):
        raise ConfigError(
            f"{' and '.join(labelled)}: labelled tasks are trained by `diffcse finetune`; run that instead"
        )
    mesh = make_mesh(config)
    config = resolved(config, mesh)
    hardware = mesh.devices.flat[0].platform, mesh.shape["data"]
    encoder = hf.read(config.model.name_or_path, needs_mlm_head=config.generator_is_start).on(*hardware)
    tokenizer = load_tokenizer(encoder.folder)
    asked = config.model.pooler
    start = Start(config.model.name_or_path, encoder, tokenizer, recorded_pooler(encoder, asked))
    config = with_own_pooler(config, start.recorded)
    if about := start.about_pooler(asked, config):
        report(about)
    check_interpolation(config, start)
    sizes = networks.for_run(encoder.config, config)
    vocabulary = networks.vocabulary_of(config, tokenizer, encoder.config.vocab_size)
    named_generator = config.needs("generator") and not config.trains_generator_head
    generator = networks.load_generator(config, encoder, tokenizer).on(*hardware) if named_generator else None
    teachers = networks.load_teachers(config, tokenizer)
    networks.check_max_length(config, encoder.config, config.model.name_or_path)
    check_run(workdir, config)

    # 2. Text to tokens, once.
    corpus = open_corpus(config.data)
    max_length, cache_dir, quiet = stored_length(config.data), config.data.cache_dir, jax.process_index() > 0
    store = build_or_open(corpus, tokenizer, max_length, cache_dir, quiet=quiet)
    vectors = {name: open_vectors(each, corpus, store, quiet=quiet) for name, each in teachers.stores.items()}
    examples = _examples(config, store, sizes)
    augmentation = open_augmentation(config.data, tokenizer)
    total_steps = config.train.steps or config.train.epochs * batches_per_epoch(len(examples), config.train.batch_size)
    source = _batch_source(config, examples, augmentation, vectors, total_steps, encoder.config.pad_token_id, mesh)
    evaluation = build_evaluation(config, lambda: (row[0] for row in corpus), lambda: start.encoder(config))
    open_run(workdir, config, encoder, tokenizer, generator, {**teachers.digests, **_digest_of_synonyms(config)})

    # 3. The networks from their checkpoints; a generator of one's own is trained first.
    if config.trains_generator_head:
        text = examples if isinstance(examples, Crops) else store
        generator = own_generator(config, encoder, text, vocabulary, mesh, workdir)
    built = networks.build(config, encoder, generator, vocabulary, teachers.by_name, projector=start.head)
    optimizer, sentences = make_optimizer(config.optim, total_steps), partial(_sentences, corpus, source, tokenizer)
    return carry_out(
        config,
        workdir,
        mesh=mesh,
        start=start,
        built=built,
        optimizer=optimizer,
        source=source,
        text=store.name,
        evaluation=evaluation,
        sentences=sentences,
        callbacks=callbacks,
    )


def carry_out(
    config: Config,
    workdir: Path,
    *,
    mesh: Mesh,
    start: Start,
    built: networks.Built,
    optimizer: optax.GradientTransformationExtraArgs,
    source: Batches,
    text: str,
    evaluation: Evaluation,
    sentences: Callable[[int], Sequence[Any]],
    callbacks: Sequence[Callback] = (),
    model: Callable[[Params], Any] | None = None,
) -> str:
    """Trains networks on batches, from the start or from the workdir's last checkpoint, and selects a model.

    Args:
        config: the run.
        workdir: where it lives; it is begun.
        mesh: the devices.
        start: the checkpoint that the run starts from.
        built: the networks.
        optimizer: changes the trained ones.
        source: all batches.
        text: identifies what they are made of.
        evaluation: the dev evaluation.
        sentences: those of the batch of a step.
        callbacks: are told of what happens.
        model: makes of the trained parameters what is evaluated, and of the first ones the baseline; None: the encoder,
            and as baseline the start as users take it.

    Returns:
        The verdict of the selection, as `train`.

    Raises:
        UserError: as `train`.
    """
    batches, total_steps = make_batches(source), len(source)
    state = initial_state(built.params, optimizer, config, mesh)
    frozen = jax.device_put(built.frozen, by_rules(built.frozen, mesh, config))

    # 4. From where an earlier run of this workdir stopped, if there was one.
    with Checkpoints(workdir, config, dev_metric=evaluation.metric, dev_text=evaluation.text, text=text) as checkpoints:
        if checkpoints.latest_step is not None:
            state, data_state = checkpoints.restore(state)
            batches.set_state(data_state)
            report(f"resumed at step {int(state.step)} of {total_steps} from {workdir}")
        first = (lambda: start.encoder(config)) if model is None else partial(model, built.params)
        baseline = _baseline(start, config, workdir, evaluation, text, first, resumed=int(state.step) > 0)
        check_guard(config, evaluation, baseline)
        if jax.process_index() == 0:
            record_start(workdir, config, text=text, step=int(state.step))
        run = Run(config, workdir, total_steps, evaluation, checkpoints, start, baseline, sentences, callbacks, model)
        # 5. The step, compiled for the shapes of the batches to come.
        if not run.ends_at(int(state.step)):
            step = make_train_step(built.networks, config, optimizer, mesh)
            with Programs(step, state, frozen, _foreseen(source, int(state.step), mesh)) as programs:
                loop(run, lambda state, views: programs(state, shard_batch(views, mesh)), state, batches)
    # 6. The model that all this gives, chosen by the first process among what was saved.
    return hosts.decided_by_first(lambda: select(workdir, config, evaluation, start, baseline).verdict)


def _baseline(
    start: Start,
    config: Config,
    workdir: Path,
    evaluation: Evaluation,
    text: str,
    first: Callable[[], Any],
    *,
    resumed: bool,
) -> Record:
    """The start with its dev scores: those that the run began with, else those of `first` now."""

    def measured() -> dict[str, Any]:
        record = read_baseline(workdir) if resumed else None
        if record is None:
            report(f"scoring the start, {start.name}")
            scores, outcomes = evaluation.measure(first())
            record = Record(
                0, start.pooler(config), scores, evaluation.metric, text, outcomes, dev_text=evaluation.text
            )
            write_baseline(workdir, record)
        return dataclasses.asdict(record)

    return Record(**hosts.decided_by_first(measured))


def _digest_of_synonyms(config: Config) -> dict[str, str]:
    """That of the table which the augmentation reads, by its key; empty without one."""
    if config.data.augmentation != "synonyms":
        return {}
    return {"data.synonyms_file": sha256([expand_path(config.data.synonyms_file)])}


def _sentences(
    corpus: Corpus, source: BatchSource, tokenizer: PreTrainedTokenizerFast, step: int
) -> list[dict[str, Any]]:
    """The sentences of a step's batch, as far as their tokens tell them, with their lines (reads the text again)."""
    rows = source.text_rows(step - 1).tolist()
    texts = tokenizer.batch_decode(source[step - 1].input_ids[:, 0], skip_special_tokens=True)
    places: dict[int, Place] = {}
    with contextlib.suppress(DataError):  # the text is no longer there
        wanted = set(rows)
        numbered = enumerate(itertools.islice(corpus.numbered(), max(rows) + 1))
        places = {row: place for row, (place, _) in numbered if row in wanted}
    return [{"line": places.get(row), "sentence": text} for row, text in zip(rows, texts, strict=True)]


def _examples(config: Config, store: TokenStore, sizes: TransformerConfig) -> TokenStore | Neighbours | Crops:
    """The examples that batches are made of.

    Raises:
        ConfigError: columns that an objective or the augmentation has no form for.
        DataError: no pair in any document.
    """
    beside_views = config.needs("next_sentence")
    examples = examples_of(store, config.data, next_sentence=beside_views)
    if isinstance(examples, Neighbours):
        units = f"{examples.columns[0]}s"
        report(f"{examples.left_out:,} of {len(store):,} {units} are the last of a document: no next one, left out")
    columns = len(examples.columns) - beside_views
    for loss in config.losses.values():
        loss.check_columns(columns)
    if config.data.augmentation != "none" and columns > 1:
        raise ConfigError(
            f"data.augmentation={config.data.augmentation!r} makes second views of single sentences, and the text has "
            f"{columns} columns; use data.augmentation='none', or name one of them in data.columns"
        )
    if columns == 1 and (about := networks.about_equal_views(sizes, config)):
        report(f"warning: {about}")
    return examples


def _batch_source(
    config: Config,
    examples: TokenStore | Neighbours | Crops,
    augmentation: Augmentation | None,
    vectors: Mapping[str, SentenceVectors],
    steps: int,
    pad_token_id: int,
    mesh: Mesh,
) -> BatchSource:
    options = config.train
    return BatchSource(
        examples,
        batch_size=options.batch_size,
        steps=steps,
        seed=options.seed,
        pad_token_id=pad_token_id,
        shards=shards_of(mesh),
        packing=packing_of(config, mesh, chunks=options.chunks, anchors=config.needs("anchors")),
        next_sentence=config.needs("next_sentence"),
        augmentation=augmentation,
        vectors=vectors,
    )


def _foreseen(source: Batches, step: int, mesh: Mesh) -> Iterator[Batch]:
    """A batch of each shape that is to come in the next steps, the first one needed first."""
    shapes = source.shapes_of(range(step, min(len(source), step + SAMPLE)))
    return (shard_batch(source[index], mesh) for index in shapes.values())
