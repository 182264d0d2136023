"""The model that a finished run gives: its best checkpoint, weights between that and the start, or the start itself."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from diffcse_jax.config import Config
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import ConfigError
from diffcse_jax.io import CHECKPOINTS
from diffcse_jax.models import parameters
from diffcse_jax.models.parameters import Params
from diffcse_jax.run_folder.records import FEWEST, Measured, Outcomes, Record, Selection, origin, write_selection
from diffcse_jax.run_folder.saved_encoder import SavedEncoder, default_step, read_encoder
from diffcse_jax.training.metrics import report, shown
from diffcse_jax.training.start import Start
from diffcse_jax.training.stopping import holds_guard


@runtime_checkable
class Evaluation(Protocol):
    """A dev evaluation, which chooses the best checkpoint."""

    @property
    def metric(self) -> str:
        """The score that chooses."""

    @property
    def text(self) -> str:
        """Identifies the text that `metric` is measured on."""

    @property
    def drift_metric(self) -> str:
        """The score of general quality, for `eval.max_drop`; empty where there is none."""

    def measure(self, encoder: Any) -> Measured:
        """Named scores, among them `metric` and `drift_metric`, higher is better; and what `metric` summarises."""

    def interval(self, start: Outcomes, model: Outcomes) -> tuple[float, float]:
        """A 95 % interval for `metric` of the model less that of the start."""

    def held(self, encoder: Any) -> Mapping[str, Outcomes]:
        """The outcomes of the metrics of `eval.hold`, by their names."""

    def regressions(self, start: Mapping[str, Outcomes], model: Mapping[str, Outcomes]) -> Sequence[str]:
        """Those in which the model is below the start by more than chance, in words."""

    @property
    def units(self) -> str:
        """The units that the interval is over, as `1,000 queries`."""

    @property
    def caveat(self) -> str:
        """The reason, in words, why a gain in `metric` says little of the text; empty where there is none."""


def check_interpolation(config: Config, start: Start) -> None:
    """Refuses `eval.interpolate` where the trained encoder has parameters that the start has not.

    Raises:
        ConfigError: a projector with random initial weights is kept.
    """
    if config.eval.interpolate and config.keeps_projector and start.head is None:
        raise ConfigError(
            f"eval.interpolate={config.eval.interpolate} needs a start with the weights that are trained, and with "
            f"model.projector_train_only=False a projector is kept that {start.name} does not have"
        )


def check_guard(config: Config, evaluation: Evaluation, baseline: Record) -> None:
    """Refuses `eval.max_drop` for a run that was begun where general quality was measured in another way.

    Raises:
        ConfigError: the start was not scored with what guards now.
    """
    guard = evaluation.drift_metric
    if guard and config.eval.max_drop and guard not in baseline.dev:
        raise ConfigError(
            f"eval.max_drop={config.eval.max_drop:g} bounds {guard}, which the start of this run was not scored with: "
            f"it has {', '.join(sorted(baseline.dev))}. STS-B's dev set was there then, or is now (eval.data_dir, "
            "DIFFCSE_DATA_DIR): go on with the data as it was, or in a new --workdir"
        )


def select(workdir: Path, config: Config, evaluation: Evaluation, start: Start, baseline: Record) -> Selection:
    """Chooses and keeps the model that a run gives, once its checkpoints are written.

    Of equal models the one nearest to the start is chosen, among those that hold `eval.max_drop` and then, where there
    are such, `eval.hold`. With `eval.keep_start` it is the start itself, unless the gain is more than chance: its 95 %
    interval is above 0, is over enough queries to say so, and of enough of the documents; or unless a metric of
    `eval.hold` falls.

    Args:
        workdir: the run's folder.
        config: its configuration, of which `eval.keep_start`, `eval.interpolate`, `eval.hold` and `eval.max_drop`
            count.
        evaluation: scores models between start and checkpoint.
        start: the start.
        baseline: the record of the start.
    """
    checkpoints = workdir / CHECKPOINTS
    best = read_encoder(checkpoints / str(default_step(checkpoints)))  # whatever was selected earlier
    measured = {
        share: _measured(interpolated(start, best, share), share, evaluation)
        for share in shares(config.eval.interpolate)
    }
    metric, guard = evaluation.metric, evaluation.drift_metric
    holding = [share for share in measured if holds_guard(config.eval, guard, baseline.dev, measured[share].scores)]
    ranked = sorted(holding or measured, key=lambda share: (-measured[share].scores[metric], share))
    higher = [share for share in ranked if measured[share].scores[metric] > baseline.dev[metric]]
    falls = _falls(higher, best, config, evaluation, start) if higher and config.eval.hold else {}
    share = next((share for share in higher if not falls.get(share)), ranked[0])
    chosen = measured[share]
    interval = evaluation.interval(baseline.outcomes, chosen.outcomes)
    objections = []
    if not holding:
        bound = f"eval.max_drop={config.eval.max_drop:g} of the start's {baseline.dev[guard]:.2f}"
        objections.append(f"no model keeps {guard} within {bound}")
    if lost := falls.get(share):
        objections.append(f"but other queries find less: {', '.join(lost)} (eval.hold)")
    if higher and evaluation.caveat:
        objections.append(f"but {evaluation.caveat}")
    may_be_chance = bool(_doubt(chosen.outcomes, interval))
    keeps_start = config.eval.keep_start and bool(not higher or objections or may_be_chance)
    exported = _exported(origin(share, best.step), keeps_start=keeps_start, gains=bool(higher and holding))
    compares = compared(chosen, baseline, evaluation, start.name, interval)
    verdict = "; ".join([compares, *objections, f"exported: {exported}"])
    if higher and (keeps_start or objections):
        verdict = f"warning: {verdict}"
    if keeps_start:
        share, record = 0.0, dataclasses.replace(baseline, outcomes=[])
        model = dataclasses.replace(
            best, transformer=start.checkpoint.transformer, pooler=baseline.pooler, pooler_head=start.pooler_head
        )
    else:
        model = interpolated(start, best, share)
        record = Record(best.step, best.pooler, chosen.scores, metric, baseline.text, dev_text=evaluation.text)
    selection = Selection(record, share, verdict)
    write_selection(workdir, selection, _weights(model))
    return selection


def _falls(
    shares: Sequence[float], trained: SavedEncoder, config: Config, evaluation: Evaluation, start: Start
) -> dict[float, Sequence[str]]:
    """The metrics of `eval.hold` in which models of these shares fall, in words, up to the first one without any."""
    report(f"scoring what must not fall, {', '.join(config.eval.hold)}")
    before = evaluation.held(start.encoder(config))
    falls: dict[float, Sequence[str]] = {}
    for share in shares:
        model = SentenceEncoder.from_saved(interpolated(start, trained, share))
        falls[share] = evaluation.regressions(before, evaluation.held(model))
        if not falls[share]:
            break
    return falls


def shares(count: int) -> list[float]:
    """The shares of the trained weights that are looked at: 1/count, 2/count, ... 1; of 0 that of 1 alone."""
    return [step / count for step in range(1, count + 1)] or [1.0]


def interpolated(start: Start, trained: SavedEncoder, share: float) -> SavedEncoder:
    """The encoder with weights (1 - share) start + share trained, and the pooler of the trained one.

    Source: Wortsman et al. 2022 (WiSE-FT), Section 3.
    """
    if share == 1:
        return trained
    head = trained.pooler_head
    if trained.pooler == "cls":
        assert start.head is not None  # see check_interpolation
        assert head is not None
        head = _between(start.head, head, share)
    return dataclasses.replace(
        trained, transformer=_between(start.checkpoint.transformer, trained.transformer, share), pooler_head=head
    )


def compared(
    measured: Measured, baseline: Record, evaluation: Evaluation, start: str, interval: tuple[float, float]
) -> str:
    """A model beside the start, with the 95 % interval of their difference, in words."""
    before, after = baseline.dev[evaluation.metric], measured.scores[evaluation.metric]
    low, high = interval
    opening = "better than" if after > before else "warning: nothing beat"
    doubt = _doubt(measured.outcomes, interval) if after > before else ""
    return (
        f"{opening} the start ({start}, {baseline.pooler}): {evaluation.metric} {after:.2f} against {before:.2f}, "
        f"{after - before:+.2f} (95 % interval {low:+.2f} to {high:+.2f}, bootstrap over "
        f"{evaluation.units}{doubt and f'; {doubt}: this may be chance'})"
    )


def _doubt(outcomes: Outcomes, interval: tuple[float, float]) -> str:
    """The reason why a gain may be chance; empty if it is more."""
    if interval[0] <= 0:
        return "0 is in it"
    return f"over fewer than {FEWEST} it says little" if sum(map(len, outcomes)) < FEWEST else ""


def _exported(trained: str, *, keeps_start: bool, gains: bool) -> str:
    """The model that is exported, in words, with what would have been."""
    if keeps_start:
        return origin(0, 0) + (f" (with eval.keep_start=False: {trained})" if gains else "")
    return trained if gains else f"{trained}, all the same"


def _measured(model: SavedEncoder, share: float, evaluation: Evaluation) -> Measured:
    """The dev evaluation of a model: of a checkpoint the one that it has."""
    if share == 1 and model.outcomes:
        return Measured(model.dev, model.outcomes)
    measured = evaluation.measure(SentenceEncoder.from_saved(model))
    report(f"{origin(share, model.step)}: {shown(measured.scores)}")
    return measured


def _between(start: Params, trained: Params, share: float) -> Params:
    return {name: (1 - share) * start[name] + share * array for name, array in trained.items()}


def _weights(model: SavedEncoder) -> Params:
    """The parameters of a model under the names that they have in a checkpoint."""
    head = model.pooler_head if model.pooler == "cls" else None
    return parameters.prefixed(model.transformer, "encoder") | parameters.prefixed(head or {}, "projector")
