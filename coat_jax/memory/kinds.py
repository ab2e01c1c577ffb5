"""Kinds of arrays that take memory on a GPU, and the phases of a step."""

import dataclasses
from typing import Literal

from coat_jax.remat.liveness import Held

GIB = 2**30
Phase = Literal["forward", "loss", "backward", "update"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kinds:
    """Bytes on one GPU at one time, by kind.

    Attributes:
      parameters: The GPU's shards of the parameters.
      gradients: The GPU's shards of the gradients that exist.
      optimizer: The GPU's shards of the optimizer's state.
      saved: Activations that are saved for the backward pass.
      workspace: All other arrays of the layers: inputs and results of matmuls and
        kernels, codes of gradients, copies of one layer's saved activations.
      gathered: Weights in the form that matmuls read: FP8 codes, casts to the dtype of
        the computation, slices of stacks. On a mesh these are whole weights, gathered
        from the shards.
      logits: The logits of a chunk of tokens, and their gradients.
    """

    parameters: int
    gradients: int = 0
    optimizer: int
    saved: int = 0
    workspace: int = 0
    gathered: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        """The sum over all kinds."""
        return sum(dataclasses.asdict(self).values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The memory of a training step on each GPU; prints as a table.

    A step has four phases. The phase "loss" computes the loss and its gradient with
    respect to the last layer's output. In the phase "update" the optimizer works in
    place.

    Attributes:
      forward: The bytes at the peak of the forward pass.
      loss: The bytes at the peak of the loss.
      backward: The bytes at the peak of the backward pass.
      update: The bytes during the optimizer's step.
      saved_bytes: The bytes of all activations that the forward pass saves.
      gpus: The number of GPUs.
    """

    forward: Kinds
    loss: Kinds
    backward: Kinds
    update: Kinds
    saved_bytes: int
    gpus: int

    @property
    def phases(self) -> dict[Phase, Kinds]:
        """The bytes at the peak of each phase, by the phase's name."""
        names: tuple[Phase, ...] = ("forward", "loss", "backward", "update")
        return {name: getattr(self, name) for name in names}

    @property
    def peak_phase(self) -> Phase:
        """The phase that takes the most memory."""
        return max(self.phases, key=lambda name: self.phases[name].total)

    @property
    def peak(self) -> Kinds:
        """The bytes at the peak of the step."""
        return self.phases[self.peak_phase]

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a GPU needs."""
        return self.peak.total

    def __str__(self) -> str:
        lines = [f"{'GiB a GPU':12}" + "".join(f"{name:>10}" for name in self.phases)]
        for field in (*(f.name for f in dataclasses.fields(Kinds)), "total"):
            cells = (getattr(kinds, field) / GIB for kinds in self.phases.values())
            lines.append(f"{field:12}" + "".join(f"{cell:10.3f}" for cell in cells))
        return "\n".join(lines)


def kind_of(array: Held, logits: tuple[int, int]) -> str:
    """Returns the kind of an array; `logits` is the shape of a chunk of logits."""
    if array.role == "copy":
        return "gathered"
    if array.role == "saved":
        return "saved"
    if array.role == "output":
        return "gradients"
    # FP8 codes may have this shape, too.
    is_logits = array.shape == logits and array.dtype.itemsize > 1
    return "logits" if is_logits else "workspace"
