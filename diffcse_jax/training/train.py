"""Train a run, from its configuration to the selected model."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jax.sharding import Mesh

from diffcse_jax.config import Config
from diffcse_jax.data.batches import BatchSource
from diffcse_jax.data.pairs import stored_length
from diffcse_jax.data.sampling import Crops, examples_of, open_augmentation
from diffcse_jax.data.sources import open_corpus, open_split, shown_name
from diffcse_jax.data.token_store import Examples, TokenStore
from diffcse_jax.errors import ConfigError, DataError, counted
from diffcse_jax.evaluation.dev import build_dev_evaluation, warn_of_trained_queries
from diffcse_jax.evaluation.masked_lm import TrainingTokens
from diffcse_jax.hosts import log_line
from diffcse_jax.io import expand_path, sha256
from diffcse_jax.models.sentence_folder import for_columns
from diffcse_jax.run_folder.start import open_run
from diffcse_jax.training import networks
from diffcse_jax.training.callbacks import Callback
from diffcse_jax.training.generator import own_generator, with_fitting_head
from diffcse_jax.training.loop import Run
from diffcse_jax.training.memory import fitted_to_memory
from diffcse_jax.training.networks import StartingCheckpoint
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.queries import train_queries
from diffcse_jax.training.run import train_and_select
from diffcse_jax.training.selection import check_interpolation
from diffcse_jax.training.sharding import (
    make_mesh,
    packing_of,
    resolved,
    shards_of,
)
from diffcse_jax.training.tokens import (
    length_of,
    open_tokens,
    require_room,
    require_same_text,
    warn_of_languages,
)


def train_in_folder(config: Config, workdir: Path, callbacks: Sequence[Callback] = ()) -> str:
    """Train until `train.steps` or `train.epochs` is reached.

    Training resumes from the last checkpoint in the folder, if there is one. `eval.patience` and
    `eval.max_drop` may end it earlier.

    Returns:
        How the selected model compares with the starting checkpoint, as text.

    Raises:
        UserError: A configuration, checkpoint or text cannot be used, or too many losses are NaN or
            infinite.
        Interrupted: A signal or a callback asked to stop. Everything is saved.
    """
    if config.trains_queries:
        return train_queries(config, workdir, callbacks)
    # 1. Checks that take no time: the configuration, the devices, the files.
    _refuse_labels(config)
    mesh = make_mesh(config)
    config = resolved(config, mesh)
    split = open_split(config.data) if config.data.reads_documents else None
    corpus = open_corpus(config.data, split)

    # 2. The models that the run reads, and whether they fit together.
    config, base, vocabulary = networks.open_start(config, mesh)
    encoder, tokenizer = base.checkpoint, base.tokenizer
    check_interpolation(config, base)
    generator = networks.load_generator(config, encoder, tokenizer)
    discriminator = networks.load_discriminator(config, encoder, tokenizer)
    teachers, digests = networks.load_teachers(config, tokenizer)

    # 3. Text to tokens, examples and batches.
    prompts, base = _choose_prompts(config, base, len(corpus.columns))
    # These read files that may be missing, so they come before the text is tokenised.
    tokens = TrainingTokens(tokenizer, vocabulary, lambda: store)  # which is opened below
    evaluation = build_dev_evaluation(
        config, corpus.first_texts, lambda: base.encoder(config), split, tokens
    )
    warn_of_trained_queries(evaluation, corpus.first_texts)
    augmentation = open_augmentation(config.data, tokenizer)
    prompt_tokens = [length_of(prompt, tokenizer) for prompt in prompts]
    store = open_tokens(
        corpus, tokenizer, stored_length(config.data), config.data.cache_dir, prompts=prompts
    )
    require_same_text(store.name, shown_name(config.data.train_file))
    warn_of_languages(store, tokenizer, config.model.name_or_path, encoder.languages)
    examples = _open_examples(config, store, base, prompt_tokens)
    config = with_fitting_batch(config, len(examples), mesh)
    total_steps = config.train.steps or config.train.epochs * (
        len(examples) // config.train.batch_size
    )
    source = BatchSource(
        examples,
        batch_size=config.train.batch_size,
        steps=total_steps,
        seed=config.train.seed_of("order"),
        pad_token_id=encoder.config.pad_token_id,
        shards=shards_of(mesh),
        packing=packing_of(
            config, mesh, chunks=config.train.chunks, anchors=config.needs("anchors")
        ),
        next_sentence=config.needs("next_sentence"),
        augmentation=augmentation,
        prompt_tokens=prompt_tokens[0],
        compares_views=config.needs("embeddings"),
    )
    if discriminator:
        digests["difference.discriminator"] = discriminator.digest()
    if config.data.augmentation == "synonyms":
        digests["data.synonyms_file"] = sha256([expand_path(config.data.synonyms_file)])
    open_run(
        workdir,
        config,
        encoder,
        tokenizer,
        generator,
        others=digests,
        prompts=base.recorded.prompts,
    )

    # 4. Networks and optimizer. If the run has its own generator, its head is trained first.
    if config.trains_generator_head:
        sentences = examples if isinstance(examples, Crops) else store
        generator = own_generator(
            with_fitting_head(config, total_steps),
            encoder,
            sentences,
            vocabulary,
            mesh=mesh,
            workdir=workdir,
            text=store.name,
        )
    built = networks.build(
        config,
        encoder,
        generator,
        vocabulary,
        teachers=teachers,
        projector=base.recorded.head,
        discriminator=discriminator,
    )
    if config.keeps_mlm_head:
        base = base.with_mlm_head(built.params)
    source, chunk_size = fitted_to_memory(config, source, built, mesh=mesh, workdir=workdir)
    optimizer = make_optimizer(config.optim, total_steps)

    # 5. The loop and the selection. The model folder `WORKDIR/export` is written by `api.run`.
    def sentences_of(step: int) -> list[str]:
        return tokenizer.batch_decode(source[step - 1].input_ids[:, 0], skip_special_tokens=True)

    return train_and_select(
        Run(
            config=config,
            workdir=workdir,
            mesh=mesh,
            base=base,
            built=built,
            optimizer=optimizer,
            source=source,
            chunk_size=chunk_size,
            text=store.name,
            unknown=store.unknown,
            evaluation=evaluation,
            sentences=sentences_of,
            callbacks=callbacks,
        )
    )


def _refuse_labels(config: Config) -> None:
    if labelled := config.settings_that_need("labels"):
        raise ConfigError(
            f"{' and '.join(labelled)}: `diffcse finetune` trains labelled tasks. Run that instead."
        )


def with_fitting_batch(config: Config, examples: int, mesh: Mesh) -> Config:
    """Return the configuration with a batch of at most as many examples as there are.

    Say so if the batch shrinks. The batch stays divisible by the devices of the data axis and by
    the chunks.
    """
    train = config.train
    devices = mesh.shape["data"]
    if config.trains_generator_head and examples < config.generator.head_batch_size:
        head_size = max(examples // devices * devices, devices)
        log_line(
            f"notice: {counted(examples, 'training example{s}')}, fewer than "
            f"generator.head_batch_size={config.generator.head_batch_size}. Training the head with "
            f"batches of {head_size}."
        )
        generator = dataclasses.replace(config.generator, head_batch_size=head_size)
        config = dataclasses.replace(config, generator=generator)
    if examples >= train.batch_size:
        return config
    chunk_size = train.chunk_size
    chunk = train.batch_size // train.chunks
    unit = devices
    if train.chunks > 1 and examples >= chunk:
        unit = chunk_size = chunk  # not larger ones, which the devices may not divide
    size = examples // unit * unit
    name = shown_name(config.data.train_file)
    amount = f"{name}: {counted(examples, 'training example{s}')}"
    if size < 2:
        raise DataError(
            f"{amount}, too few for a batch on {counted(devices, 'device{s}')}. Give more text."
        )
    log_line(
        f"notice: {amount}, fewer than train.batch_size={train.batch_size}. Training with batches "
        f"of {size}."
    )
    train = dataclasses.replace(train, batch_size=size, chunk_size=chunk_size)
    return dataclasses.replace(config, train=train)


def _choose_prompts(
    config: Config, base: StartingCheckpoint, columns: int
) -> tuple[tuple[str, ...], StartingCheckpoint]:
    """Return the prompt of each column, and the starting checkpoint with the run's prompts."""
    prompts, of_run = for_columns(base.recorded.prompts, config.data.prompts, columns)
    require_room(base.tokenizer, config.data.max_length, prompts)
    if any(prompts):
        log_line(
            f"prompts: {', '.join(map(repr, prompts))}. data.prompts=none trains without them."
        )
    elif not config.data.prompts and (warning := base.recorded.prompts.warning(base.name)):
        log_line(f"warning: {warning}")
    return prompts, dataclasses.replace(base, recorded=base.recorded._replace(prompts=of_run))


def _open_examples(
    config: Config, store: TokenStore, base: StartingCheckpoint, prompt_tokens: Sequence[int]
) -> Examples:
    """Return the examples that make batches, or raise an error if the run cannot use them."""
    if not config.needs("embeddings"):  # nothing compares a text with another one
        return store
    with_next = config.needs("next_sentence")
    examples = examples_of(
        store, config.data, base.tokenizer, next_sentence=with_next, prompt_tokens=prompt_tokens
    )
    columns = len(examples.columns) - with_next
    for loss in config.losses.values():
        loss.check_columns(columns)
    if config.data.augmentation != "none" and columns > 1:
        raise ConfigError(
            f"data.augmentation={config.data.augmentation!r} changes second views of single "
            f"sentences, but the text has {columns} columns. Use data.augmentation='none', or name "
            "one column in data.columns."
        )
    sizes = networks.sizes_for_run(base.checkpoint.config, config)
    if columns == 1 and (description := networks.describe_equal_views(sizes, config)):
        log_line(f"warning: {description}")
    return examples
