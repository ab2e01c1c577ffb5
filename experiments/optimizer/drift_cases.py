"""Stories that gradients tell, and ways to store Adam's moments, for `drift`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

import coat_jax as coat
from experiments.optimizer.moments import GROUP
from experiments.optimizer.schemes import INT8, Code, Groups, Scheme

B1 = 0.9
FREEZE = 10_000  # Steps that frozen elements are frozen for, at most half of a run.


class Time(NamedTuple):
    """A step of a run: its number, from 0, the run's length, and a key of its own."""

    step: Array
    steps: Array
    key: Array

    @property
    def freeze(self) -> tuple[Array, Array]:
        """The first step in which frozen elements have no gradient, and the end."""
        start = self.steps // 5
        return start, start + jnp.minimum(FREEZE, self.steps // 2)


@dataclasses.dataclass(frozen=True)
class Story:
    """What happens to gradients over a run.

    Attributes:
      name: In tables and results.
      factor: Gives, for a step's `Time` and a number of groups, what normally
        distributed gradients [groups, 128] are multiplied with.
      kind: "normal"; "heavy", which has Student's t distribution with three degrees of
        freedom; or "positive", magnitudes alone.
      frozen: The elements of each group that are frozen for a while, if any are.
    """

    name: str
    factor: Callable[[Time, int], Array | float] = lambda time, groups: 1.0
    kind: str = "normal"
    frozen: slice | None = None


def _falling(times: float) -> Callable[[Time, int], Array]:
    return lambda time, groups: jnp.float32(times) ** (-time.step / time.steps)


def _factor_of(
    elements: slice, factor: float, when: Callable[[Time], Array]
) -> Callable[[Time, int], Array]:
    """A factor for some elements of each group at some time, else 1."""

    def found(time, groups):
        ones = jnp.ones((groups, GROUP))
        return ones.at[:, elements].set(jnp.where(when(time), factor, 1.0))

    return found


def _early(time: Time) -> Array:
    return time.step < 20


def _in_freeze(time: Time) -> Array:
    start, end = time.freeze
    return (start <= time.step) & (time.step < end)


def _rare(time: Time, groups: int) -> Float32[Array, "groups 1"]:
    key = jax.random.fold_in(time.key, 1)
    return jax.random.bernoulli(key, 1 / 50, (groups, 1)).astype(jnp.float32)


_ALL, _ONE, _FOURTH = slice(None), slice(5, 6), slice(0, None, 4)
STORIES = (
    Story("stationary"),
    Story("falling 100 x", _falling(1e2)),
    Story("falling 10,000 x", _falling(1e4)),
    Story("all spike early", _factor_of(_ALL, 100.0, _early)),
    Story("one of 128 spikes early", _factor_of(_ONE, 100.0, _early)),
    Story(
        "one of 128 spikes often",
        _factor_of(_ONE, 30.0, lambda time: time.step % 500 == 0),
    ),
    Story("heavy tails", kind="heavy"),
    Story("rare rows", _rare),
    Story(
        "alternating sign", lambda time, _: 1.0 - 2.0 * (time.step % 2), kind="positive"
    ),
    Story("all frozen", _factor_of(_ALL, 0.0, _in_freeze), frozen=_ALL),
    Story(
        "a fourth frozen",
        _factor_of(_FOURTH, 0.0, _in_freeze),
        frozen=_FOURTH,
    ),
)


class Method(NamedTuple):
    """Adam with its moments stored in some way.

    Attributes:
      init: Gives the state for moments of zero, from such an array [groups, 128].
      update: Gives the state after a step, from gradients, the state before and b2.
      read: Gives the moments in float32 that a state stands for.
    """

    init: Callable[[Groups], Any]
    update: Callable[[Groups, Any, Array], Any]
    read: Callable[[Any], tuple[Groups, Groups]]


def adam(mu: Groups, nu: Groups, grads: Groups, b2: Array) -> tuple[Groups, Groups]:
    """Both moments after a step."""
    return B1 * mu + (1 - B1) * grads, b2 * nu + (1 - b2) * grads * grads


def _stored(store: Callable, read: Callable) -> Method:
    """Adam in float32 whose moments are stored and read in between."""
    return Method(
        init=lambda zeros: store(zeros, zeros),
        update=lambda grads, state, b2: store(*adam(*read(state), grads, b2)),
        read=read,
    )


def _by_scheme(**options: Any) -> Method:
    scheme = Scheme(name="", **options)
    key = jax.random.key(0)  # No scheme here rounds stochastically.
    return _stored(lambda mu, nu: scheme.store(mu, nu, key), scheme.read)


def _in_bfloat16() -> Method:
    return _stored(
        lambda mu, nu: (mu.astype(jnp.bfloat16), nu.astype(jnp.bfloat16)),
        lambda state: tuple(x.astype(jnp.float32) for x in state),
    )


def _in_coat(**options: Any) -> Method:
    """The library's own optimizer, on a GPU with its kernel."""

    def update(grads, state, b2):
        return coat.scale_by_fp8_adam(B1, b2, **options).update(grads, state)[1]

    def read(state):
        exact = coat.to_optax_state(state)
        return exact.mu, exact.nu

    return Method(coat.scale_by_fp8_adam(B1, **options).init, update, read)


# 8-bit Adam's code for numbers without a sign has one more bit of fraction than DE8.
_FRACTIONS = [
    10.0**-exponent * (0.1 + 0.9 * (part + 0.5) / 2 ** (7 - exponent))
    for exponent in range(7)
    for part in range(2 ** (7 - exponent))
]
UNSIGNED_DE8 = dataclasses.replace(
    coat.DE8,
    name="unsigned DE8",
    table=tuple(sorted([0.0, 1.0, *_FRACTIONS])),
    signed=False,
)
UINT8 = dataclasses.replace(
    INT8,
    name="UINT8",
    max=255.0,
    dynamic_range=255.0,
    table=tuple(map(float, range(256))),
    signed=False,
)
OURS = "coat"
# Moments in float32 are what all others are compared with.
METHODS: Mapping[str, Method] = {
    "BF16": _in_bfloat16(),
    # As the paper describes it: an own k in each group, float32 scales, to nearest.
    "COAT": _in_coat(normalize_mu=False, nu_format=coat.E4M3, rounding="nearest"),
    # Dynamic exponents (DE8) in groups, without expansion.
    "8-bit Adam": _by_scheme(
        mu=Code(format=coat.DE8, expand=1.0),
        nu=Code(format=UNSIGNED_DE8, expand=1.0),
    ),
    # Equal steps of the square root, which narrows a group's range.
    "int8 roots": _by_scheme(
        mu=Code(format=INT8, expand=0.5), nu=Code(format=UINT8, expand=0.5)
    ),
    # E4M3 for both, mu over the root of nu, BF16 scales: what `OURS` once was.
    "coat nearest": _by_scheme(
        mu=Code(expand=3.0, bfloat16_scale=True),
        nu=Code(expand=True, bfloat16_scale=True),
        normalized=True,
    ),
    OURS: _in_coat(),
    "coat LOG8": _in_coat(nu_format=coat.LOG8),
}
