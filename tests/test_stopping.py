import pytest

from diffcse_jax.groups import EvalConfig
from diffcse_jax.training.stopping import holds_guard, reason_to_stop

START = {"mrr": 60.0, "guard": 80.0}


def of(*scores, guard=80.0):
    return [{"mrr": score, "guard": guard} for score in scores]


@pytest.mark.parametrize(
    ("options", "evaluations", "reason"),
    [
        ({"patience": 2}, [], ""),
        ({"patience": 2}, of(50.0), ""),
        ({"patience": 2}, of(50.0, 49.0), ""),
        ({"patience": 2}, of(50.0, 49.0, 50.0), "mrr has not risen in 2 evaluations"),  # an equal score is no rise
        ({"patience": 2}, of(50.0, 49.0, 51.0, 50.0), ""),
        ({"patience": 0}, of(*range(50, 0, -1)), ""),
        ({"max_drop": 1.0}, of(70.0, guard=79.0), ""),
        ({"max_drop": 1.0}, of(70.0, guard=78.9), "guard has fallen from 80.00 to 78.90, by more than eval.max_drop=1"),
        ({"max_drop": 1.0, "interpolate": 5}, of(70.0, guard=10.0), ""),
        ({"max_drop": 0.0}, of(70.0, guard=10.0), ""),
    ],
)
def test_reasons_to_stop(options, evaluations, reason):
    found = reason_to_stop(EvalConfig(guard=True, **options), "mrr", "guard", START, evaluations)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_without_a_guard_everything_holds_it():
    assert holds_guard(EvalConfig(), "", START, {"mrr": 0.0})
