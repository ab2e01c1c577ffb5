"""Gradient sequences, called stories, and ways to store Adam's moments, for `drift`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

import coat_jax as coat
from coat_jax.quantization.formats import dynamic_exponents
from experiments.optimizer.moments import GROUP
from experiments.optimizer.schemes import INT8, Code, Groups, Scheme, adam

B1 = 0.9
FREEZE = 10_000  # Steps that a freeze lasts; at most half of a run.


class Time(NamedTuple):
    """A step of a run.

    Attributes:
      step: The step's number, counted from 0.
      steps: The number of steps of the run.
      key: The random key of this step.
    """

    step: Array
    steps: Array
    key: Array

    @property
    def freeze(self) -> tuple[Array, Array]:
        """The first step of the freeze, and the first step after it.

        Frozen elements have gradients of zero in between.
        """
        start = self.steps // 5
        return start, start + jnp.minimum(FREEZE, self.steps // 2)


@dataclasses.dataclass(frozen=True)
class Story:
    """A sequence of gradients over a run.

    Attributes:
      name: The name in tables and results.
      factor: A function of a step's `Time` and the number of groups that returns the
        factor of the random gradients, broadcast to [groups, 128].
      kind: The distribution of the random gradients: "normal"; "heavy", Student's t
        distribution with three degrees of freedom; or "positive", absolute values of
        normal numbers.
      frozen: The elements of each group that `factor` freezes for a while, or None.
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
    """Returns a `Story.factor` that is `factor` for some elements at times, else 1.

    `when` is a function that returns whether the factor applies at a `Time`.
    """

    def found(time, groups):
        factors = jnp.ones((groups, GROUP))
        return factors.at[:, elements].set(jnp.where(when(time), factor, 1.0))

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
    Story("a fourth frozen", _factor_of(_FOURTH, 0.0, _in_freeze), frozen=_FOURTH),
)


class Method(NamedTuple):
    """Adam with one way to store its moments.

    Attributes:
      init: A function from moments of zero, [groups, 128], to the initial state.
      update: A function from gradients, a state and b2 to the state after the step.
      read: A function from a state to the float32 moments mu and nu that it represents.
    """

    init: Callable[[Groups], Any]
    update: Callable[[Groups, Any, Array], Any]
    read: Callable[[Any], tuple[Groups, Groups]]


def _stored(store: Callable, load: Callable) -> Method:
    """Returns float32 Adam that stores its moments and reads them at every step.

    `store` is a function from both moments to a state, and `load` is its inverse.
    """
    return Method(
        init=lambda zeros: store(zeros, zeros),
        update=lambda grads, state, b2: store(*adam(*load(state), grads, B1, b2)),
        read=load,
    )


def _by_scheme(scheme: Scheme) -> Method:
    key = jax.random.key(0)  # No scheme here rounds stochastically.
    return _stored(lambda mu, nu: scheme.store(mu, nu, key), scheme.read)


def _in_bfloat16() -> Method:
    return _stored(
        lambda mu, nu: (mu.astype(jnp.bfloat16), nu.astype(jnp.bfloat16)),
        lambda state: tuple(x.astype(jnp.float32) for x in state),
    )


def _in_coat(**options: Any) -> Method:
    """Returns Adam with this library's FP8 moments; on GPUs it runs in a kernel."""

    def update(grads, state, b2):
        return coat.scale_by_fp8_adam(B1, b2, **options).update(grads, state)[1]

    def read(state):
        exact = coat.to_optax_state(state)
        return exact.mu, exact.nu

    return Method(coat.scale_by_fp8_adam(B1, **options).init, update, read)


# 8-bit Adam's code of unsigned numbers has one more fraction bit than DE8, because it
# needs no sign bit.
UNSIGNED_DE8 = dataclasses.replace(
    coat.DE8, name="unsigned DE8", table=dynamic_exponents(7), signed=False
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
# An earlier form of `OURS`: mu / sqrt(nu) and nu are stored in E4M3 with BF16 scales,
# rounded to nearest.
EARLIER = Scheme(
    name="coat nearest",
    mu=Code(expand=3.0, bfloat16_scale=True),
    nu=Code(expand=True, bfloat16_scale=True),
    normalized=True,
)
# Adam with float32 moments is the reference of all methods, so it is not listed.
METHODS: Mapping[str, Method] = {
    "BF16": _in_bfloat16(),
    # The paper's scheme: each group has its own k and a float32 scale, and codes are
    # rounded to nearest.
    "COAT": _in_coat(normalize_mu=False, nu_format=coat.E4M3, rounding="nearest"),
    # 8-bit Adam's dynamic exponents (DE8) in groups of 128, without expansion.
    "8-bit Adam": _by_scheme(
        Scheme(
            name="8-bit Adam",
            mu=Code(format=coat.DE8, expand=1.0),
            nu=Code(format=UNSIGNED_DE8, expand=1.0),
        )
    ),
    # Linear codes of the square root. The root halves a group's range in octaves.
    "int8 roots": _by_scheme(
        Scheme(
            name="int8 roots",
            mu=Code(format=INT8, expand=0.5),
            nu=Code(format=UINT8, expand=0.5),
        )
    ),
    EARLIER.name: _by_scheme(EARLIER),
    OURS: _in_coat(),
    "coat LOG8": _in_coat(nu_format=coat.LOG8),
}
