"""Journeys run whole commands. Checking types at each call would take a third of their time."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def without_checks_of_types():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("jaxtyping.config.jaxtyping_disable", True)
        yield
