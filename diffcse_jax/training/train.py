"""Train a run, from its configuration to the selected model."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from diffcse_jax import hosts
from diffcse_jax.config import Config
from diffcse_jax.data.augmentation import begins_word, open_augmentation
from diffcse_jax.data.batches import BatchSource, make_batches
from diffcse_jax.data.pair_builders import stored_length
from diffcse_jax.data.sampling import Crops, examples_of
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.data.token_store import Examples, TokenStore, build_or_open
from diffcse_jax.data.tokenizer import unlimited_tokenizer
from diffcse_jax.errors import ConfigError, DataError, counted
from diffcse_jax.evaluation.dev import build_dev_evaluation
from diffcse_jax.hosts import log_line
from diffcse_jax.io import expand_path, sha256
from diffcse_jax.models.prompts import for_columns
from diffcse_jax.models.transformer import TransformerConfig
from diffcse_jax.run_folder.checkpoints import Checkpoints
from diffcse_jax.run_folder.folder import open_run
from diffcse_jax.run_folder.records import Record, read_baseline, record_start, write_baseline
from diffcse_jax.training import networks
from diffcse_jax.training.callbacks import Callback
from diffcse_jax.training.generator import own_generator
from diffcse_jax.training.loop import Run, loop
from diffcse_jax.training.selection import check_drift_metric, check_interpolation, select
from diffcse_jax.training.sharding import by_rules, make_mesh, packing_of, resolved, shards_of
from diffcse_jax.training.step import initial_state, make_optimizer, make_train_step


def train(config: Config, workdir: Path, callbacks: Sequence[Callback] = ()) -> str:
    """Train until `train.steps` or `train.epochs` is reached, from the start or from the last checkpoint in the folder.

    `eval.patience` and `eval.max_drop` may end training earlier.

    Returns:
        How the selected model compares with the starting checkpoint, as text.

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

    # 2. The models that the run reads, and whether they fit together.
    config, base, vocabulary = networks.open_start(config, mesh)
    encoder, tokenizer = base.checkpoint, base.tokenizer
    check_interpolation(config, base)
    generator = networks.load_generator(config, encoder, tokenizer)
    discriminator = networks.load_discriminator(config, encoder, tokenizer)
    teachers = networks.load_teachers(config, tokenizer)

    # 3. Text to tokens, examples and batches.
    prompts, base = _choose_prompts(config, base, len(corpus.columns))
    # These read files that may be missing, so they come before the text is tokenised.
    evaluation = build_dev_evaluation(config, lambda: (row[0] for row in corpus), lambda: base.encoder(config))
    augmentation = open_augmentation(config.data, tokenizer)
    prompt_ids = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    store = build_or_open(corpus, tokenizer, stored_length(config.data), config.data.cache_dir, prompts=prompts)
    sizes = networks.sizes_for_run(encoder.config, config)
    examples = _open_examples(config, store, sizes, prompt_ids, tokenizer)
    config = with_fitting_batch(config, len(examples), mesh)
    total_steps = config.train.steps or config.train.epochs * (len(examples) // config.train.batch_size)
    source = BatchSource(
        examples,
        batch_size=config.train.batch_size,
        steps=total_steps,
        seed=config.train.seed,
        pad_token_id=encoder.config.pad_token_id,
        shards=shards_of(mesh),
        packing=packing_of(config, mesh, chunks=config.train.chunks, anchors=config.needs("anchors")),
        next_sentence=config.needs("next_sentence"),
        augmentation=augmentation,
        prompt_tokens=[len(ids) for ids in prompt_ids] * (len(examples.columns) // len(prompts)),
        pools_prompts=base.prompts.pooled,
    )
    digests = dict(teachers.digests)
    if discriminator:
        digests["difference.discriminator"] = discriminator.digest()
    if config.data.augmentation == "synonyms":
        digests["data.synonyms_file"] = sha256([expand_path(config.data.synonyms_file)])
    open_run(workdir, config, encoder, tokenizer, generator, digests, base.prompts)

    # 4. Networks and optimizer. If the run has its own generator, its head is trained first.
    if config.trains_generator_head:
        sentences = examples if isinstance(examples, Crops) else store
        generator = own_generator(config, encoder, sentences, vocabulary, mesh, workdir)
    built = networks.build(config, encoder, generator, vocabulary, teachers.by_name, base.recorded.head, discriminator)
    optimizer = make_optimizer(config.optim, total_steps)

    # 5. The loop and the selection. The model folder `WORKDIR/export` is written by `api.run`.
    def sentences_of(step: int) -> list[str]:
        return tokenizer.batch_decode(source[step - 1].input_ids[:, 0], skip_special_tokens=True)

    return run_training(
        Run(config, workdir, mesh, base, built, optimizer, source, store.name, evaluation, sentences_of, callbacks)
    )


def run_training(run: Run) -> str:
    """Train networks on batches, from the start or from the last checkpoint, and select a model. Return the verdict."""
    config, mesh, evaluation, source = run.config, run.mesh, run.evaluation, run.source
    state = initial_state(run.built.params, run.optimizer, config, mesh)
    frozen = jax.device_put(run.built.frozen, by_rules(run.built.frozen, mesh, config))
    batches = make_batches(source)
    record = Record(0, config.encoding_pooler, {}, evaluation.metric, run.text, dev_text=evaluation.text)
    with Checkpoints(run.workdir, record) as checkpoints:
        if checkpoints.latest_step is not None:
            state, position = checkpoints.restore(state)
            batches.set_state(position)
            log_line(f"resumed at step {int(state.step)} of {len(source)} from {run.workdir}")
        step = int(state.step)
        baseline = _measure_baseline(run, resumed=step > 0)
        check_drift_metric(config, evaluation, baseline)
        if jax.process_index() == 0:
            record_start(run.workdir, config, text=run.text, step=step)
        if not run.ends_at(step, baseline):
            train_step = make_train_step(run.built.networks, config, run.optimizer, mesh)
            loop(run, baseline, checkpoints, train_step, state, frozen, batches)
    return hosts.decided_by_first(lambda: select(run, baseline).verdict)


def with_fitting_batch(config: Config, examples: int, mesh: Mesh) -> Config:
    """Return the configuration with a batch of at most as many examples as there are, and say so if it shrinks.

    The batch stays divisible by the devices of the data axis and by the chunks.
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
        few = f"too few for a batch on {counted(devices, 'device{s}')}. Give more text."
        raise DataError(f"{config.data.train_file} gives {counted(examples, 'training example{s}')}, {few}")
    few = f"{counted(examples, 'training example{s}')}, fewer than train.batch_size={train.batch_size}"
    log_line(f"notice: the text gives {few}. Training with batches of {size}.")
    return dataclasses.replace(config, train=dataclasses.replace(train, batch_size=size))


def _measure_baseline(run: Run, *, resumed: bool) -> Record:
    """Return the dev scores of the starting checkpoint: recorded when the run began, or measured now."""

    def measure() -> dict[str, Any]:
        record = read_baseline(run.workdir) if resumed else None
        if record is None:
            log_line(f"scoring {run.base.name} before training")
            model = run.model_of(run.built.params) if run.model_of else run.base.encoder(run.config)
            scores, outcomes = run.evaluation.measure(model)
            pooler, metric = run.base.pooler(run.config), run.evaluation.metric
            record = Record(0, pooler, scores, metric, run.text, outcomes, dev_text=run.evaluation.text)
            write_baseline(run.workdir, record)
        return dataclasses.asdict(record)

    return Record(**hosts.decided_by_first(measure))


def _choose_prompts(
    config: Config, base: networks.StartingCheckpoint, columns: int
) -> tuple[tuple[str, ...], networks.StartingCheckpoint]:
    """Return the prompt of each column, and the starting checkpoint with the prompts that the run uses."""
    prompts, of_run = for_columns(base.prompts, config.data.prompts, columns)
    longest = max(len(base.tokenizer.encode(prompt)) for prompt in prompts)
    if longest >= config.data.max_length:
        raise ConfigError(
            f"data.max_length={config.data.max_length} leaves no room for text: the prompt has {longest} tokens with "
            "[CLS] and [SEP]. Give a larger data.max_length."
        )
    if any(prompts):
        log_line(f"prompts: {', '.join(map(repr, prompts))}. data.prompts=none trains without them.")
    elif not config.data.prompts and (warning := base.prompts.warning(base.name)):
        log_line(f"warning: {warning}")
    return prompts, dataclasses.replace(base, prompts=of_run)


def _open_examples(
    config: Config,
    store: TokenStore,
    sizes: TransformerConfig,
    prompts: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerFast,
) -> Examples:
    """Return the examples of which batches are made. Raise an error if a loss or the augmentation cannot use them."""
    with_next = config.needs("next_sentence")
    begins = begins_word(unlimited_tokenizer(tokenizer)) if config.data.cloze else None
    examples = examples_of(store, config.data, next_sentence=with_next, prompts=prompts, begins_word=begins)
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
