"""Which model a run exports: `decide` chooses by numbers, `describe` says why, `store` writes it.

The candidate is the best checkpoint or, with `eval.interpolate`, a mixture of it and the starting
checkpoint. With `eval.keep_start`, the starting checkpoint is exported if the candidate is not
better, may be better by chance, or breaks a limit. For a query encoder, a comparison with BM25
replaces the first two.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from diffcse_jax.config import Config
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import ConfigError, UserError
from diffcse_jax.evaluation import systems
from diffcse_jax.evaluation.metrics import SYMMETRIC_METRICS, RetrievalMetric
from diffcse_jax.evaluation.systems import System, made_weight
from diffcse_jax.hosts import log_line
from diffcse_jax.models import layers
from diffcse_jax.models.heads import QUERY_PROJECTION, SENTENCE_HEAD
from diffcse_jax.models.hf import Pretrained
from diffcse_jax.models.layers import Params
from diffcse_jax.run_folder import records
from diffcse_jax.run_folder.checkpoints import SavedEncoder, default_step, read_encoder
from diffcse_jax.run_folder.finding import CHECKPOINTS
from diffcse_jax.run_folder.records import FEWEST, Measured, Record, Selection
from diffcse_jax.training.callbacks import format_scores
from diffcse_jax.training.loop import Run
from diffcse_jax.training.networks import StartingCheckpoint

THIS_MODEL = "this model"  # the trained one, as the name of a system


# The decision: numbers in, a choice out


class Candidate(NamedTuple):
    """A model that a run may export."""

    interpolation: float  # the share of the trained weights; the rest is the starting checkpoint's
    # In the dev metric: while candidates compete, of the queries that choose; in a decision, of
    # those that judge.
    score: float
    keeps_quality: bool = True  # as `eval.max_drop` limits
    lost: Sequence[str] = ()  # metrics of `eval.hold` that dropped, in words


class Comparison(NamedTuple):
    """What the queries that judge tell about a candidate and the starting checkpoint."""

    start: float  # the score of the starting checkpoint with its own pooler
    interval: tuple[float, float]  # of the candidate's gain, 95%
    sample: int  # the number of independent items that the interval is over
    best: float | None = None  # the score of the best checkpoint, if it is not a candidate
    # The score of the starting checkpoint with the pooler that the run trains, if not its own.
    start_with_pooler: float | None = None
    # Whether BM25 finds enough to teach a query encoder: alone, it is not clearly worse than the
    # starting checkpoint alone. None if another encoder is trained, or too few documents tell.
    words_teach: bool | None = None

    @property
    def teaches(self) -> bool:
        """Whether BM25 teaches a query encoder, and queries made of documents do not object.

        They hardly see what people's questions gain (docs/records/search.md).
        """
        return self.words_teach is True and self.interval[1] >= 0


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a run exports and why, and which search it recommends."""

    candidate: Candidate
    comparison: Comparison
    keeps_start: bool  # the starting checkpoint is exported and not the candidate
    caveat: Literal["", "interval", "sample"]  # why a gain may be chance
    compared: Sequence[System] = ()
    recommended: System | None = None  # of all systems
    search: System | None = None  # of those that need no other model than the exported one

    @property
    def is_higher(self) -> bool:
        """Whether the candidate has a higher score than the starting checkpoint."""
        return self.candidate.score > self.comparison.start

    @property
    def interpolation(self) -> float:
        """The share of the trained weights in the exported model."""
        return 0.0 if self.keeps_start else self.candidate.interpolation

    @property
    def advised(self) -> System | None:
        """The search that a user is told to use.

        It is the recommended one, unless that needs a model which the run does not export.
        """
        recommended = self.recommended
        if recommended and recommended.encoder == THIS_MODEL and self.keeps_start:
            return self.search
        return recommended


