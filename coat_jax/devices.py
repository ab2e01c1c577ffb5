"""Where kernels may run."""

from collections.abc import Callable
from functools import wraps

import jax

from pallas_kernels import dispatch


def has_kernel() -> bool:
    """Whether kernels may run here."""
    return dispatch.has_hopper()


def on_one_device(fn: Callable) -> Callable:
    """`fn`, without kernels where arrays may lie on several devices.

    XLA cuts jnp operations as it cuts arrays, but would gather what a kernel takes.
    Within `shard_map` each device has arrays of its own.
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
