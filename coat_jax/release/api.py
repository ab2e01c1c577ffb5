"""A loss and an optimizer's step in one pass: gradients need no memory of their own."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Key

from coat_jax.optimizers.wrapper import as_transformation
from coat_jax.release.checks import check_axes, check_layers, is_fused, warn_of_scans
from coat_jax.release.parts import Clip, Optimizer, Parameters, as_floats
from coat_jax.release.taps import Release
from pallas_kernels import versions
from pallas_kernels.checks import check_flags, is_positive_number, typed_key


def value_and_update(
    loss: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    max_norm: float | None = None,
    skip_not_finite: bool = False,
    return_norms: bool = False,
) -> Callable[..., tuple[Any, ...]]:
    """Returns a function that computes a loss and the optimizer's step in one pass.

    The function takes the place of `jax.value_and_grad` followed by the optimizer. Each
    parameter is stepped within the backward pass, as soon as its gradient is complete,
    and the gradient need not exist after the step. For layers under `coat.scan_layers`
    and `coat.apply_layer` the gradients of one layer exist at a time: 12 GiB of
    gradients of Llama-2-7B become 0.4 GiB. In torch this is known as the optimizer in
    backward, or as gradient release (LOMO, arXiv 2306.09782).

    If `tx` ends in `coat.fp8_adamw`, the step is `coat.fused_update`, otherwise
    `tx.update` and `optax.apply_updates`. The results are equal to the results of these
    functions after `jax.grad`, bit for bit if gradients are BF16.

    Each parameter must be stepped by its own gradient alone. Transformations that read
    more are refused with a `ValueError` that names an alternative:

    - `optax.clip_by_global_norm` in the chain. Set `max_norm` here.
    - `optax.MultiSteps` and other sums of gradients, which are as large as gradients.
      Use a larger batch, for which there is memory without gradients.
    - `optax.apply_if_finite`. Set `skip_not_finite` here.
    - Steps that read the loss, as `optax.contrib.reduce_on_plateau` and
      `optax.polyak_sgd` do. Use `jax.value_and_grad`.
    - For parameters in `coat.scan_layers`, norms of a whole parameter, as in
      `optax.lamb`, `optax.lars`, `optax.adafactor` or `optax.contrib.muon`: a layer
      and the stack have different norms. Unrolled layers may use them.

    An optimizer that treats parameters by their size or by their position in the tree
    sees a layer in place of a stack, and a part in place of the tree. This is not
    detected: select parameters by their paths or their numbers of axes.

    Args:
      loss: A function of the parameters and of further arguments, which returns the
        loss, a scalar. Stacks of layers in it should run in `coat.scan_layers`.
      tx: The optimizer.
      has_aux: Whether `loss` returns a pair of the loss and auxiliary data.
      max_norm: The largest global norm of the gradients, to which they are scaled as by
        `optax.clip_by_global_norm`. Clipping takes a second backward pass over the same
        saved activations: the first computes the norm, the second steps. A step then
        has 5/3 of the matmuls. None does not clip.
      skip_not_finite: Whether a step leaves parameters and state as they are if the
        loss is not finite, or with `max_norm`, if the norm of the gradients is not.
        Without `max_norm`, a gradient that is not finite although the loss is finite
        does not skip the step, because other layers have been stepped by then. Within
        `shard_map` the loss of one device skips the step of all.
      return_norms: Whether to also return each gradient's norm before clipping. It
        needs `max_norm`.

    Returns:
      A function of parameters, the optimizer's state and the further arguments of
      `loss`. It returns the loss (with `has_aux`, the pair), the parameters and the
      state, and with `return_norms` the gradients' norms, float32, in a tree like the
      parameters. Under `jax.jit` donate parameters and state, so that they change in
      place. The function's own keyword arguments, which `loss` does not get, are:

      - `key`: A key for stochastic rounding of BF16 parameters; see
        `coat.fused_update`.
      - `max_loss`: With `skip_not_finite`, a step with a larger loss is skipped, too.

    Raises:
      TypeError: If `tx` is not an optax transformation. The returned function raises it
        for parameters and losses that are not floating, and for a loss that is not a
        scalar.
      ValueError: If `max_norm` is not positive, a flag is not a bool, or
        `return_norms` is set without `max_norm`. The returned function raises it for
        optimizers as above, for a key that `tx` has no use for, for `max_loss` without
        `skip_not_finite`, for a `loss` with an argument named `key` or `max_loss` that
        is not passed by position, for parameters that two layers read, and within
        `jax.pmap` and `jax.shard_map(check_vma=False)`, where gradients are not summed
        over devices.

    Warns:
      UserWarning: If a parameter is a stack under `jax.lax.scan`, as `flax.nnx.scan`
        and `flax.linen.scan` make it, or if `coat.scan_layers` is inside another
        transformation, or gets large arrays that the loss computes from parameters,
        such as a cast. The step is right, but the stack's whole gradient exists at
        once.

    Examples:
      >>> import coat_jax as coat, jax, jax.numpy as jnp
      >>> from coat_jax.models import llama
      >>> from flax import nnx
      >>> config = llama.LlamaConfig(
      ...     vocab_size=256, hidden_size=64, intermediate_size=128, num_layers=2,
      ...     num_heads=4, num_kv_heads=2, param_dtype=jnp.bfloat16)
      >>> graph, params = nnx.split(llama.Llama(config, rngs=nnx.Rngs(0)))
      >>> def loss(params, tokens):
      ...     model = nnx.merge(graph, params)  # Its layers are under scan_layers.
      ...     return llama.cross_entropy(model, tokens[:, :-1], tokens[:, 1:])
      >>> tx = coat.fp8_adamw(1e-3)
      >>> state = tx.init(params)
      >>> step = jax.jit(coat.value_and_update(loss, tx), donate_argnums=(0, 1))
      >>> tokens = jnp.zeros((1, 9), jnp.int32)
      >>> value, params, state = step(params, state, tokens, key=jax.random.key(0))
    """
    tx = as_transformation(tx, "tx")
    if max_norm is not None and not is_positive_number(max_norm):
        raise ValueError(f"max_norm must be a positive number, got {max_norm!r}")
    check_flags(
        has_aux=has_aux, skip_not_finite=skip_not_finite, return_norms=return_norms
    )
    if return_norms and max_norm is None:
        raise ValueError(
            "return_norms needs max_norm, whose backward pass computes the norms"
        )

    def step(
        params: optax.Params,
        opt_state: optax.OptState,
        *args: Any,
        key: Key[Array, ""] | None = None,
        max_loss: Array | float | None = None,
        **kwargs: Any,
    ) -> tuple:
        if max_loss is not None and not skip_not_finite:
            raise ValueError("max_loss needs skip_not_finite, which skips the step")
        options = {"key": key, "max_loss": max_loss}
        names = [name for name, option in options.items() if option is not None]
        _check_names(loss, (params, *args), names)
        check_axes()
        whole = Parameters(params, opt_state)
        _check_floating(whole)
        key = None if key is None else typed_key(key)
        fused = is_fused(tx, whole, opt_state)
        if key is not None and not fused:
            raise ValueError(
                "key is for the stochastic rounding of coat.fp8_adamw, in which the "
                "optimizer does not end"
            )
        optimizer = Optimizer(tx=tx, params=whole, is_fused=fused, key=key)
        release = Release(params=whole)

        def tapped_loss(leaves, states, sums):
            with release.tapped(leaves, states, sums) as params:
                return loss(params, *args, **kwargs)

        states = [whole.state_of(j) for j in range(len(whole.leaves))]
        arguments = whole.leaves, as_floats(states), jnp.zeros(len(states))
        value, vjp, *aux = jax.vjp(tapped_loss, *arguments, has_aux=has_aux)
        _check_loss(value)
        check_layers(optimizer, release.stacked)

        def value_of(params):
            result = loss(params, *args, **kwargs)
            return result[0] if has_aux else result

        if not release.has_warned:
            warn_of_scans(value_of, whole, release.stacked)
        ok, clip, norms = jnp.isfinite(value), None, None
        if max_loss is not None:
            ok = ok & (value <= max_loss)
        if max_norm is not None:
            sums = _sums_of_squares(release, vjp, value)
            clip = Clip(norm=jnp.sqrt(jnp.sum(sums)), limit=max_norm)
            ok = ok & jnp.isfinite(clip.norm)
            norms = whole.treedef.unflatten(jnp.sqrt(sums))
        release.optimizer = dataclasses.replace(optimizer, clip=clip)

        def stepped():
            return _stepped(release, vjp, value, states)

        if skip_not_finite:
            same = whole.leaves, states, whole.shared()
            leaves, states, shared = lax.cond(_on_all(ok), stepped, lambda: same)
        else:
            leaves, states, shared = stepped()
        results = (
            (value, *aux) if has_aux else value,
            whole.treedef.unflatten(leaves),
            whole.whole_state(states, shared),
        )
        return (*results, norms) if return_norms else results

    return step


def _sums_of_squares(
    release: Release, vjp: Callable, value: Array
) -> Float[Array, " parameters"]:
    """Computes each gradient's sum of squares in a backward pass of its own."""
    release.mode, release.readers = "norm", {}
    *_, sums = vjp(jnp.ones_like(value))
    release.mode = "step"
    return sums