def in_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that keep `eval.max_drop`, or all if none does, from the best one on.

    Of candidates with equal scores, the one nearest to the starting checkpoint comes first.
    """
    kept = [each for each in candidates if each.keeps_quality] or candidates
    return sorted(kept, key=lambda each: (-each.score, each.interpolation))


def choose(start: float, candidates: Sequence[Candidate]) -> Candidate:
    """Return the first candidate that beats `start` and loses nothing in `eval.hold`.

    If there is none, it is the first one that beats `start`, the starting checkpoint's score, or
    else the first one.

    Args:
        start: The score of the starting checkpoint.
        candidates: The candidates, from the best one on.
    """
    higher = [each for each in candidates if each.score > start]
    for each in higher:
        if not each.lost:
            return each
    return candidates[0]


def decide(
    candidate: Candidate,
    comparison: Comparison,
    *,
    keep_start: bool,
    compared: Sequence[System] = (),
) -> Decision:
    """Decide between a candidate and the starting checkpoint.

    Args:
        candidate: The best model of the run, with its score of the queries that judge.
        comparison: What is known about its gain.
        keep_start: Export the starting checkpoint unless the candidate is clearly better. A query
            encoder is exported if BM25 has something to teach and the candidate is not clearly
            worse; if the first is unknown, it must be clearly better, too.
        compared: Ways to search, if they were compared.
    """
    is_higher = candidate.score > comparison.start
    caveat: Literal["", "interval", "sample"] = ""
    if is_higher and comparison.sample < FEWEST:
        caveat = "sample"
    elif is_higher and comparison.interval[0] <= 0:
        caveat = "interval"
    breaks_limit = bool(candidate.lost) or not candidate.keeps_quality
    is_gain = is_higher and not caveat
    if comparison.words_teach is not None:
        is_gain = comparison.teaches
    helped = is_gain and not breaks_limit
    keeps_start = keep_start and not helped

    def is_usable(system: System) -> bool:
        return not system.encoder or (system.encoder == THIS_MODEL) != keeps_start

    preferred = THIS_MODEL if helped else ""
    recommended = systems.recommend(compared, preferred) if compared else None
    search = recommended
    if recommended and not is_usable(recommended):
        usable = [*filter(is_usable, compared)]
        search = systems.recommend(usable, preferred) if usable else None
    return Decision(
        candidate,
        comparison,
        keeps_start,
        caveat,
        compared,
        recommended=recommended,
        search=search,
    )


# The verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wording:
    """What a verdict calls things."""

    start: str  # the starting checkpoint
    metric: str  # the dev metric
    units: str  # what intervals are over, such as `213 queries of 30 documents`
    items: str  # what must be at least `FEWEST`, such as `documents`
    step: int  # of the best checkpoint
    pooler: str  # that the run trains
    quality: str = ""  # what `eval.max_drop` limits: `guard within eval.max_drop=1 of 80.00`
    aspect: str = ""  # in which a model with a higher score is better, such as ` as a masked LM`
    remark: str = ""  # what a reader must know about the scores


def describe(decision: Decision, wording: Wording) -> str:
    """Return the verdict.

    The first line says in words whether training helped, which model the run gives and how to
    search. The others are indented: scores, limits, what was exported and why.
    """
    candidate = decision.candidate
    details = [_gain(decision, wording), _training_alone(decision, wording)]
    if not candidate.keeps_quality:
        details.append(f"None of the models that were scored keeps {wording.quality}.")
    if candidate.lost:
        details.append(f"Other queries got worse: {', '.join(candidate.lost)} (eval.hold).")
    exported = f"Exported {_exported(decision, wording)}."
    details.append(f"{exported} {_best_weights(decision, wording)}".rstrip())
    details += _comparisons(decision)
    details.append(wording.remark)
    return "\n  ".join([_summary(decision, wording), *filter(None, details)])


def _summary(decision: Decision, wording: Wording) -> str:
    """Say whether training helped, which model the run gives and how to search, without numbers."""
    sentences = [_result(decision, wording)]
    if advised := decision.advised:
        if advised.encoder != THIS_MODEL and not decision.keeps_start:
            sentences.append(
                f"But no search with it is clearly better than {advised.name}, which needs no "
                "training."
            )
        sentences.append(f"Search with {advised.name}.")
    return " ".join(sentences)


def _comparisons(decision: Decision) -> Iterator[str]:
    """Compare the advised search with the best one, and with the best one without training."""
    advised = decision.advised
    if not advised:
        return
    best = max(decision.compared, key=lambda system: system.score)
    if best.score > advised.score:
        yield systems.describe_difference(best, advised)
    if advised.encoder == THIS_MODEL:
        untrained = [system for system in decision.compared if system.encoder != THIS_MODEL]
        other = max(untrained, key=lambda system: system.score)
        if other.score < advised.score:
            yield systems.describe_difference(advised, other)


def _result(decision: Decision, wording: Wording) -> str:
    candidate = decision.candidate
    teaches = decision.comparison.teaches
    if not decision.is_higher and not teaches:
        result = "Training did not help"
    elif decision.comparison.words_teach is False:
        result = (
            f"BM25 alone finds clearly less than {wording.start}, and on such collections people's "
            "questions gained nothing significant beside BM25 (docs/query_encoders.md)"
        )
    elif decision.caveat and not teaches:
        result = "Training did not clearly help"
    elif candidate.lost:
        result = "Training helped, but other queries got worse"
        if decision.caveat or not decision.is_higher:
            result = "Training did not clearly help, and other queries got worse"
    elif not candidate.keeps_quality:
        result = "Training helped, but general quality dropped too far"
    elif decision.caveat or not decision.is_higher:
        return (
            "Training did not clearly help by queries made of documents. But BM25 alone finds "
            f"about as much as {wording.start}, and on such collections people's questions gained "
            "or stayed as they were (docs/query_encoders.md). You get the trained model."
        )
    else:
        return f"Training helped: the trained model is better than {wording.start}{wording.aspect}."
    if decision.keeps_start:
        return f"{result}, so you keep {wording.start}."
    return f"{result}. You get the trained model anyway."


def _gain(decision: Decision, wording: Wording) -> str:
    after, before = decision.candidate.score, decision.comparison.start
    low, high = decision.comparison.interval
    too_few = f"fewer than {FEWEST} {wording.items} are too few to tell"
    caveat = {
        "": "",
        "interval": "; the interval includes 0, so this may be chance",
        "sample": f"; {too_few}, so this may be chance",
    }[decision.caveat]
    interval = f"95% interval {low:+.2f} to {high:+.2f} over {wording.units}{caveat}"
    gain = f"{after - before:+.2f}, {interval}"
    return f"{wording.metric} {after:.2f} after training, {before:.2f} before ({gain})."


def _training_alone(decision: Decision, wording: Wording) -> str:
    """Say what training gained with one pooler, if that is not the starting checkpoint's."""
    same_pooler = decision.comparison.start_with_pooler
    if same_pooler is None:
        return ""
    parts = {
        "the change of pooler": same_pooler - decision.comparison.start,
        "training": decision.candidate.score - same_pooler,
    }
    changes = []
    for what, change in parts.items():
        verb = "gained" if change >= 0 else "lost"
        changes.append(f"{what} {verb} {abs(change):.2f}")
    before = f"With the pooler {wording.pooler}, {wording.start} scored {same_pooler:.2f}"
    return f"{before} before training: {', and '.join(changes)}."


