"""Settings of JAX's cache of compiled programs for single tests."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

_SETTINGS = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@contextlib.contextmanager
def own_settings(**settings: object) -> Iterator[None]:
    """Uses these cache settings in a context, and restores all initial ones at its end.

    JAX reads the settings only at its first compilation, so the cache is reset.
    """
    initial = {name: getattr(jax.config, name) for name in _SETTINGS}
    try:
        _use(settings)
        yield
    finally:
        _use(initial)


def _use(settings: dict[str, object]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
