"""Fixtures and settings of all tests."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest

# On CPUs LLVM takes most of the tests' time, so its optimizations are off. On GPUs
# programs are compiled as users compile them.
flags = os.environ.setdefault("XLA_FLAGS", "")
if not Path("/dev/nvidia0").exists():
    fast = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ["XLA_FLAGS"] = f"{fast} {flags}".strip()
# Warpgroups of interpreted kernels wait for one another in threads of XLA's pool, which
# has one for each core by default.
os.environ.setdefault("NPROC", "16")
# Several processes share a GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Traces are many small objects that live on, so a collection is costly.
gc.set_threshold(50_000)

# Every run uses the same examples; `--hypothesis-profile=fresh` looks for new ones.
hypothesis.settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, max_examples=20
)
hypothesis.settings.register_profile("fresh", deadline=None, max_examples=200)
hypothesis.settings.load_profile("fixed")


def pytest_configure(config: pytest.Config):
    """Sets the compilation cache, and makes virtual devices if the tests need them.

    `pytest --cache-clear` empties the cache. The number of devices is fixed when a
    process starts, so tests on several devices run in a call of their own:
    `pytest -m distributed`.
    """
    if _makes_devices(config.option.markexpr):
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"
    if cache := getattr(config, "cache", None):  # None with -p no:cacheprovider.
        folder = str(cache.mkdir("compiled"))
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", folder)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        # Without cached bytecode every process would compile the modules it imports.
        if sys.dont_write_bytecode:
            os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
            os.environ["PYTHONPYCACHEPREFIX"] = str(cache.mkdir("bytecode"))


def _makes_devices(markexpr: str) -> bool:
    """Returns whether a run with `-m markexpr` has eight virtual devices."""
    return markexpr.startswith("distributed")


LONGEST = (
    "test_compile_sm90.py",
    "test_types.py",
    "test_pretrain.py",
    "test_pretrain_compare.py",
    "test_bench_compile.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]):
    """Moves the longest files to the front, so that workers end at similar times."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_runtest_setup(item: pytest.Item):
    """Fails a test that needs eight devices if `pytest_configure` has made only one."""
    expression = item.config.option.markexpr
    if item.get_closest_marker("distributed") and not _makes_devices(expression):
        pytest.fail(
            'it needs eight devices: run it with -m distributed or -m "distributed and '
            f'...", got -m {expression!r}',
            pytrace=False,
        )


def pytest_collection_finish() -> None:
    """Exempts the objects that exist now from later garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def shared_trainers() -> Iterator[None]:
    """Lets the runs of the main job in a module share their compiled trainers."""
    from helpers import trainers  # Most tests do without the main job.

    with trainers.shared():
        yield