def _exported(decision: Decision, wording: Wording) -> str:
    trained = records.origin(decision.candidate.interpolation, wording.step)
    is_gain = decision.is_higher or decision.comparison.teaches
    gains = is_gain and decision.candidate.keeps_quality
    if not decision.keeps_start:
        return trained if gains else f"{trained} anyway"
    other = f" (eval.keep_start=False would export {trained})" if gains else ""
    return f"{wording.start} unchanged{other}"


def _best_weights(decision: Decision, wording: Wording) -> str:
    """Say why a mixture is exported, if the best checkpoint has a higher score."""
    best = decision.comparison.best
    if decision.keeps_start or best is None or best <= decision.candidate.score:
        return ""
    why = ", but such mixtures answer people's own questions better (docs/records/search.md)"
    return (
        f"Step {wording.step} alone scores {best:.2f}{why if decision.compared else ''}. "
        f"eval.interpolate=() scores step {wording.step} alone."
    )


# The record


def store(
    workdir: Path,
    decision: Decision,
    verdict: str,
    exported: Record,
    weights: Params,
) -> None:
    """Write the decision to the run folder, and the weights unless a checkpoint has them.

    Args:
        workdir: The run folder.
        decision: What is exported.
        verdict: Why, in words.
        exported: The dev evaluation of the exported model.
        weights: Those of the exported model, with the names of a checkpoint.
    """
    start = decision.comparison.start
    selection = Selection(
        exported,
        decision.interpolation,
        verdict,
        judged=(start, start if decision.keeps_start else decision.candidate.score),
        systems=[system.summary() for system in decision.compared],
        search=how_to_search(decision),
    )
    records.write_selection(workdir, selection, weights)


