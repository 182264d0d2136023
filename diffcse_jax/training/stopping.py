"""Whether a run's training ends before its last step, and which of its models keep general quality."""

from collections.abc import Mapping, Sequence

from diffcse_jax.config import EvalConfig

Scores = Mapping[str, float]


def holds_guard(options: EvalConfig, guard: str, start: Scores, scores: Scores) -> bool:
    """True unless the guard's score is more than `eval.max_drop` below the start's."""
    return not (guard and options.max_drop) or scores[guard] >= start[guard] - options.max_drop


def reason_to_stop(options: EvalConfig, metric: str, guard: str, start: Scores, evaluations: Sequence[Scores]) -> str:
    """The reason for which training ends now, for people; empty if it goes on.

    Args:
        options: `max_drop` ends it, unless models between start and checkpoint will be looked at; and so does
            `patience`, once so many evaluations in a row were no better than the best one before.
        metric: the dev score that chooses the best checkpoint.
        guard: the score of general quality; empty where there is none.
        start: the scores of the start.
        evaluations: the scores of the run so far, in order.
    """
    if not evaluations:
        return ""
    if not options.interpolate and not holds_guard(options, guard, start, evaluations[-1]):
        return (
            f"{guard} has fallen from {start[guard]:.2f} to {evaluations[-1][guard]:.2f}, by more than "
            f"eval.max_drop={options.max_drop:g}"
        )
    scores = [each[metric] for each in evaluations]
    since_best = len(scores) - 1 - scores.index(max(scores))
    if options.patience and since_best >= options.patience:
        return f"{metric} has not risen in {since_best} evaluations (eval.patience={options.patience})"
    return ""
