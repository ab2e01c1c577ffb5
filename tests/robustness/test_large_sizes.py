"""Tests the program `large_sizes` at small sizes."""

import json
from typing import NamedTuple

import pytest
from helpers import compiled_cache

from tests.robustness import large_sizes


class Sizes(NamedTuple):
    """The sizes of a run. The last loss must be below `share` times the first one."""

    steps: int
    elements: int
    share: float


pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[
        Sizes(steps=500, elements=16_000_000, share=0.5),
        Sizes(steps=4000, elements=16_000_000, share=0.01),
    ],
    ids=["short", "long"],
)
def run(request, tmp_path_factory):
    """Returns the sizes and the results of the program, run without a cache."""
    out = tmp_path_factory.mktemp("results") / "large_sizes.json"
    sizes = ["--steps", str(request.param.steps), "--leaves", "8"]
    sizes += ["--elements", str(request.param.elements)]
    sizes += ["--layers", "2", "--repeats", "1"]
    with compiled_cache.own_settings(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "")  # Its processes compute more than they compile.
        large_sizes.main([*sizes, "--out", str(out)])
    return request.param, json.loads(out.read_text())


def _rows(results, piece):
    return {row["case"]: row for row in results["rows"] if row["part"] == piece}


def test_long_runs_stay_beside_optaxs(run):
    sizes, results = run
    for name, row in _rows(results, "steps").items():
        assert row["finite"]
        assert row["last_loss"] < sizes.share * row["first_loss"]
        assert row["ratio"] == pytest.approx(1, abs=0.02), name


def test_a_large_leaf_takes_less_memory_than_optaxs(run):
    sizes, results = run
    rows = _rows(results, "leaf")
    theirs = rows["optax.adamw"]
    # Parameters, gradients and two moments of four bytes, and optax's temporaries.
    assert theirs["compiled_gib"] >= 16 * sizes.elements / 2**30
    for name in ("coat.fp8_adamw", "coat.fused_update"):
        assert rows[name]["compiled_gib"] <= 0.75 * theirs["compiled_gib"]
        # At least the parameters and the gradients, of four bytes.
        assert rows[name]["resident_gib"] >= 0.9 * 8 * sizes.elements / 2**30


def test_times_are_compared_with_those_of_the_plain_twin(run):
    _, results = run
    for piece, bases in {
        "leaves": ("optax.adamw, update", "optax.adamw, init"),
        "layers": ("nnx.remat", "jax.checkpoint"),
    }.items():
        rows = _rows(results, piece)
        assert [rows[base]["ratio"] for base in bases] == [1, 1]
        assert all(row["seconds"] > 0 for row in rows.values())
    named = {bar["name"].partition(":")[0] for bar in results["bars"]}
    assert named >= {"coat.fp8_adamw, update", "coat.fp8_remat of modules"}
