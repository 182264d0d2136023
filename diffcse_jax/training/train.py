"""Train a run, from its configuration to the selected model."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from diffcse_jax import hosts
from diffcse_jax.config import Config
from diffcse_jax.data.batches import BatchSource, make_batches
from diffcse_jax.data.pairs import stored_length
from diffcse_jax.data.sampling import Crops, examples_of, open_augmentation
from diffcse_jax.data.sources import open_corpus, open_split
from diffcse_jax.data.tokens import Examples, TokenStore, build_or_open
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import ConfigError, DataError, UserError, counted
from diffcse_jax.evaluation import systems
from diffcse_jax.evaluation.dev import build_dev_evaluation
from diffcse_jax.evaluation.metrics import SYMMETRIC_METRICS, RetrievalMetric
from diffcse_jax.hosts import log_line
from diffcse_jax.io import CHECKPOINTS, expand_path, sha256
from diffcse_jax.models import layers
from diffcse_jax.models.heads import SENTENCE_HEAD
from diffcse_jax.models.layers import Params
from diffcse_jax.models.sentence_folder import for_columns
from diffcse_jax.run_folder import open_run, records
from diffcse_jax.run_folder.checkpoints import Checkpoints, SavedEncoder, default_step, read_encoder
from diffcse_jax.run_folder.records import FEWEST, Measured, Record, Selection
from diffcse_jax.training import networks
from diffcse_jax.training.callbacks import Callback, format_scores
from diffcse_jax.training.generator import own_generator
from diffcse_jax.training.loop import Run, loop
from diffcse_jax.training.networks import StartingCheckpoint
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.sharding import by_rules, make_mesh, packing_of, resolved, shards_of
from diffcse_jax.training.step import initial_state, make_train_step

THIS_MODEL = "this model"  # the trained one, as the name of a system


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
    if split and split.share:
        for line in split.ledger.lines():
            log_line(line)
    prompts, base = _choose_prompts(config, base, len(corpus.columns))
    # These read files that may be missing, so they come before the text is tokenised.
    evaluation = build_dev_evaluation(config, corpus.first_texts, lambda: base.encoder(config), split)
    augmentation = open_augmentation(config.data, tokenizer)
    prompt_tokens = [len(tokenizer.encode(prompt, add_special_tokens=False)) for prompt in prompts]
    store = build_or_open(corpus, tokenizer, stored_length(config.data), config.data.cache_dir, prompts=prompts)
    examples = _open_examples(config, store, base, prompt_tokens)
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
        prompt_tokens=prompt_tokens[0],
    )
    if discriminator:
        digests["difference.discriminator"] = discriminator.digest()
    if config.data.augmentation == "synonyms":
        digests["data.synonyms_file"] = sha256([expand_path(config.data.synonyms_file)])
    open_run(workdir, config, encoder, tokenizer, generator, digests, base.recorded.prompts)

    # 4. Networks and optimizer. If the run has its own generator, its head is trained first.
    if config.trains_generator_head:
        sentences = examples if isinstance(examples, Crops) else store
        generator = own_generator(config, encoder, sentences, vocabulary, mesh, workdir)
    built = networks.build(config, encoder, generator, vocabulary, teachers, base.recorded.head, discriminator)
    optimizer = make_optimizer(config.optim, total_steps)

    # 5. The loop and the selection. The model folder `WORKDIR/export` is written by `api.run`.
    def sentences_of(step: int) -> list[str]:
        return tokenizer.batch_decode(source[step - 1].input_ids[:, 0], skip_special_tokens=True)

    return run_training(
        Run(config, workdir, mesh, base, built, optimizer, source, store.name, evaluation, sentences_of, callbacks)
    )


def run_training(run: Run) -> str:
    """Train networks on batches, from the start or from the last checkpoint, and select a model. Return the verdict."""
    config, mesh, evaluation = run.config, run.mesh, run.evaluation
    state = initial_state(run.built.params, run.optimizer, config, mesh)
    frozen = jax.device_put(run.built.frozen, by_rules(run.built.frozen, mesh, config))
    batches = make_batches(run.source)
    record = Record(0, config.encoding_pooler, {}, evaluation.metric, run.text, dev_text=evaluation.text)
    with Checkpoints(run.workdir, record) as checkpoints:
        state, position = checkpoints.restore(state)
        step = int(state.step)
        if step:
            batches.set_state(position)
            log_line(f"resumed at step {step} of {len(run.source)} from {run.workdir}")
        baseline = _measure_baseline(run, resumed=step > 0)
        if jax.process_index() == 0:
            records.record_start(run.workdir, config, text=run.text, step=step)
        if not run.ends_at(step, baseline):
            train_step = make_train_step(run.built.networks, config, run.optimizer, mesh)
            loop(run, baseline, checkpoints, train_step, state, frozen, batches)
    return hosts.decided_by_first(lambda: select(run, baseline))


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
    chunk_size, chunk = train.chunk_size, train.batch_size // train.chunks
    unit = devices
    if train.chunks > 1 and examples >= chunk:
        unit = chunk_size = chunk  # not larger ones, which the devices may not divide
    size = examples // unit * unit
    given = f"{config.data.train_file} gives {counted(examples, 'training example{s}')}"
    if size < 2:
        raise DataError(f"{given}, too few for a batch on {counted(devices, 'device{s}')}. Give more text.")
    log_line(f"notice: {given}, fewer than train.batch_size={train.batch_size}. Training with batches of {size}.")
    return dataclasses.replace(config, train=dataclasses.replace(train, batch_size=size, chunk_size=chunk_size))


def _measure_baseline(run: Run, *, resumed: bool) -> Record:
    """Return the dev scores of the starting checkpoint: recorded when the run began, or measured now."""

    def measure() -> dict[str, Any]:
        record = records.read_baseline(run.workdir) if resumed else None
        if record is None:
            log_line(f"scoring {run.base.name} before training")
            model = run.model_of(run.built.params) if run.model_of else run.base.encoder(run.config)
            scores, outcomes = run.evaluation.measure(model)
            pooler, metric = run.base.pooler(run.config), run.evaluation.metric
            record = Record(0, pooler, scores, metric, run.text, outcomes, dev_text=run.evaluation.text)
            records.write_baseline(run.workdir, record)
        return dataclasses.asdict(record)

    baseline = Record(**hosts.decided_by_first(measure))
    limited, limit = run.evaluation.drift_metric, run.config.eval.max_drop
    if limited and limit and limited not in baseline.dev:
        raise ConfigError(
            f"eval.max_drop={limit:g} limits {limited}, but this run began with other dev data: it has "
            f"{', '.join(sorted(baseline.dev))}. Restore eval.data_dir, or use a new --workdir."
        )
    return baseline


def _choose_prompts(
    config: Config, base: StartingCheckpoint, columns: int
) -> tuple[tuple[str, ...], StartingCheckpoint]:
    """Return the prompt of each column, and the starting checkpoint with the prompts that the run uses."""
    prompts, of_run = for_columns(base.recorded.prompts, config.data.prompts, columns)
    longest = max(len(base.tokenizer.encode(prompt)) for prompt in prompts)
    if longest >= config.data.max_length:
        raise ConfigError(
            f"data.max_length={config.data.max_length} leaves no room for text: the prompt has {longest} tokens with "
            "[CLS] and [SEP]. Give a larger data.max_length."
        )
    if any(prompts):
        log_line(f"prompts: {', '.join(map(repr, prompts))}. data.prompts=none trains without them.")
    elif not config.data.prompts and (warning := base.recorded.prompts.warning(base.name)):
        log_line(f"warning: {warning}")
    return prompts, dataclasses.replace(base, recorded=base.recorded._replace(prompts=of_run))


def _open_examples(
    config: Config, store: TokenStore, base: StartingCheckpoint, prompt_tokens: Sequence[int]
) -> Examples:
    """Return the examples of which batches are made. Raise an error if a loss or the augmentation cannot use them."""
    with_next = config.needs("next_sentence")
    examples = examples_of(store, config.data, base.tokenizer, next_sentence=with_next, prompt_tokens=prompt_tokens)
    columns = len(examples.columns) - with_next
    for loss in config.losses.values():
        loss.check_columns(columns)
    if config.data.augmentation != "none" and columns > 1:
        raise ConfigError(
            f"data.augmentation={config.data.augmentation!r} changes second views of single sentences, but the text "
            f"has {columns} columns. Use data.augmentation='none', or name one column in data.columns."
        )
    sizes = networks.sizes_for_run(base.checkpoint.config, config)
    if columns == 1 and (description := networks.describe_equal_views(sizes, config)):
        log_line(f"warning: {description}")
    return examples


# Selection: the best checkpoint, the starting checkpoint, or weights between them


def check_interpolation(config: Config, base: StartingCheckpoint) -> None:
    """Check that `eval.interpolate` is possible: the starting checkpoint has all parameters of the trained encoder."""
    if config.eval.interpolate and config.keeps_projector and base.recorded.head is None:
        raise ConfigError(
            f"eval.interpolate={config.eval.interpolate} needs a starting checkpoint with all trained weights, but "
            f"{base.name} has no projector, and model.projector_train_only=False keeps one. Set eval.interpolate=()."
        )


class Candidate(NamedTuple):
    """A model that a run may export."""

    weight: float  # the share of the trained weights; the rest is the starting checkpoint's
    measured: Measured
    keeps_quality: bool  # as `eval.max_drop` limits
    lost: Sequence[str] = ()  # metrics of `eval.hold` that dropped


def select(run: Run, baseline: Record) -> str:
    """Choose the model of a run and store the choice, once all checkpoints are written. Return the verdict.

    The candidate is the best checkpoint or, with `eval.interpolate`, a mixture of the start and that checkpoint. With
    `eval.keep_start`, the starting checkpoint is chosen if that is not better, may be by chance, or breaks a limit.
    """
    options, evaluation, base = run.config.eval, run.evaluation, run.base
    checkpoints = run.workdir / CHECKPOINTS
    best = read_encoder(checkpoints / str(default_step(checkpoints)))  # ignores an earlier selection

    def encoder(weight: float) -> SentenceEncoder:
        return SentenceEncoder.from_saved(interpolate(base, best, weight))

    candidate = _best_candidate(run, baseline, best, encoder)
    scores, outcomes = candidate.measured
    before, after = baseline.dev[evaluation.metric], scores[evaluation.metric]
    low, high = evaluation.chosen.interval(baseline.outcomes, outcomes)
    is_higher = after > before
    doubt = "the interval includes 0" if is_higher and low <= 0 else ""
    if not doubt and is_higher and sum(map(len, outcomes)) < FEWEST:
        doubt = f"fewer than {FEWEST} are too few"
    objections = []
    if not candidate.keeps_quality:
        limit = f"eval.max_drop={options.max_drop:g} of {baseline.dev[evaluation.drift_metric]:.2f}"
        objections.append(f"No model keeps {evaluation.drift_metric} within {limit}.")
    if candidate.lost:
        objections.append(f"But other queries got worse: {', '.join(candidate.lost)} (eval.hold).")
    keeps_start = options.keep_start and bool(not is_higher or objections or doubt)

    better = "Not better"
    if is_higher:
        better = "Not clearly better" if keeps_start else "Better"
    gain = f"{after - before:+.2f}, 95% interval {low:+.2f} to {high:+.2f} over {evaluation.chosen.units}"
    gain += f"; {doubt}, so this may be chance" if doubt else ""
    trained, gains = records.origin(candidate.weight, best.step), is_higher and candidate.keeps_quality
    if keeps_start:
        exported = f"{base.name} unchanged" + (f" (eval.keep_start=False would export {trained})" if gains else "")
    else:
        exported = trained if gains else f"{trained} anyway"
    result = f"{better} than {base.name}: {evaluation.metric} {after:.2f}, was {before:.2f} ({gain})."
    compared = _compare_systems(run, lambda: encoder(candidate.weight))
    advice = [systems.describe_recommendation(compared, systems.recommend(compared))] if compared else []
    verdict = " ".join([result, *objections, f"Exported {exported}.", *advice])
    if not is_higher or keeps_start or objections:
        verdict = f"warning: {verdict}"

    if keeps_start:
        weight, record = 0.0, dataclasses.replace(baseline, outcomes=[])
        model = dataclasses.replace(base.checkpoint, pooler=base.pooler_head)
    else:
        weight, model = candidate.weight, interpolate(base, best, candidate.weight).checkpoint
        record = Record(best.step, best.pooler, scores, evaluation.metric, baseline.text, dev_text=evaluation.text)
    of_exported = [system for system in compared if system.encoder == (base.name if keeps_start else THIS_MODEL)]
    how = systems.recommend(of_exported) if of_exported else None
    search = {"mode": how.mode, "weight": how.weight} if how else {}
    selection = Selection(record, weight, verdict, [system.summary() for system in compared], search)
    weights = layers.prefixed(model.transformer, "encoder")
    if record.pooler == "cls":
        weights |= layers.prefixed(model.pooler or {}, "projector")
    weights |= layers.prefixed(model.sentence_head.of(record.pooler).params, SENTENCE_HEAD)
    records.write_selection(run.workdir, selection, weights)
    return verdict


def _best_candidate(
    run: Run, baseline: Record, best: SavedEncoder, encoder: Callable[[float], SentenceEncoder]
) -> Candidate:
    """Return the best model of a run; `encoder` makes the one with a share of the trained weights.

    Of the models that keep `eval.max_drop`, if there are any, it is the best one that beats the start and loses nothing
    in `eval.hold`; else the best one. Of equal models, the one nearest to the start is returned.
    """
    options, evaluation, metric = run.config.eval, run.evaluation, run.evaluation.metric
    candidates = []
    for weight in options.interpolate or (1.0,):
        if weight == 1 and best.outcomes:
            measured = Measured(best.dev, best.outcomes)
        else:
            measured = evaluation.measure(encoder(weight))
            log_line(f"{records.origin(weight, best.step)}: {format_scores(measured.scores)}")
        candidates.append(Candidate(weight, measured, run.keeps_quality(baseline.dev, measured.scores)))
    candidates = [each for each in candidates if each.keeps_quality] or candidates
    candidates.sort(key=lambda each: (-each.measured.scores[metric], each.weight))
    higher = [each for each in candidates if each.measured.scores[metric] > baseline.dev[metric]]
    if higher and options.hold:
        log_line(f"Checking that general quality ({', '.join(options.hold)}) did not drop.")
        held = evaluation.held(run.base.encoder(run.config))
        for index, each in enumerate(higher):
            lost = evaluation.regressions(held, evaluation.held(encoder(each.weight)))
            if not lost:
                return each
            higher[index] = each._replace(lost=lost)
    return (higher or candidates)[0]


def _compare_systems(run: Run, trained: Callable[[], SentenceEncoder]) -> list[systems.System]:
    """Compare BM25, the starting checkpoint and the trained model on the queries of the dev metric, if it has any."""
    metric = run.evaluation.chosen
    if not isinstance(metric, RetrievalMetric) or metric.name in SYMMETRIC_METRICS or len(metric.queries) < FEWEST:
        return []
    encoders = {run.base.name: run.base.encoder(run.config), THIS_MODEL: trained()}
    try:
        compared = systems.compare_systems(encoders, metric)
    except UserError as error:
        log_line(f"notice: BM25 was not compared: {error}")
        return []
    log_line(f"{metric.units}, mean reciprocal rank x 100 (95% interval):")
    for line in systems.describe(compared):
        log_line(line)
    return compared


def interpolate(base: StartingCheckpoint, trained: SavedEncoder, weight: float) -> SavedEncoder:
    """Return the encoder with the parameters (1 - weight) * start + weight * trained, and the trained one's pooler.

    Source: Wortsman et al. 2022 (WiSE-FT), Section 3.
    """
    if weight == 1:
        return trained

    def between(start: Params, trained: Params) -> Params:
        return {name: (1 - weight) * start[name] + weight * array for name, array in trained.items()}

    start, ours = base.checkpoint, trained.checkpoint
    pooler, head = ours.pooler, ours.sentence_head
    if trained.pooler == "cls":
        pooler = between(base.recorded.head or {}, pooler or {})  # see check_interpolation
    head = head._replace(params=between(start.sentence_head.params, head.params))
    transformer = between(start.transformer, ours.transformer)
    mixed = dataclasses.replace(ours, transformer=transformer, pooler=pooler, sentence_head=head)
    return dataclasses.replace(trained, checkpoint=mixed)
