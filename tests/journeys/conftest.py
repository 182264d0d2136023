"""Programs of the pages are compiled once, as a user's cache does: most trainings are of the same shape."""

from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="package", autouse=True)
def compiled_once(tmp_path_factory) -> Iterator[None]:
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    keep_compiled(str(tmp_path_factory.mktemp("compiled")), 0.0)
    yield
    keep_compiled(*before)


def keep_compiled(folder: str | None, least_seconds: float) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least_seconds)
    compilation_cache.reset_cache()
