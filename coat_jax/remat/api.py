"""Makes backward passes read FP8 copies of the arrays that autodiff saves.

This module applies COAT's mixed granularity (arXiv 2410.19313, section 5.1) to any
function. The format of a residual of `jax.vjp` depends on how the forward program
computes it and which operations of the backward program read it:

  parameters among the arguments   saved by reference, never copied
  arrays computed from parameters  not saved; recomputed if that is cheap (casts,
    and integer arguments alone    transposes, tables, masks)
  large floating activations       saved in FP8 with per-group scales: groups of 16, or
                                   of up to 128 if only matmuls read the array
  arrays that are computed         not saved; recomputed from the saved arrays
    elementwise from saved arrays
  operands and results of          saved unquantized if the kernel computes a float32
    kernels with a backward          statistic of its operands, as flash attention does.
    kernel that reads both           With `rerun_attention` only FP8 copies of the
                                     operands are saved, and the kernel runs again
  all other arrays                 saved unquantized: integers, masks, per-token
                                   statistics, and arrays that the backward pass takes
                                   the exponential of, divides by, multiplies by again
                                   and again as in a recurrence, or chooses by, as the
                                   gradient of a maximum over windows does

A norm therefore saves an FP8 copy of its input and its statistics. If both inputs of a
gate are slices of one matmul's output, one copy of the output is saved.
`coat_jax.remat.recompute` defines which arithmetic is repeated. Arithmetic that would
amplify the rounding errors of the copies is never repeated.

Flash attention's backward kernel computes probabilities from queries, keys and the
forward kernel's log-sum-exp. With rounded queries and keys the probabilities add up to
one only if the log-sum-exp was computed from the rounded queries and keys, too. The
gradients of a query's scores add up to zero only if the output was computed with the
same probabilities. So either the backward kernel reads exact arrays alone, or the
forward kernel runs again on the copies.

The paper gives the operands of matmuls one scale per tensor, because its matmuls run in
FP8. `fp8_remat` does not run matmuls in FP8, so it can use per-group scales. These need
no amax over a whole array, which several devices may share.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax import nnx

from coat_jax.fusion.attention import attention
from coat_jax.fusion.fuse import fusion
from coat_jax.fusion.gathers import gathers
from coat_jax.quantization.formats import E4M3, Format
from coat_jax.remat.modules import (
    linen_class,
    linen_module,
    nnx_class,
    nnx_module,
    over_nodes,
)
from coat_jax.remat.options import Options
from coat_jax.remat.pytrees import is_pytree_module, pytree_module
from coat_jax.remat.shard_maps import with_shard_maps
from coat_jax.remat.trace import Residual
from pallas_kernels.checks import summary


def fp8_remat[Target](
    target: Target,
    *,
    params_argnums: int | Sequence[int] = 0,
    format: Format = E4M3,
    group: int = 16,
    where: Callable[[Residual], Any] | None = None,
    policy: Callable[..., Any] | None = None,
    key: jax.Array | None = None,
    rerun_attention: bool = False,
) -> Target:
    """Lets the backward pass of a function or Flax module read FP8 residuals.

    The forward program is unchanged, except for matmuls of `fp8_dot_general` and for
    softmax attention. All matmuls of `fp8_dot_general` that read one array are merged,
    and quantize the array once, with a scale for each token. A gate between the matmuls
    of a gated MLP becomes one kernel. A norm before matmuls also becomes one kernel,
    unless it has a custom derivative rule. Before matmuls in BF16 only the gradients of
    gates and activations come from a kernel. On Hopper GPUs, attention that the program
    computes in BF16 by matmuls and a softmax runs as cuDNN's flash attention, if all of
    its masks are booleans and nothing else reads its scores and probabilities. The
    options below do not change this. The saved activations take a tenth to a third of
    the bytes that they take without `fp8_remat`. The docstring of this module lists the
    format of each residual; `coat.residual_report` lists all saved arrays.

    The result works under jit, scan, vmap, shard_map, jax.checkpoint and another
    `fp8_remat`. The arrays of a function of one example may be too small for copies:
    wrap the function that calls `jax.vmap` instead. Forward-mode differentiation and
    second derivatives are not supported. Residuals of sharded arrays are sharded in the
    same way. No data moves between devices if every device has whole groups of the last
    axis.

    If the target calls `shard_map`, `fp8_remat` is also applied to the function within
    it, which runs on each device's shards, unless `where`, `policy` or `key` is given.

    Layers that differ in nothing but the values of arrays are traced once, like a
    function under `jax.jit`. Attributes of NNX modules, values that a function closes
    over and globals that it names are compared at every call. Other values that the
    function reads, such as attributes of classes, must not change.

    Args:
      target: A function, a Linen or NNX module, a Linen or NNX module class, or a
        callable pytree with arrays, such as an Equinox module, which becomes a pytree
        of a subclass with the same leaves. The variables of a module are parameters,
        and the arguments of its call are activations. A class becomes a class of the
        same name. An unbound Linen module becomes a module with the same fields, so
        parameters keep their paths. A Linen module that is already bound, as within
        `nn.compact`, becomes a function. An NNX module shares its variables with the
        result. Changes that a call makes to NNX objects persist, except changes to
        their parameters.
      params_argnums: For functions, the positions of the arguments that are parameters,
        also where a call passes them by name. Parameters are saved by reference,
        neither copied nor quantized. The default is the first argument, as in
        `f(params, x)`. NNX objects and values that a function closes
        over always count as parameters. Arguments that are not arrays are static.
      format: The format of the FP8 copies.
      group: The number of neighbours on the last axis that share a scale. Residuals
        that only matmuls read may have larger groups. Kernels support 16, 32, 64, 128
        and 256.
      where: Selects which of the quantizable residuals are quantized; by default all.
        It is called with a `Residual`, which has the shape, dtype, `checkpoint_name`
        and reader of the residual. The other residuals stay unquantized. A group with
        an infinity becomes NaN, so exclude additive masks that are floating arguments,
        or close over them.
      policy: A policy of `jax.checkpoint`, which selects the arrays to save; the
        backward pass recomputes the others. By default the arrays that autodiff saves
        are saved. Then only elementwise arithmetic on saved arrays and FP8 codes of
        weights are recomputed, but no matmul, no other kernel, and no sum over an axis.
        With `jax.checkpoint_policies.nothing_saveable` only incoming activations are
        saved. All other policies, including policies of a `jax.checkpoint` within the
        function, also save the amaxes of arrays that FP8 matmuls quantize, so that
        saved codes keep their scales. An array that a policy offloads to "pinned_host"
        is quantized first, unless a loop within the function computes it; an array that
        a policy offloads to "device" is saved on the device.
      key: A key for stochastic rounding, typed or raw. Each number is rounded to one of
        its two neighbouring codes, and is unchanged on average. All calls of the result
        share the key. So call `fp8_remat` where there is a fresh key, as in a training
        step: `fp8_remat(model, key=key)(x)`.
      rerun_attention: Whether flash attention runs again in the backward pass, on FP8
        copies of queries, keys and values. By default queries, keys, values, output and
        statistics of flash attention are saved unquantized, and take two to four times
        the bytes. Attention that XLA computes has no statistics, and is not affected.
        Attention in a loop or a branch of the function is not affected either: call
        `fp8_remat` on the loop's body.

    Returns:
      An object of the same kind as `target`, with the same signature.

    Raises:
      TypeError: If `target` is not one of the kinds above.
      ValueError: If an option is invalid, if a function is called without an argument
        that `params_argnums` names, or if a policy offloads arrays to another kind of
        memory.

    Examples:
      >>> import coat_jax as coat, jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> mlp = nn.Sequential([nn.Dense(256), nn.gelu, nn.Dense(64)])
      >>> light = coat.fp8_remat(mlp)
      >>> params = light.init(jax.random.key(0), jnp.ones((32, 64)))
      >>> grads = jax.grad(lambda p: light.apply(p, jnp.ones((32, 64))).sum())(params)

      Save only the outputs of matmuls, and quantize those without a name or named "h":

      >>> light = coat.fp8_remat(
      ...     mlp,
      ...     policy=jax.checkpoint_policies.dots_saveable,
      ...     where=lambda residual: residual.name in ("h", None),
      ... )
    """
    options = options_of(format, group, where, policy, key, rerun_attention)
    try:
        argnums = tuple(map(operator.index, np.atleast_1d(params_argnums)))
    except (TypeError, ValueError):
        raise ValueError(
            f"params_argnums must be an int or several, got {params_argnums!r}"
        ) from None
    if isinstance(target, type) and issubclass(target, nnx.Pytree):
        return nnx_class(target, options)
    if isinstance(target, nnx.Pytree):
        return nnx_module(target, options)
    if isinstance(target, type) and issubclass(target, nn.Module):
        return linen_class(target, options)
    if isinstance(target, nn.Module):
        return linen_module(target, options)
    if is_pytree_module(target):
        return pytree_module(target, options)
    if callable(target) and not isinstance(target, type):
        return over_nodes(target, argnums, options)
    raise TypeError(
        "fp8_remat takes a function, a Flax module, a Flax module class or a callable "
        f"pytree with arrays, got {summary(target)}"
    )


def options_of(
    format: Format,
    group: int,
    where: Callable[[Residual], bool] | None,
    policy: Callable[..., Any] | None,
    key: jax.Array | None,
    rerun_attention: bool,
) -> Options:
    """Returns the options of `fp8_remat`, with the rewrites of programs that it makes.

    The arguments are the options that `fp8_remat` documents.
    """
    options = Options(
        format=format,
        group=group,
        where=where,
        policy=policy,
        key=key,
        rerun_attention=rerun_attention,
        rewrites=(gathers, attention, fusion(format, group, where, key, policy)),
    )
    return with_shard_maps(options)


# The `fp8_remat` of recipes that run flash attention again on FP8 copies.
rerun = partial(fp8_remat, rerun_attention=True)
