"""Choose the model of a finished run: the best checkpoint, the starting checkpoint, or weights between them.

The starting checkpoint is the baseline. The difference from it has a 95% interval by the paired bootstrap.
"""

import dataclasses
from collections.abc import Callable, Sequence

from diffcse_jax.config import Config
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import ConfigError, UserError
from diffcse_jax.evaluation import systems
from diffcse_jax.evaluation.dev import SYMMETRIC_METRICS, DevEvaluation, RetrievalMetric
from diffcse_jax.hosts import log_line
from diffcse_jax.io import CHECKPOINTS
from diffcse_jax.models import parameters
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.sentence_head import SENTENCE_HEAD
from diffcse_jax.run_folder.checkpoints import SavedEncoder, default_step, read_encoder
from diffcse_jax.run_folder.records import FEWEST, Measured, Record, Selection, origin, write_selection
from diffcse_jax.training.callbacks import format_scores
from diffcse_jax.training.loop import Run
from diffcse_jax.training.networks import StartingCheckpoint

THIS_MODEL = "this model"  # the trained one, as the name of a system


def check_interpolation(config: Config, base: StartingCheckpoint) -> None:
    """Check that `eval.interpolate` is possible: the starting checkpoint has all parameters of the trained encoder."""
    if config.eval.interpolate and config.keeps_projector and base.recorded.head is None:
        raise ConfigError(
            f"eval.interpolate={config.eval.interpolate} needs a starting checkpoint with all trained weights, but "
            f"{base.name} has no projector, and model.projector_train_only=False keeps one. Set eval.interpolate=0."
        )


def check_drift_metric(config: Config, evaluation: DevEvaluation, baseline: Record) -> None:
    """Check that the baseline, which may be from the run's first start, has the score that `eval.max_drop` limits."""
    metric = evaluation.drift_metric
    if metric and config.eval.max_drop and metric not in baseline.dev:
        raise ConfigError(
            f"eval.max_drop={config.eval.max_drop:g} limits {metric}, but this run began with other dev data: it has "
            f"{', '.join(sorted(baseline.dev))}. Restore eval.data_dir, or use a new --workdir."
        )


def select(run: Run, baseline: Record) -> Selection:
    """Choose the model of a run and store the choice, once all checkpoints are written.

    Candidates are the best checkpoint and, with `eval.interpolate`, weights between the start and that checkpoint.
    Models that keep `eval.max_drop` come first, then models without a regression in `eval.hold`, then the best score;
    of equal models, the one nearest to the start. With `eval.keep_start`, the starting checkpoint is chosen instead if
    the gain may be chance or if a metric of `eval.hold` dropped.
    """
    options, evaluation, base = run.config.eval, run.evaluation, run.base
    metric, drift = evaluation.metric, evaluation.drift_metric
    checkpoints = run.workdir / CHECKPOINTS
    best = read_encoder(checkpoints / str(default_step(checkpoints)))  # ignores an earlier selection

    def encoder(weight: float) -> SentenceEncoder:
        return SentenceEncoder.from_saved(interpolate(base, best, weight))

    measured = {1.0: Measured(best.dev, best.outcomes)} if best.outcomes else {}
    for weight in [step / options.interpolate for step in range(1, options.interpolate + 1)] or [1.0]:
        if weight not in measured:
            measured[weight] = evaluation.measure(encoder(weight))
            log_line(f"{origin(weight, best.step)}: {format_scores(measured[weight].scores)}")
    keeping = [each for each in measured if run.keeps_quality(baseline.dev, measured[each].scores)]
    ranked = sorted(keeping or measured, key=lambda weight: (-measured[weight].scores[metric], weight))
    higher = [weight for weight in ranked if measured[weight].scores[metric] > baseline.dev[metric]]
    regressions: dict[float, Sequence[str]] = {}
    if higher and options.hold:
        log_line(f"Checking that general quality ({', '.join(options.hold)}) did not drop.")
        held = evaluation.held(base.encoder(run.config))
        for weight in higher:
            regressions[weight] = evaluation.regressions(held, evaluation.held(encoder(weight)))
            if not regressions[weight]:
                break
    weight = next((weight for weight in higher if not regressions.get(weight)), ranked[0])
    chosen = measured[weight]

    objections = []
    if not keeping:
        limit = f"eval.max_drop={options.max_drop:g} of {baseline.dev[drift]:.2f}"
        objections.append(f"No model keeps {drift} within {limit}.")
    if lost := regressions.get(weight):
        objections.append(f"But other queries got worse: {', '.join(lost)} (eval.hold).")
    low, high = evaluation.chosen.interval(baseline.outcomes, chosen.outcomes)
    doubt = "the interval includes 0" if higher and low <= 0 else ""
    if not doubt and higher and sum(map(len, chosen.outcomes)) < FEWEST:
        doubt = f"fewer than {FEWEST} are too few"
    keeps_start = options.keep_start and bool(not higher or objections or doubt)

    before, after = baseline.dev[metric], chosen.scores[metric]
    gain = f"{after - before:+.2f}, 95% interval {low:+.2f} to {high:+.2f} over {evaluation.chosen.units}"
    chance = f"; {doubt}, so this may be chance" if doubt else ""
    better = "Not better" if after <= before else "Not clearly better" if keeps_start else "Better"
    opening = f"{better} than {base.name}"
    trained, gains = origin(weight, best.step), bool(higher and keeping)
    if keeps_start:
        exported = f"{base.name} unchanged" + (f" (eval.keep_start=False would export {trained})" if gains else "")
    else:
        exported = trained + ("" if gains else " anyway")
    verdict = f"{opening}: {metric} {after:.2f}, was {before:.2f} ({gain}{chance})."
    compared = _compare_systems(run, lambda: encoder(weight))
    advice = [systems.describe_recommendation(compared, systems.recommend(compared))] if compared else []
    verdict = " ".join([verdict, *objections, f"Exported {exported}.", *advice])
    if not higher or keeps_start or objections:
        verdict = f"warning: {verdict}"

    if keeps_start:
        weight, record = 0.0, dataclasses.replace(baseline, outcomes=[])
        model, head = base.checkpoint, base.pooler_head
    else:
        model = interpolate(base, best, weight).checkpoint
        head = model.pooler
        record = Record(best.step, best.pooler, chosen.scores, metric, baseline.text, dev_text=evaluation.text)
    of_exported = [system for system in compared if system.encoder == (base.name if keeps_start else THIS_MODEL)]
    how = systems.recommend(of_exported) if of_exported else None
    selection = Selection(
        record,
        weight,
        verdict,
        systems=[system.summary() for system in compared],
        search={"mode": how.mode, "weight": how.weight} if how else {},
    )
    weights = parameters.prefixed(model.transformer, "encoder")
    if record.pooler == "cls":
        weights |= parameters.prefixed(head or {}, "projector")
    weights |= parameters.prefixed(model.sentence_head.of(record.pooler).params, SENTENCE_HEAD)
    write_selection(run.workdir, selection, weights)
    return selection


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
        assert base.recorded.head is not None  # see check_interpolation
        assert pooler is not None
        pooler = between(base.recorded.head, pooler)
    head = head._replace(params=between(start.sentence_head.params, head.params))
    transformer = between(start.transformer, ours.transformer)
    mixed = dataclasses.replace(ours, transformer=transformer, pooler=pooler, sentence_head=head)
    return dataclasses.replace(trained, checkpoint=mixed)
