"""Operations, the choice of the implementation that runs, and its explanation."""

import abc
import contextlib
import contextvars
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax

from pallas_kernels import versions
from pallas_kernels.checks import warn_once
from pallas_kernels.dispatch import array_types, devices, placement, stand_ins
from pallas_kernels.dispatch.axes import Axes
from pallas_kernels.dispatch.stand_ins import traced_anew

# `mosaic` is a Pallas kernel for Hopper GPUs. `reference` is the same operation in jnp,
# for any device.
Implementation = Literal["mosaic", "reference"]

# Arrays with fewer elements cause no warning that a kernel does not run.
_LARGE = 2**20


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation that runs for one call of an operation.

    Attributes:
      operation: The operation's name.
      arrays: The dtypes and shapes of its operands, except for scalars.
      implementation: The implementation that runs.
      reason: The reason for this choice.
    """

    operation: str
    arrays: tuple[str, ...]
    implementation: Implementation
    reason: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The choices for all operations that a function calls, in the order of calls."""

    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        rows = [("operation", "of", "runs", "calls", "because")]
        for choice, calls in Counter(self.choices).items():
            arrays = " ".join(choice.arrays)
            columns = (choice.operation, arrays, choice.implementation)
            rows.append((*columns, str(calls), choice.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)


_made: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar(
    "choices", default=None
)


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Lists the implementations of this package that `fn(*args, **kwargs)` runs.

    Nothing is computed: `fn` is traced, even if it was traced before. A call that a
    loop or `vmap` repeats counts once.

    Args:
      fn: Any function that JAX can trace, including jitted functions.
      *args: The function's arguments. Only the shapes and dtypes of arrays matter, so
        arrays may be `jax.ShapeDtypeStruct`s. Other arguments are passed unchanged.
      **kwargs: The function's keyword arguments, treated in the same way.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import explain, norm
      >>> print(explain(norm, jnp.ones((4, 256)), implementation="reference"))
      operation  of              runs       calls  because
      norm       float32[4,256]  reference  1      the caller named it
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = {j: x for j, x in enumerate(leaves) if hasattr(x, "shape")}

    def call(arrays):
        merged = [arrays.get(j, leaf) for j, leaf in enumerate(leaves)]
        args, kwargs = jax.tree.unflatten(tree, merged)
        fn(*args, **kwargs)

    choices: list[Choice] = []
    token = _made.set(choices)
    try:
        with traced_anew():
            jax.eval_shape(call, arrays)
    finally:
        _made.reset(token)
    return Explanation(tuple(choices))


def counted() -> contextlib.AbstractContextManager[None]:
    """Returns a context manager under which `explain` sees calls in traced functions.

    Without it, `explain` would miss calls in jitted functions that JAX has traced
    before. The context manager does nothing unless `explain` is tracing a function.
    """
    return contextlib.nullcontext() if _made.get() is None else traced_anew()


@contextlib.contextmanager
def unexplained() -> Iterator[None]:
    """Hides operations that are called in this context from `explain`."""
    token = _made.set(None)
    try:
        yield
    finally:
        _made.reset(token)


def is_explaining() -> bool:
    """Returns whether `explain` is tracing a function."""
    return _made.get() is not None


class Operation(abc.ABC):
    """An operation: its definition in jnp, its kernel, and the axes of its arrays.

    Subclasses are frozen dataclasses of the operation's static parameters. All methods
    take the same arrays. Optional arrays may be None.

    Attributes:
      name: The operation's name.
      fast_in_xla: Whether XLA is about as fast as the kernel, as for matmuls that XLA
        runs in cuBLASLt. There is then no warning if the kernel cannot run.
    """

    name: str
    fast_in_xla = False

    @abc.abstractmethod
    def reference(self, *arrays: Any) -> Any:
        """Computes the operation in jnp."""

    @abc.abstractmethod
    def kernel(self, *arrays: Any) -> Any:
        """Computes the operation with the kernel."""

    @abc.abstractmethod
    def obstacle(self, *arrays: Any) -> str | None:
        """Returns why the kernel cannot compute this call, or None if it can."""

    @abc.abstractmethod
    def axes(self, *arrays: Any) -> tuple[Any, Axes | Any]:
        """Returns a tree of `Axes` for the arrays, and one for the results.

        Each tree has the structure of its arrays, or is a prefix of it.
        """

    def slower(self, *arrays: Any) -> str | None:
        """Returns why a kernel that can run is not the default, or None if it is."""
        del arrays
        return None

    def prefers_kernel(self, *arrays: Any) -> bool:
        """Returns whether the kernel runs by default; `explain` does not list the call.

        This method is for callers that otherwise run another kernel.
        """
        arrays = array_types.varying_alike(arrays)
        why = _against_kernels(arrays) or self.obstacle(*arrays)
        return not (why or self.slower(*arrays))

    def runs(self, *arrays: Any) -> Implementation:
        """Returns the implementation that a call runs by default.

        `explain` lists the call if this is the reference, because the caller may then
        run something else instead.
        """
        choices = _made.get()
        implementation = _choose(self, array_types.varying_alike(arrays), None)
        if choices and implementation == "mosaic":
            choices.pop()  # The call will be listed itself.
        return implementation

    def __call__(
        self, *arrays: Any, implementation: Implementation | None = None
    ) -> Any:
        """Runs the named implementation, or else the fastest that can run.

        Raises:
          ValueError: If the kernel was named and cannot run, or the name is unknown.
        """
        arrays = array_types.varying_alike(arrays)
        chosen = _choose(self, arrays, implementation)
        has_kernel = not isinstance(self, OfParts)
        mesh = array_types.mesh_of(arrays)
        if chosen == "mosaic" and has_kernel and stand_ins.active.get():
            run = stand_ins.kernel
        elif chosen == "mosaic":
            run = placement.on_parts if mesh else type(self).kernel
        else:
            # XLA partitions jnp operations, except where types say how.
            explicit = mesh is not None and mesh.explicit_axes
            run = placement.in_jnp if explicit else type(self).reference
        # The types of kernels' results do not say over which devices they vary.
        return array_types.varying_alike(run(self, *arrays), arrays)


class OfParts(Operation):
    """An operation without a kernel: each device computes its own part in jnp."""

    def kernel(self, *arrays: Any) -> Any:
        """Computes the operation in jnp."""
        return self.reference(*arrays)

    def obstacle(self, *arrays: Any) -> None:
        """Returns None, because jnp can compute with all arrays."""


def _choose(
    operation: Operation, arrays: tuple, implementation: Implementation | None
) -> Implementation:
    """Chooses the named implementation, or else the fastest that can run.

    The choice is recorded if `explain` is tracing a function.
    """
    if implementation not in (None, "mosaic", "reference"):
        raise ValueError(
            f"implementations are 'mosaic' and 'reference', got {implementation!r}"
        )
    reason, choices = "the caller named it", _made.get()
    if implementation is None:
        why = _against_kernels(arrays)
        if not why or choices is not None:  # `explain` shows all reasons.
            obstacle = operation.obstacle(*arrays)
            if obstacle and choices is None:
                _warn(operation, arrays, obstacle)
            objection = obstacle or operation.slower(*arrays)
            why += filter(None, [objection])
        implementation = "reference" if why else "mosaic"
        reason = (
            "; ".join(why) or f"{devices.default_device().device_kind} is a Hopper GPU"
        )
    elif implementation == "mosaic" and (why := operation.obstacle(*arrays)):
        raise ValueError(f"the kernel cannot run: {why}")
    if choices is not None:
        described = _described(arrays)
        choices.append(Choice(operation.name, described, implementation, reason))
    return implementation


def _warn(operation: Operation, arrays: tuple, obstacle: str) -> None:
    """Warns once if XLA computes with large arrays, and more slowly than the kernel."""
    largest = max((x.size for x in jax.tree.leaves(arrays)), default=0)
    if largest >= _LARGE and not operation.fast_in_xla:
        of = " ".join(_described(arrays))
        warn_once(
            f"{operation.name} of {of} runs in XLA and not in a kernel: {obstacle}"
        )


def _against_kernels(arrays: tuple) -> list[str]:
    """Returns the reasons why no kernel runs by default; [] if kernels can run."""
    if not devices.has_hopper():
        device = devices.default_device()
        capability = getattr(device, "compute_capability", None)
        if capability is None:
            return [f"{device.device_kind} is no Hopper GPU"]
        return [
            f"{device.device_kind} has compute capability {capability}, and kernels "
            "need 9.0, Hopper"
        ]
    if elsewhere := devices.other_platforms(arrays):
        return [f"arrays are on a {', '.join(elsewhere)}"]
    if why := versions.kernels_obstacle() or array_types.obstacle(arrays):
        if not stand_ins.active.get():  # Otherwise nothing runs at all.
            warn_once(f"kernels do not run: {why}")
        return [why]
    return []


def _described(arrays: tuple) -> tuple[str, ...]:
    """Returns the dtypes and shapes of the arrays that are not scalars."""
    return tuple(
        f"{x.dtype}[{','.join(map(str, x.shape))}]"
        for x in jax.tree.leaves(arrays)
        if x.ndim
    )
