"""The device that a program is traced for."""

from typing import Any

import jax

from pallas_kernels.dispatch import stand_ins


def default_device() -> jax.Device:
    """Returns the device that programs run on unless their arrays are elsewhere.

    `jax.default_device` chooses it for the programs that are traced in its context.
    """
    device = jax.config.jax_default_device
    if isinstance(device, str):  # The name of a platform.
        return jax.devices(device)[0]
    return device or jax.devices()[0]


def target_platform() -> str:
    """Returns the platform that the program is traced for, such as "gpu".

    The current abstract mesh may have a device to compile for. Otherwise the target is
    the default device.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (device or default_device()).platform


def other_platforms(arrays: Any) -> list[str]:
    """Returns the platforms of arrays, except for the default device's platform.

    Tracers are left out, because they have no device yet.
    """
    platforms = {
        device.platform
        for x in jax.tree.leaves(arrays)
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
        for device in x.devices()
    }
    return sorted(platforms - {default_device().platform})


def has_hopper() -> bool:
    """Returns whether JAX's default device is a GPU with compute capability 9.0.

    With stand-ins for kernels, programs are always traced as for such a GPU.
    """
    if stand_ins.active.get():
        return True
    device = default_device()
    return device.platform == "gpu" and device.compute_capability == "9.0"


def has_gpu() -> bool:
    """Returns whether JAX's default device is a GPU."""
    return default_device().platform == "gpu"


def is_alone() -> bool:
    """Returns whether JAX has one device, so that no array is split over several."""
    return jax.device_count() == 1


def multiprocessors() -> int:
    """Returns the number of multiprocessors of the target GPU; 132 if it is unknown."""
    # An abstract device is the target of a compilation without that GPU.
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and abstract.num_cores:
        return abstract.num_cores
    return getattr(default_device(), "core_count", None) or 132
