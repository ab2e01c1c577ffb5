"""Which implementation of an operation runs here, and why."""

from typing import Literal

import jax

# `mosaic` is a kernel for Hopper GPUs, `reference` its meaning in jnp, for any device.
Implementation = Literal["mosaic", "reference"]


def has_hopper() -> bool:
    """Whether JAX's default device is a GPU with compute capability 9.0."""
    device = jax.devices()[0]
    return device.platform == "gpu" and device.compute_capability == "9.0"


def choose(
    implementation: Implementation | None, obstacle: str | None
) -> Implementation:
    """What to run: the one that was named, or the fastest that can run.

    Args:
      implementation: What the caller named, if anything.
      obstacle: Why the kernel cannot run, whatever the device; None if it can.

    Raises:
      ValueError: If the kernel was named and cannot run, or the name is unknown.
    """
    if implementation is None:
        return "mosaic" if obstacle is None and has_hopper() else "reference"
    if implementation not in ("mosaic", "reference"):
        raise ValueError(
            f"implementations are 'mosaic' and 'reference', got {implementation!r}"
        )
    if implementation == "mosaic" and obstacle is not None:
        raise ValueError(f"the kernel cannot run: {obstacle}")
    return implementation
