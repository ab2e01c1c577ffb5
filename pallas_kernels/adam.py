"""Adam's step on FP8 moments: everything is read once and written once, in place."""

from jaxtyping import Array, Float, UInt32

from pallas_kernels import dispatch, reference
from pallas_kernels.reference import AdamScalars, Moments


def adam(
    scalars: AdamScalars,
    grads: Float[Array, "... n"],
    moments: Moments,
    params: Float[Array, "... n"] | None = None,
    noise: UInt32[Array, "... g"] | None = None,
    *,
    implementation: dispatch.Implementation | None = None,
) -> tuple[Float[Array, "... n"], Moments]:
    """One parameter's Adam step; see `AdamScalars` for the arithmetic, in float32.

    Args:
      scalars: The step's factors.
      grads: Gradients, bfloat16 or float32.
      moments: Moments before the step.
      params: Parameters, bfloat16 or float32; None returns Adam's update instead.
      noise: Random bits, one word a group of 128, with which bfloat16 parameters are
        rounded stochastically; None rounds them to nearest.
      implementation: What to run; None means the kernel where it can run.

    Returns:
      The parameters after the step, or without `params` the update in the gradients'
      dtype; and the moments after the step.
    """
    dispatch.choose(implementation, "not written yet")
    return reference.adam(scalars, grads, moments, params, noise)