def how_to_search(decision: Decision) -> Mapping[str, Any]:
    """Return how to search with the exported model; with another, if that is recommended, too."""
    best, recommended = decision.search, decision.recommended
    if not best or not recommended:
        return {}
    search = {"mode": best.mode, "weight": best.weight}
    if recommended is best or recommended.encoder == THIS_MODEL:
        return search
    other = {"mode": recommended.mode, "weight": recommended.weight}
    return search | {"instead": {"model": recommended.encoder, **other}}


# A run


@dataclasses.dataclass(frozen=True)
class Mixtures:
    """The models between the starting checkpoint of a run and its best checkpoint."""

    base: StartingCheckpoint
    best: SavedEncoder

    def saved(self, weight: float) -> SavedEncoder:
        """Return the model with this share of the trained weights."""
        return interpolate(self.base, self.best, weight)

    def encoder(self, weight: float) -> SentenceEncoder:
        """Return the same as an encoder."""
        return SentenceEncoder.from_saved(self.saved(weight))


def check_interpolation(config: Config, base: StartingCheckpoint) -> None:
    """Check that the starting checkpoint has all parameters that `eval.interpolate` mixes.

    It mixes those of the trained encoder.
    """
    if config.eval.interpolate and config.keeps_projector and base.recorded.head is None:
        raise ConfigError(
            f"eval.interpolate={config.eval.interpolate} needs a starting checkpoint with all "
            f"trained weights, but {base.name} has no projector, and "
            "model.projector_train_only=False keeps one. Set eval.interpolate=()."
        )


def interpolate(base: StartingCheckpoint, trained: SavedEncoder, weight: float) -> SavedEncoder:
    """Return the encoder with the parameters (1 - weight) * start + weight * trained.

    It has the trained encoder's pooler. Source: Wortsman et al. 2022 (WiSE-FT), Section 3.
    """
    if weight == 1:
        return trained

    def between(start: Params, trained: Params) -> Params:
        share = 1 - weight
        return {name: share * start[name] + weight * array for name, array in trained.items()}

    start, ours = base.checkpoint, trained.checkpoint
    pooler, head = ours.pooler, ours.sentence_head
    if trained.documents:  # queries have another projection, and the rest in common with them
        identity = np.eye(len(head.projection), dtype=np.float32)
        kernel = (1 - weight) * identity + weight * head.projection
        head = start.sentence_head.with_projection(trained.pooler, kernel)
        mixed = dataclasses.replace(ours, sentence_head=head)
        return dataclasses.replace(trained, checkpoint=mixed)
    if trained.pooler == "cls":
        pooler = between(base.recorded.head or {}, pooler or {})  # see check_interpolation
    head = head._replace(params=between(start.sentence_head.params, head.params))
    transformer = between(start.transformer, ours.transformer)
    mlm_head = between(start.mlm_head or {}, ours.mlm_head) if ours.mlm_head else None
    mixed = dataclasses.replace(
        ours, transformer=transformer, pooler=pooler, mlm_head=mlm_head, sentence_head=head
    )
    return dataclasses.replace(trained, checkpoint=mixed)


