"""Tests that a test with its own compilation cache leaves the common one unchanged."""

import jax
import jax.numpy as jnp
from helpers import compiled_cache


def _compile(number: float) -> None:
    """Compiles a program that is different for each number."""
    jax.jit(lambda x: x + number)(jnp.ones(3)).block_until_ready()


def test_a_cache_is_used_within_and_not_after(tmp_path):
    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    _compile(0.1234)
    with compiled_cache.own_settings(**options):
        _compile(0.2345)
        within = set(tmp_path.iterdir())
        jax.config.update("jax_enable_compilation_cache", False)
    assert within
    assert jax.config.jax_enable_compilation_cache
    assert jax.config.jax_compilation_cache_dir != str(tmp_path)
    _compile(0.3456)
    assert set(tmp_path.iterdir()) == within
