"""Tests that kernels which one process lowered are read by later ones.

The tests lower programs for a GPU, but need none.
"""

import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import checks
from pallas_kernels.dispatch import fingerprints, lowering, storage
from pallas_kernels.dispatch.fingerprints import UnknownError, fingerprint

_F32, _BF16, _E4M3 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn


def rows(*shape, dtype=_BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def matmul(a, b, **options):
    return pk.matmul(a, b, _F32(1), _F32(1), implementation="mosaic", **options)


def quantize(x, **options):
    return pk.quantize_rows(x, implementation="mosaic", **options)


CODES = rows(256, 256, dtype=_E4M3)
# Programs with kernels that differ in one thing from the first or another one.
PROGRAMS = {
    "rows": (quantize, rows(256, 256)),
    "other sizes": (quantize, rows(512, 256)),
    "another dtype": (quantize, rows(256, 256, dtype=_F32)),
    "other codes": (partial(quantize, dtype=jnp.float8_e5m2), rows(256, 256)),
    "matmul": (matmul, CODES, CODES),
    "other operands": (matmul, CODES, rows(256, 256, dtype=jnp.float8_e5m2)),
    "a float32 result": (partial(matmul, out_dtype=_F32), CODES, CODES),
}


@pytest.fixture(autouse=True)
def fresh():
    """Makes each test lower its kernels again."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture
def folder(tmp_path):
    """Makes a folder of JAX's persistent compilation cache, and returns ours in it."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / "coat_kernels"
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def launches(monkeypatch):
    """Returns a list that collects the launches that Pallas lowers."""
    collected, calls = [], lowering._Launch._calls

    def counted(launch):
        collected.append(launch)
        return calls(launch)

    monkeypatch.setattr(lowering._Launch, "_calls", counted)
    return collected


def text(name):
    fn, *arrays = PROGRAMS[name]
    traced = jax.jit(fn).trace(*arrays)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_later_process_emits_the_same_kernels(folder, launches, name):
    first = text(name)
    assert launches
    assert len(list(folder.iterdir())) == len(launches)
    launches.clear()
    jax.clear_caches()
    assert text(name) == first
    assert not launches


def test_kernels_that_differ_have_different_files(folder):
    stored = {}
    for name in PROGRAMS:
        text(name)
        stored |= {path: storage.read(path) for path in folder.iterdir()}
    kernels = [tuple(call.kernel for call in calls.calls) for calls in stored.values()]
    assert len(set(kernels)) == len(kernels) >= len(PROGRAMS)


_PROCESS = """
import test_stored_kernels as tests
tests.text("matmul")
"""


def test_another_process_reads_the_same_file(folder, launches):
    text("matmul")
    path, *others = folder.iterdir()
    assert not others
    written = path.stat().st_mtime_ns
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent),
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    subprocess.run([sys.executable, "-c", _PROCESS], env=environment, check=True)
    assert [path] == list(folder.iterdir())
    assert path.stat().st_mtime_ns == written


@pytest.mark.parametrize("damage", [b"", b"no digest", b"0" * 64 + b"\nother"])
def test_a_damaged_file_is_written_again(folder, launches, damage):
    first = text("rows")
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage or whole[:-1])
    jax.clear_caches()
    assert text("rows") == first
    assert len(launches) == 2
    assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_written_gives_one_warning(folder):
    checks.warn_once.cache_clear()
    folder.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="are not stored for later processes"):
        text("rows")
    text("matmul")  # A second warning would be an error.


def test_a_value_without_a_fingerprint_is_not_stored(folder, launches, monkeypatch):
    checks.warn_once.cache_clear()
    monkeypatch.setattr("pallas_kernels.dispatch.fingerprints._UNREAD", {})
    with pytest.warns(UserWarning, match="ClosedRule has no fingerprint"):
        text("rows")
    assert launches
    assert not folder.exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("jax_enable_compilation_cache", False),
        ("jax_compilation_cache_dir", None),
        ("jax_compilation_cache_dir", "gs://bucket/folder"),
    ],
)
def test_without_a_local_cache_nothing_is_stored(folder, launches, option, value):
    before = getattr(jax.config, option)
    jax.config.update(option, value)
    text("rows")
    jax.config.update(option, before)
    assert launches
    assert not folder.exists()


FUNCTIONS = {
    "a sum": lambda x, y: x + y,
    "a difference": lambda x, y: x - y,
    "its operands the other way": lambda x, y: y - x,
    "the first argument": lambda x, y: x,
    "the second argument": lambda x, y: y,
    "a number": lambda x, y: x * 2,
    "another number": lambda x, y: x * 3,
    "a parameter": lambda x, y: x.reshape(2, 4),
    "another parameter": lambda x, y: x.reshape(4, 2),
    "another dtype": lambda x, y: x.astype(_BF16),
    "a jitted function": lambda x, y: jax.jit(lambda x: x * 2)(x),
    "another jitted function": lambda x, y: jax.jit(lambda x: x * 3)(x),
    "a loop": lambda x, y: jax.lax.fori_loop(0, 3, lambda i, x: x * y, x),
    "a longer loop": lambda x, y: jax.lax.fori_loop(0, 4, lambda i, x: x * y, x),
}


def test_programs_have_the_same_fingerprint_only_if_they_do_the_same():
    def of(fn):
        return fingerprint(jax.make_jaxpr(fn)(jnp.ones(8), jnp.ones(8)))

    fingerprints = {name: of(fn) for name, fn in FUNCTIONS.items()}
    assert len(set(fingerprints.values())) == len(FUNCTIONS)
    assert of(lambda first, second: 2 * first) == of(lambda z, _: 2 * z)
    assert of(lambda x, y: x * 2) == fingerprints["a number"]


def test_numbers_of_numpy_count():
    def of(number):
        return fingerprint(jax.make_jaxpr(lambda x: x + number)(jnp.arange(3)))

    assert of(np.int32(7)) == of(np.int32(7)) != of(np.int32(8))


@pytest.mark.parametrize("value", [lambda: 0, object(), jax.jit(abs), iter(())])
def test_functions_and_foreign_objects_have_no_fingerprint(value):
    with pytest.raises(UnknownError, match="has no fingerprint"):
        fingerprints._Reader().digest((1, {"value": value}))