def _stepped(release: Release, vjp: Callable, value: Array, states: list) -> tuple:
    """Runs the backward pass, which steps the parameters.

    Returns:
      Parameters, their states, and the nodes of the state that belong to no parameter.
    """
    release.readers = {}
    leaves, floats, _ = vjp(jnp.ones_like(value))
    params = release.params
    # The gradients of parameters that the loss does not depend on are zero.
    unread = [j for j in range(len(leaves)) if j not in release.readers]
    zeros = {j: jnp.zeros_like(params.leaves[j]) for j in unread}
    old = {j: params.leaves[j] for j in unread}, {j: states[j] for j in unread}
    new, state = release.optimizer.step(zeros, *old)
    after = params.states_after(state, unread)
    stored = [
        after[j] if j in after else params.stored(j, floats[j])
        for j in range(len(leaves))
    ]
    leaves = [new.get(j, leaf) for j, leaf in enumerate(leaves)]
    # Counts do not depend on gradients, and are advanced once.
    return leaves, stored, params.shared_after(state)


def _on_all(ok: Bool[Array, ""]) -> Bool[Array, ""]:
    """Returns whether `ok` is true on all devices, within `shard_map`.

    Gradients are summed over the devices, so all of them step or none does.
    """
    axes = tuple(versions.varying_axes(ok))
    return lax.pmin(ok.astype(jnp.int32), axes) > 0 if axes else ok


