"""Stand-ins for kernels, in programs that are traced for their shapes and never run.

A program for a Hopper GPU can be traced on any machine. In the context `for_hopper`
every operation is chosen as on a Hopper GPU, and a kernel is one operation of the
traced program, with the shapes of its results and nothing inside.
"""

import contextlib
import contextvars
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core
from jax.interpreters import batching

from pallas_kernels.dispatch import array_types

# True while kernels are traced as stand-ins.
active: contextvars.ContextVar[bool] = contextvars.ContextVar("active", default=False)
_traces = itertools.count()


@contextlib.contextmanager
def for_hopper() -> Iterator[None]:
    """Traces functions in this context as for a Hopper GPU, with stand-ins.

    All functions are traced anew, because a trace with stand-ins must not run.
    """
    token = active.set(True)
    try:
        with traced_anew():
            yield
    finally:
        active.reset(token)


def traced_anew() -> contextlib.AbstractContextManager[None]:
    """Makes JAX trace functions in this context, even if it has traced them before."""
    # JAX looks up an old trace by its metadata, among others. A new number finds none.
    return set_xla_metadata(trace=str(next(_traces)))


def _new(name: str) -> core.Primitive:
    primitive = core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *operands, results, **_: list(results))

    def mapped(operands, axes, results, **params):
        (size,) = {
            x.shape[axis]
            for x, axis in zip(operands, axes, strict=True)
            if axis is not None
        }
        results = tuple(t.update(shape=(size, *t.shape)) for t in results)
        out = primitive.bind(*operands, results=results, **params)
        return out, [0] * len(out)

    batching.primitive_batchers[primitive] = mapped
    return primitive


class _Launch(NamedTuple):
    """The parameter `launch` of a stand-in, which has the operation's name.

    In programs that run, the parameter `launch` also has the kernel.
    """

    name: str


KERNEL = _new("coat_kernel")
# Policies of `jax.checkpoint` find JAX's own flash attention by these names.
_ATTENTION = _new("dot_product_attention_fwd")
_ATTENTION_GRAD = _new("dot_product_attention_bwd")


def kernel(operation: Any, *arrays: Any) -> Any:
    """Returns tracers with the shapes and dtypes of an operation's results."""
    out = jax.eval_shape(operation.reference, *arrays)
    leaves, tree = jax.tree.flatten(out)
    results = KERNEL.bind(
        *jax.tree.leaves(arrays),
        results=_types(*leaves),
        launch=_Launch(operation.name),
    )
    return tree.unflatten(results)


@jax.custom_vjp
def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Returns a stand-in for flash attention's result, and saves its residuals.

    The residuals are q, k, v, the result, and one float32 number for each query and
    head, as for cuDNN's attention.
    """
    return _attention(q, k, v)[0]


def _attention(q, k, v):
    batch, length, heads, _ = q.shape
    statistics = jax.ShapeDtypeStruct((batch, heads, length), "float32")
    out = _ATTENTION.bind(q, k, v, results=_types(q, statistics))
    o, saved = array_types.varying_alike(out, (q, k, v))
    return o, (q, k, v, o, saved)


def _attention_grads(saved, do):
    grads = _ATTENTION_GRAD.bind(*saved, do, results=_types(*saved[:3]))
    return tuple(array_types.varying_alike(grads, saved))


attention.defvjp(_attention, _attention_grads)


def _types(*arrays: Any) -> tuple[jax.core.ShapedArray, ...]:
    return tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in arrays)
