"""The device that a program is traced for."""

import jax

from pallas_kernels.dispatch import stand_ins


def default_device() -> jax.Device:
    """Returns the device that programs run on if their arrays say nothing else."""
    return jax.devices()[0]


def target_platform() -> str:
    """Returns the platform that the program is traced for, such as "gpu".

    An abstract mesh may have a device to compile for. Otherwise it is the default one.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (device or default_device()).platform


def has_hopper() -> bool:
    """Returns whether JAX's default device is a GPU with compute capability 9.0.

    A program that is traced with stand-ins is one for such a GPU.
    """
    if stand_ins.active.get():
        return True
    device = default_device()
    return device.platform == "gpu" and device.compute_capability == "9.0"


def has_gpu() -> bool:
    """Returns whether JAX's default device is a GPU."""
    return default_device().platform == "gpu"


def multiprocessors() -> int:
    """Returns the number of multiprocessors of the target GPU; 132 if it is unknown."""
    # An abstract device is the target of a compilation without that GPU.
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and abstract.num_cores:
        return abstract.num_cores
    return getattr(default_device(), "core_count", None) or 132