def _check_names(loss: Callable, arguments: tuple, names: Sequence[str]) -> None:
    """Raises ValueError if an option of the step has the name of a loss's argument.

    Args:
      loss: The loss.
      arguments: The arguments that the loss gets by position.
      names: The names of the options.
    """
    try:
        signature = inspect.signature(loss)
        bound = signature.bind_partial(*arguments).arguments
    except (TypeError, ValueError):  # The call of the loss says what is wrong.
        return
    for name in names:
        if name in signature.parameters and name not in bound:
            raise ValueError(
                f"{name} is an option of the step, which the loss does not get, but "
                f"the loss has an argument {name!r}, too: give it by position"
            )


def _check_loss(value: Any) -> None:
    is_scalar = jax.tree_util.all_leaves([value]) and jnp.shape(value) == ()
    if is_scalar and jnp.issubdtype(jnp.result_type(value), jnp.floating):
        return
    raise TypeError(
        "loss must return a floating scalar, or with has_aux a pair that begins with "
        f"one, got {jax.tree.map(jax.typeof, value)}"
    )


def _check_floating(params: Parameters) -> None:
    for name, leaf in zip(params.names, params.leaves, strict=True):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"{name} must be floating, got {jnp.result_type(leaf)}: leave arrays "
                "that are not trained out of params, as for jax.grad"
            )
