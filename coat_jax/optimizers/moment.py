"""The storage of moving averages in 8 bits, and the averages in optax's states.

An average that is kept in few bits stalls if it is rounded to nearest: with b2 = 0.999
a step moves the second moment by 0.1%, codes are 3% to 12% apart, and nearest is always
the old code. So codes are rounded stochastically, by random bits that are new in every
step, and on average an average moves as far as it should. COAT (arXiv 2410.19313)
rounds to nearest; that is `rounding="nearest"`.
"""

import dataclasses
from collections.abc import Mapping

from coat_jax.quantization.array import E4M3, UE4M4, Format


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment:
    """The storage of one moving average of an optimizer's state.

    Attributes:
      format: The format of its codes. One without a sign is for averages that are
        never negative.
      power: The k of the range expansion for all groups, or None: each group has the
        one that spreads what it holds over the format.
      over_root_of: The name of a second moment, a field of the same state, over whose
        square root this one is stored, because that is what updates read. Its elements
        differ less within a group, and an error of the second moment does not reach
        the update. None stores the average itself.
      squares: Whether it is a mean of squares, whose root is what updates read.

    Raises:
      ValueError: If `power` is not positive, or `format` is no format.
    """

    format: Format = E4M3
    power: float | None = None
    over_root_of: str | None = None
    squares: bool = False

    def __post_init__(self):
        if not isinstance(self.format, Format):
            raise ValueError(f"format must be a coat format, got {self.format!r}")
        if self.power is not None and not self.power > 0:
            raise ValueError(f"power must be positive or None, got {self.power!r}")

    def __str__(self) -> str:
        power = "own k" if self.power is None else f"k = {self.power:g}"
        over = f" over the root of {self.over_root_of}" if self.over_root_of else ""
        return f"{self.format}, {power}{over}"


# A mean of gradients, which change their sign: small elements need no precision of
# their own, and one k serves all groups. An element below 1/480 of its group's largest
# is rounded to that or to zero, on average to itself.
SIGNED = Moment(format=E4M3, power=2.0)
# A mean of squares, which is divided by.
SQUARES = Moment(format=UE4M4, squares=True)


def over_root(field: str, format: Format = E4M3) -> Moment:
    """A first moment beside a second one."""
    return Moment(format=format, power=format.power, over_root_of=field)


# The moving averages of optax's states. Of fields that are None, parameter-shaped but
# no averages, nothing is said; of others that are not here a warning is given.
KNOWN: Mapping[str, Mapping[str, Moment | None]] = {
    "EmaState": {"ema": SIGNED},
    "TraceState": {"trace": SIGNED},
    "ScaleByLionState": {"mu": SIGNED},
    "MuonState": {"mu": SIGNED},
    "ScaleByRmsState": {"nu": SQUARES},
    "ScaleByRmsWithCountState": {"nu": SQUARES},
    "ScaleByRStdDevState": {"mu": SIGNED, "nu": SQUARES},
    "ScaleByRStdDevWithCountState": {"mu": SIGNED, "nu": SQUARES},
    "ScaleByAdamState": {"mu": over_root("nu"), "nu": SQUARES},
    "ScaleByAmsgradState": {"mu": over_root("nu"), "nu": SQUARES, "nu_max": None},
    "ScaleByBeliefState": {"mu": over_root("nu"), "nu": SQUARES},
    "ScaleByAdemamixState": {
        "m1": over_root("nu"),
        "m2": over_root("nu"),
        "nu": SQUARES,
    },
    "ScaleBySimplifiedAdEMAMixState": {"m": over_root("n"), "n": SQUARES},
    "ScaleByAdanState": {
        "m": over_root("n"),
        "v": over_root("n"),
        "n": SQUARES,
        "g": None,  # The gradient of the step before.
    },
    "ScaleByAdaDeltaState": {"e_g": SQUARES, "e_x": SQUARES},
    "ScheduleFreeState": {"z": None},
    "MultiStepsState": {"acc_grads": None},
    "ApplyEvery": {"grad_acc": None},
}
