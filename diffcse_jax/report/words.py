"""A run in words: what was run, and what came of it."""

import inspect
import itertools
from datetime import timedelta

from diffcse_jax.losses.base import Loss
from diffcse_jax.report.charts import short
from diffcse_jax.report.runs import Run
from diffcse_jax.run_folder.records import origin

TEXT = {
    "columns": "the text",
    "dropout": "sentences of the documents",
    "lead": "titles or first sentences, each with the rest of its document",
    "neighbours": "sentences, each with the next one",
    "passages": "passages of the documents, each with the next one",
    "crops": "random spans of the documents, in pairs",
}


def what_was_run(run: Run) -> str:
    """Start, text, steps, settings."""
    config = run.config
    data, train, optim = config.data, config.train, config.optim
    length = f"{train.steps:,} steps" if train.steps else f"{train.epochs} epochs"
    devices = _devices(run)
    own = "; ".join(filter(None, (objective.data_description for objective in config.losses.values())))
    text = own or f"{TEXT[data.pairs]} in {data.train_file}"
    schedule = "falling to 0" if optim.schedule == "linear" else "constant"
    return (
        f"Training starts from {config.model.name_or_path} and takes {config.encoding_pooler} as the sentence vector. "
        f"It goes over {text}, {length} of {train.batch_size} rows with at most "
        f"{data.max_length} tokens; the learning rate is {short(optim.learning_rate)}, {schedule}; the seed is "
        f"{train.seed}; {config.precision}{devices}."
    )


def about(loss: Loss) -> str:
    """The first line of a loss's description."""
    return (inspect.getdoc(loss) or "").split("\n")[0]


def objectives_of(run: Run) -> list[tuple[str, str]]:
    """The objectives that take part, with their weights, and what they are."""
    return [
        (f"{short(loss.weight)} \N{MULTIPLICATION SIGN} {name.replace('_', ' ')}", about(loss))
        for name, loss in run.config.losses.items()
    ]


def state(run: Run) -> str:
    """Whether the run is finished."""
    steps = run.config.train.steps
    of = f" of {steps:,}" if steps else ""
    if run.selection:
        return f"finished, at step {run.last_step:,}{of}"
    if run.is_finished:
        return f"exported, at step {run.last_step:,}{of}"
    if not run.rows:
        return "begun, nothing measured yet"
    return f"in progress or stopped, at step {run.last_step:,}{of}"


def what_came_of_it(run: Run) -> str:
    """The verdict, or how far the run is."""
    if run.selection:
        return f"{run.selection.verdict[:1].upper()}{run.selection.verdict[1:]}."
    if run.best is None:
        return "No model was evaluated yet."
    step, score = run.best
    start = f", where the start has {short2(run.before)}" if run.before is not None else ""
    opening = "The best evaluation" if run.is_finished else "The best evaluation so far"
    ending = "" if run.is_finished else " Which model is exported is chosen at the end."
    return f"{opening} is that of step {step:,}: {named(run.metric)} {short2(score)}{start}.{ending}"


def chosen(run: Run) -> str:
    """The weights that the run gives, or its best ones so far."""
    if run.selection:
        return origin(run.selection.interpolation, run.selection.record.step)
    return f"step {run.best[0]:,}" + ("" if run.is_finished else ", so far") if run.best else "none yet"


def warnings(run: Run) -> list[str]:
    """Warnings that a reader needs before trusting the numbers."""
    found = []
    if bad := max((row.get("bad_steps", 0) for row in run.rows), default=0):
        found.append(f"{counted(round(bad), 'step')} not applied: a loss or gradient was no finite number")
    if any(row.get("grad_norm") == 0 for row in run.rows):
        found.append("the gradient was 0 at some steps: nothing was learned there")
    environments = {str([start.get(name) for name in ("versions", "devices", "git")]) for start in run.starts}
    if len(environments) > 1:
        found.append("the run went on with other versions, devices or code than it began with")
    if any((start.get("git") or {}).get("dirty") for start in run.starts):
        found.append("the code differed from its commit")
    return found


def duration(run: Run) -> str:
    """The time of the training steps, without compilation and evaluations; empty where it is not recorded."""
    speeds = run.points("sentences_per_second")
    seconds = sum(
        (step - before) * run.config.train.batch_size / speed
        for (before, _), (step, speed) in itertools.pairwise(speeds)
        if speed > 0
    )
    return str(timedelta(seconds=round(seconds))) if seconds else ""


def counted(count: int, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def named(metric: str) -> str:
    """A metric's name for people."""
    return metric.removeprefix("dev/").replace("_", " ")


def short2(score: float | None) -> str:
    """A score with two decimals."""
    return "\N{EN DASH}" if score is None else f"{score:.2f}".replace("-", "\N{MINUS SIGN}")


def _devices(run: Run) -> str:
    if not run.starts or not isinstance(devices := run.starts[-1].get("devices"), dict):
        return ""
    count, hosts = devices.get("count", 1), devices.get("hosts", 1)
    many = f" on {count} devices" if count != 1 else " on one device"
    return f"{many} ({devices.get('kind')})" + (f" of {hosts} hosts" if hosts != 1 else "")
