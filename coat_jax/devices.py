"""Checks of whether Pallas kernels may run on the devices in use."""

from collections.abc import Callable
from functools import wraps

import jax

from pallas_kernels import dispatch


def has_kernel() -> bool:
    """Returns whether kernels may run on the default device, a Hopper GPU."""
    return dispatch.has_hopper()


def on_one_device(fn: Callable) -> Callable:
    """Wraps `fn` to run without kernels if arrays may lie on several devices.

    XLA partitions jnp operations like their arrays, but would gather the operands of a
    kernel on every device. Kernels are allowed if there is only one device, and within
    `shard_map`, where each device has its own part of every array.
    """

    @wraps(fn)
    def wrapped(*args):
        mesh = jax.sharding.get_abstract_mesh()
        if jax.device_count() == 1 or (mesh.manual_axes and mesh.are_all_axes_manual):
            return fn(*args)
        reason = "outside of shard_map arrays may lie on several devices"
        with dispatch.without_kernels(reason):
            return fn(*args)

    return wrapped
