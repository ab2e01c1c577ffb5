"""The storage of moving averages in 8 bits, and the averages in optax's states.

An average that is stored in few bits stalls if it is rounded to nearest. With b2 =
0.999 a step moves the second moment by 0.1%, but codes are 3% to 12% apart, so the
nearest code is always the old one. Therefore codes are rounded stochastically, with
random bits that are new in every step: on average, an average moves as far as it
should. COAT (arXiv 2410.19313) rounds to nearest; use `rounding="nearest"` for that.
"""

import dataclasses
from collections.abc import Mapping

from coat_jax.quantization.formats import E4M3, UE4M4, Format
from pallas_kernels.checks import is_positive_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment:
    """The storage of one moving average of an optimizer's state.

    Attributes:
      format: The format of the codes. A format without a sign is for averages that are
        never negative.
      power: The k of range expansion for all groups. None gives each group its own k,
        which spreads the group's numbers over the format.
      over_root_of: The name of a second moment, a field of the same state. This average
        is stored divided by the root of that moment, because updates read this ratio.
        The elements of the ratio differ less within a group, and an error of the second
        moment does not reach the update. None stores the average itself.
      squares: Whether the average is a mean of squares. Updates read its root.

    Raises:
      ValueError: If `power` is not positive, or `format` is not a `Format`.
    """

    format: Format = E4M3
    power: float | None = None
    over_root_of: str | None = None
    squares: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.format, Format):
            raise ValueError(f"format must be a coat format, got {self.format!r}")
        if self.power is not None and not is_positive_number(self.power):
            raise ValueError(f"power must be positive or None, got {self.power!r}")
        if self.power is not None:  # Equal numbers have one text in checksums.
            object.__setattr__(self, "power", float(self.power))

    def __str__(self) -> str:
        power = "own k" if self.power is None else f"k = {self.power:g}"
        over = f" over the root of {self.over_root_of}" if self.over_root_of else ""
        return f"{self.format}, {power}{over}"


# A mean of gradients. Gradients change their sign, so that small elements need no
# precision of their own, and one k serves all groups. An element below 1/480 of the
# group's amax is rounded to 1/480 of the amax or to zero; the mean is right. The noise
# of 1 / (1 - decay) steps adds up: of gradients with a mean of zero, the average has a
# relative error of 4% with a decay of 0.9, 13% with 0.99, and 42% with 0.999.
SIGNED = Moment(format=E4M3, power=2.0)
# A mean of squares. Updates divide by its root.
SQUARES = Moment(format=UE4M4, squares=True)


def over_root(field: str, format: Format = E4M3) -> Moment:
    """Returns the storage of a first moment, divided by the root of moment `field`."""
    return Moment(format=format, power=format.power, over_root_of=field)


# The moving averages of optax's states. None marks a field that has the parameters'
# shapes but is no average. Other fields with these shapes give a warning.
KNOWN: Mapping[str, Mapping[str, Moment | None]] = {
    "EmaState": {"ema": SIGNED},
    "TraceState": {"trace": SIGNED},
    "ScaleByLionState": {"mu": SIGNED},
    "MuonState": {"mu": SIGNED},
    "ScaleByRmsState": {"nu": SQUARES},
    "ScaleByRmsWithCountState": {"nu": SQUARES},
    # Updates divide by the root of nu - mu ** 2, which codes may make negative.
    "ScaleByRStdDevState": {"mu": None, "nu": None},
    "ScaleByRStdDevWithCountState": {"mu": None, "nu": None},
    "ScaleByAdamState": {"mu": over_root("nu"), "nu": SQUARES},
    # A maximum over the steps of codes' noise grows, so that updates would shrink.
    "ScaleByAmsgradState": {"mu": over_root("nu"), "nu": None, "nu_max": SQUARES},
    "ScaleByBeliefState": {"mu": over_root("nu"), "nu": SQUARES},
    "ScaleByAdemamixState": {
        "m1": over_root("nu"),
        "m2": None,  # A mean over 10,000 steps by default: see `SIGNED`.
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
