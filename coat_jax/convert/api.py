"""Converts a model to FP8 matmuls and FP8 residuals, without changes to its code."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from flax import linen as nn
from flax import nnx

from coat_jax.convert.linen import linen_model
from coat_jax.convert.matmuls import OF_FUNCTION, Conversion
from coat_jax.convert.objects import object_model
from coat_jax.convert.record import ModelRecord
from coat_jax.convert.rules import Rule, Rules, chooser
from coat_jax.quantization.formats import E4M3, Format
from coat_jax.remat.api import options_of
from coat_jax.remat.modules import over_nodes
from coat_jax.remat.options import Options
from coat_jax.remat.pytrees import is_pytree_module
from coat_jax.remat.trace import Residual
from pallas_kernels.checks import summary


def fp8[Model](
    model: Model,
    *,
    blocks: Rule | None = None,
    matmuls: Rule | None = None,
    format: Format = E4M3,
    group: int = 16,
    where: Callable[[Residual], Any] | None = None,
    policy: Callable[..., Any] | None = None,
    rerun_attention: bool = False,
) -> Model:
    """Converts a model, so that its blocks' matmuls run in FP8 and save FP8 residuals.

    The blocks of the model, such as the layers of a transformer, run with
    `fp8_dot_general` and `fp8_remat`, without changes to the model's code. Every matmul
    of an activation and a parameter can be converted, as in `nn.Dense`, `nnx.Einsum` or
    `x @ w`, and also the matmuls of experts by `jax.lax.ragged_dot`. Embeddings, the
    head and anything else outside the blocks stay as they are. `coat.fp8_report` lists
    the matmuls of the blocks, and why some of them stay as they are. A block in which
    no matmul is converted gives one warning. Blocks may be in any container and
    attribute, and may be called by any method that takes arrays. Softmax attention that
    a block computes with matmuls runs as flash attention, as under `fp8_remat`.

    Args:
      model: A Linen or NNX module; a callable pytree, such as an Equinox module, in
        which all arrays are parameters; or a function f(params, ...), which is one
        block. A pytree without numbered blocks is one block, too.
      blocks: The paths of the modules that are blocks, as regular expressions that
        match a whole path, or as a function of a path. By default the outermost
        numbered modules with two or more matrices, such as "layers/0" or
        "encoderblock_3". Layers that a scan runs are not numbered: name them, as in
        `blocks="layers"`. If a rule names a container, the modules in it are blocks.
      matmuls: The paths of the parameters with matmuls in FP8, such as
        ".*/(up|down)/kernel"; a rule like `blocks`. By default all matmuls with at
        least 128 inputs and 128 outputs, in multiples of 16, except routers. A router
        is a matmul with at most 1,024 outputs on which a choice (`top_k`, `argmax`,
        `sort`) depends without another matmul in between. Matmuls within a loop, a
        `jax.checkpoint` or a custom derivative stay as they are, with a warning. With
        an empty list, `matmuls=()`, all matmuls stay as they are, so that outputs are
        the model's own, and blocks only save FP8 residuals.
      format: The format of FP8 copies of residuals. `fp8_remat` documents this argument
        and the following ones in full.
      group: The number of neighbours on the last axis that share a scale.
      where: A function that selects the residuals to quantize.
      policy: A policy of `jax.checkpoint`, which selects the arrays to save.
      rerun_attention: Whether the backward pass runs flash attention again, on FP8
        copies of its operands.

    Returns:
      A model of the same kind. Its parameters have the same paths. An NNX model
      shares its variables with the result.

    Raises:
      TypeError: If `model` is neither a module, nor a callable pytree, nor a function.
      ValueError: If a rule or an option is invalid, or no block is found; a Linen
        module raises this error when it is applied, because it has no parameters
        earlier. A converted model raises this error when it is called, if no matmul of
        any block becomes an FP8 matmul. Exceptions are `matmuls=()`, and a function
        that has only matmuls of two activations or of two parameters.

    Examples:
      >>> import coat_jax as coat, jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> class Block(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return x + nn.Dense(128)(nn.gelu(nn.Dense(512)(x)))
      >>> model = coat.fp8(nn.Sequential([Block(), Block(), nn.Dense(10)]))
      >>> x = jnp.ones((4, 128))
      >>> params = model.init(jax.random.key(0), x)
      >>> model.apply(params, x).shape
      (4, 10)
    """
    rules = Rules(blocks=blocks, matmuls=matmuls)
    options = options_of(format, group, where, policy, None, rerun_attention)
    if isinstance(model, nn.Module):
        return linen_model(model, rules, options)
    if isinstance(model, nnx.Pytree) or is_pytree_module(model):
        return object_model(model, rules, options)
    if callable(model) and not isinstance(model, type):
        return _function(model, rules, options)
    raise TypeError(
        "fp8 takes a Flax module, a callable pytree with arrays or a function, got "
        f"{summary(model)}"
    )


def _function(fn: Callable, rules: Rules, options: Options) -> Callable:
    """Returns a converted function; all of `fn` is one block."""
    conversion = Conversion(
        depth=OF_FUNCTION,
        chosen=None if rules.matmuls is None else chooser("matmuls", rules.matmuls),
        model=ModelRecord.of(rules),
        where="",
    )

    @wraps(fn)
    def call(*args, **kwargs):
        light = options.after(conversion.logged())
        return over_nodes(fn, (0,), light)(*args, **kwargs)

    return call