def select(run: Run, baseline: Record) -> str:
    """Choose the model of a run and store it, once all checkpoints are written.

    Returns:
        The verdict: how the model compares with the starting checkpoint, and what is exported.
    """
    base = run.base
    chosen = run.evaluation.chosen
    checkpoints = run.workdir / CHECKPOINTS
    best = read_encoder(checkpoints / str(default_step(checkpoints)))  # not an earlier selection
    mixtures = Mixtures(base, best)
    measured = _measure(run, mixtures)
    candidate = _candidate(run, baseline, measured, mixtures)
    judged = measured[candidate.interpolation]
    candidate = candidate._replace(score=chosen.judged(judged))
    needs_best = best.dev and 1.0 not in measured
    words_find_as_much = _words_find_as_much(run)
    compared = _compare_systems(
        run, mixtures, candidate.interpolation, made_weight(words_find_as_much)
    )
    items, what = chosen.sample
    comparison = Comparison(
        start=_judged_start(run, baseline),
        interval=chosen.interval(baseline.outcomes, judged.outcomes),
        sample=items,
        best=chosen.judged(Measured(best.dev, best.outcomes)) if needs_best else None,
        start_with_pooler=_start_with_pooler(run),
        words_teach=words_find_as_much if run.config.trains_queries else None,
    )
    keep_start = run.config.eval.keep_start
    decision = decide(candidate, comparison, keep_start=keep_start, compared=compared)
    wording = Wording(
        start=base.name,
        metric=chosen.name,
        units=chosen.units,
        items=what,
        step=best.step,
        pooler=base.checkpoint.sentence_head.applied(run.config.encoding_pooler),
        quality=_limited_quality(run, baseline),
        aspect=chosen.aspect,
        remark=chosen.remark,
    )
    verdict = describe(decision, wording)
    record, model = _exported_model(run, baseline, decision, mixtures, measured)
    store(run.workdir, decision, verdict, record, _weights(run.config, record, decision, model))
    return verdict


def _exported_model(
    run: Run,
    baseline: Record,
    decision: Decision,
    mixtures: Mixtures,
    measured: Mapping[float, Measured],
) -> tuple[Record, Pretrained]:
    """Return the exported model, and its record."""
    base, best = run.base, mixtures.best
    if decision.keeps_start:
        mlm_head = base.checkpoint.mlm_head if run.config.keeps_mlm_head else None
        model = dataclasses.replace(base.checkpoint, pooler=base.pooler_head, mlm_head=mlm_head)
        return dataclasses.replace(baseline, outcomes=[]), model
    record = Record(
        best.step,
        best.pooler,
        measured[decision.interpolation].scores,
        run.evaluation.metric,
        baseline.text,
        dev_text=run.evaluation.text,
    )
    return record, mixtures.saved(decision.interpolation).checkpoint


def _weights(config: Config, exported: Record, decision: Decision, model: Pretrained) -> Params:
    """Return the weights of the exported model, with the names of a checkpoint.

    With them is its masked-LM head, if the run trained that.
    """
    if config.trains_queries:
        if decision.keeps_start:
            return {}
        return layers.prefixed({"kernel": model.sentence_head.projection}, QUERY_PROJECTION)
    weights = layers.prefixed(model.transformer, "encoder")
    if exported.pooler == "cls":
        weights |= layers.prefixed(model.pooler or {}, "projector")
    weights |= layers.prefixed(model.sentence_head.of(exported.pooler).params, SENTENCE_HEAD)
    return weights | layers.prefixed(model.mlm_head or {}, "mlm_head")


def _measure(run: Run, mixtures: Mixtures) -> dict[float, Measured]:
    """Return the dev evaluation of each candidate, by the share of the trained weights."""
    best = mixtures.best
    measured = {}
    for weight in run.config.eval.interpolate or (1.0,):
        if weight == 1 and best.outcomes:
            measured[weight] = Measured(best.dev, best.outcomes)
            continue
        measured[weight] = run.evaluation.measure(mixtures.encoder(weight))
        scores = format_scores(measured[weight].scores)
        log_line(f"{records.origin(weight, best.step)}: {scores}")
    return measured


def _candidate(
    run: Run,
    baseline: Record,
    measured: Mapping[float, Measured],
    mixtures: Mixtures,
) -> Candidate:
    """Return the model that a run may export.

    The metrics of `eval.hold` are measured only until a model loses nothing in them.
    """
    evaluation = run.evaluation
    hold = run.config.eval.hold
    start = baseline.dev[evaluation.metric]
    candidates = [
        Candidate(weight, scores[evaluation.metric], run.keeps_quality(baseline.dev, scores))
        for weight, (scores, _) in measured.items()
    ]
    candidates = in_order(candidates)
    count = sum(each.score > start for each in candidates)
    if not count:  # the first one may still be better by the queries that judge
        judged = evaluation.chosen.judged(measured[candidates[0].interpolation])
        # Queries that learn may be exported with any score (`Comparison.teaches`).
        count = int(judged > _judged_start(run, baseline) or run.config.trains_queries)
    if count and hold:
        log_line(f"Checking whether other queries got worse (eval.hold: {', '.join(hold)}).")
        held = evaluation.held(run.base.encoder(run.config))
        for index, each in enumerate(candidates[:count]):
            lost = evaluation.regressions(
                held, evaluation.held(mixtures.encoder(each.interpolation))
            )
            if not lost:
                break
            candidates[index] = each._replace(lost=lost)
    return choose(start, candidates)


def _judged_start(run: Run, baseline: Record) -> float:
    return run.evaluation.chosen.judged(Measured(baseline.dev, baseline.outcomes))


def _start_with_pooler(run: Run) -> float | None:
    """Return the score of the starting checkpoint with the pooler that the run trains.

    Return None if that is its own pooler.
    """
    base, config = run.base, run.config
    if run.model_of or config.trains_masked_lm or base.pooler(config) == config.encoding_pooler:
        return None
    return run.evaluation.chosen.judged(run.measure(run.built.params))


def _limited_quality(run: Run, baseline: Record) -> str:
    metric = run.evaluation.drift_metric
    most = run.config.eval.max_drop
    if not (metric and most):
        return ""
    return f"{metric} within eval.max_drop={most:g} of {baseline.dev[metric]:.2f}"


def _words_find_as_much(run: Run) -> bool | None:
    """Return whether BM25 finds about as much as the starting checkpoint.

    That has trained on no document, so queries of all documents can tell.

    Return None if the dev metric has no queries that were made of documents, or too few.
    """
    of_all = run.evaluation.of_all
    if of_all is None:
        return None
    start = run.evaluation.prepared(run.base.encoder(run.config))
    try:
        return systems.words_find_as_much(run.base.name, start, of_all)
    except UserError:  # without BM25, nothing is compared below, and a notice says so
        return None


def _compare_systems(
    run: Run, mixtures: Mixtures, weight: float, weight_of_words: float
) -> list[System]:
    """Compare BM25, the starting checkpoint and the trained model on the dev metric's queries."""
    metric = run.evaluation.chosen
    if not isinstance(metric, RetrievalMetric) or metric.name in SYMMETRIC_METRICS:
        return []
    if metric.is_made:
        metric = metric.without_repetitions()
    if metric.judging.sum() < FEWEST:
        return []
    models = {run.base.name: run.base.encoder(run.config), THIS_MODEL: mixtures.encoder(weight)}
    encoders = {name: run.evaluation.prepared(model) for name, model in models.items()}
    try:
        compared = systems.compare_systems(encoders, metric, weight_of_words)
    except UserError as error:
        log_line(f"notice: BM25 was not compared: {error}")
        return []
    without = ", without those whose words all stand in their text" if metric.is_made else ""
    log_line(f"{metric.units}{without}, mean reciprocal rank x 100 (95% interval):")
    for line in systems.describe(compared):
        log_line(line)
    return compared
