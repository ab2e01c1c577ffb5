"""Studies of the error of storing Adam's moments, as flat rows of results files.

Errors are mean squared errors of m / sqrt(v), in a unit that makes the error of COAT's
scheme the paper's 12.31, because the paper's unit is arbitrary. COAT's scheme is E4M3
with range expansion for both moments.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import coat_jax as coat
from experiments.optimizer.moments import GROUP, Capture, MomentSamples
from experiments.optimizer.schemes import (
    INT8,
    Code,
    PeakOverRms,
    Scheme,
    Trajectory,
    UpdateError,
    best_power,
    read_back,
    replay,
    update_error,
)

Row = dict[str, Any]
REFERENCE = "E4M3+Expand"
REFERENCE_ERROR = 12.31
# The codes of the paper's tables 1 and 8, in the order of their columns.
CODES = {
    format.name + ("+Expand" if expand else ""): Code(format=format, expand=expand)
    for format in (coat.E4M3, coat.E5M2, coat.DE8)
    for expand in (False, True)
}
_RANGE = CODES[REFERENCE]
_RANGE_RANDOM = dataclasses.replace(_RANGE, stochastic=True)
_CUBE = Code(expand=coat.E4M3.power)
_CUBE_RANDOM = dataclasses.replace(_CUBE, stochastic=True)
_BEST = Code(expand=best_power)
_BEST_UNWEIGHTED = dataclasses.replace(_BEST, weighted=False)


def _over_root(name: str, mu: Code, nu: Code = _RANGE) -> Scheme:
    return Scheme(name=f"m/sqrt(v), {name}", mu=mu, nu=nu, normalized=True)


def _of_format(format: coat.Format) -> Scheme:
    name = f"{format}, k = {format.power:g}"
    return _over_root(name, Code(format=format, expand=format.power))


PLAIN = Scheme(name="plain E4M3", mu=Code(), nu=Code())
COAT = Scheme(name="COAT (E4M3+Expand)", mu=_RANGE, nu=_RANGE)
# The scheme of `coat.fp8_adamw`, but with E4M3 for v and with rounding to nearest.
DEFAULT = _over_root("k = 3", _CUBE)
# A linear code for comparison: all others are floating-point or dynamic formats.
LINEAR = _over_root("INT8", Code(format=INT8))
STOCHASTIC = (
    Scheme(name="COAT, v stochastic", mu=_RANGE, nu=_RANGE_RANDOM),
    Scheme(name="COAT, both stochastic", mu=_RANGE_RANDOM, nu=_RANGE_RANDOM),
    _over_root("k = 3, v stochastic", _CUBE, _RANGE_RANDOM),
    _over_root("k = 3, both stochastic", _CUBE_RANDOM, _RANGE_RANDOM),
)
SCHEMES = (
    PLAIN,
    COAT,
    Scheme(name="m alone", mu=_RANGE),
    Scheme(name="m alone, k by least squares", mu=_BEST_UNWEIGHTED),
    Scheme(name="m alone, k by weighted squares", mu=_BEST),
    Scheme(name="v alone", nu=_RANGE),
    Scheme(name="v alone, k by weighted squares", nu=_BEST),
    Scheme(name="both, k by weighted squares", mu=_BEST, nu=_BEST),
    _over_root("k by range", _RANGE),
    *(_over_root(f"k = {k:g}", Code(expand=k)) for k in (1.5, 2.0, 2.5)),
    DEFAULT,
    *(_over_root(f"k = {k:g}", Code(expand=k)) for k in (3.5, 4.0)),
    *(
        _over_root(f"k = {c:g}/log2(peak/rms)", Code(expand=PeakOverRms(c)))
        for c in (3.5, 4.0, 4.5)
    ),
    _over_root("k by least squares", _BEST),
    _of_format(coat.E5M2),
    _of_format(coat.DE8),
    LINEAR,
    *STOCHASTIC,
)
REPLAYED = (PLAIN, COAT, DEFAULT, *STOCHASTIC, LINEAR)
REPLAYED_B2 = (0.95, 0.999)
_REPORTED_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
Trajectories = dict[tuple[float, str], Trajectory]


def spread_rows(capture: Capture) -> list[Row]:
    """Returns a row for each captured step, with the numbers of the paper's figure 2.

    The numbers are the medians over groups of the dynamic range in octaves, and of the
    exponent k of range expansion, for each moment.
    """
    rows = []
    for moments in capture.moments:
        row = {"study": "spread", "step": moments.step, "loss": moments.loss}
        for name in ("mu", "nu"):
            x = getattr(moments, name)
            row[f"{name}_octaves"] = float(np.median(octaves(x)))
            row[f"{name}_k"] = float(np.median(range_powers(x)))
        rows.append(row)
    return rows


def pair_rows(capture: Capture) -> list[Row]:
    """Returns a row with the error for each captured step and each pair of codes."""
    rows = []
    for moments in capture.moments:
        errors = _pair_errors(moments)
        unit = REFERENCE_ERROR / errors[REFERENCE, REFERENCE].mse
        for (mu, nu), error in errors.items():
            row = {"study": "pairs", "step": moments.step, "mu": mu, "nu": nu}
            rows.append(row | _measured(error, unit))
    return rows


def _pair_errors(moments: MomentSamples) -> dict[tuple[str, str], UpdateError]:
    mu, nu, key = moments.mu, moments.nu, jax.random.key(0)
    read_mu, read_nu = {}, {}
    for name, code in CODES.items():
        read_mu[name] = read_back(Scheme(name=name, mu=code), mu, nu, key)[0]
        read_nu[name] = read_back(Scheme(name=name, nu=code), mu, nu, key)[1]
    return {
        (a, b): update_error(mu, nu, read_mu[a], read_nu[b])
        for a, b in itertools.product(CODES, CODES)
    }


def scheme_rows(capture: Capture) -> list[Row]:
    """Returns rows with the error and the bytes per parameter of each of `SCHEMES`.

    Errors are measured after each captured step, on a sample of its groups.
    """
    rows, sizes = [], {scheme: scheme.bytes_per_parameter for scheme in SCHEMES}
    for moments in capture.moments:
        moments = moments.sample(len(capture.start.mu))
        mu, nu, key = moments.mu, moments.nu, jax.random.key(0)
        errors = {
            scheme: update_error(mu, nu, *read_back(scheme, mu, nu, key))
            for scheme in SCHEMES
        }
        unit = REFERENCE_ERROR / errors[COAT].mse
        for scheme, error in errors.items():
            row = {"study": "schemes", "step": moments.step, "scheme": scheme.name}
            row["bytes_per_parameter"] = sizes[scheme]
            rows.append(row | _measured(error, unit))
    return rows


def octaves(x: Float[np.ndarray, "groups 128"]) -> Float[np.ndarray, " n"]:
    """Computes log2(amax / amin) of each group.

    amin is the smallest magnitude above zero. Groups with fewer than two nonzero
    elements have no range, and the result lacks them.
    """
    x = np.abs(np.asarray(x, np.float64))
    x = x[np.count_nonzero(x, axis=1) > 1]
    return np.log2(x.max(axis=1) / np.where(x > 0, x, np.inf).min(axis=1))


def range_powers(x: Float[np.ndarray, "groups 128"]) -> Float[np.ndarray, " n"]:
    """Returns the exponent k of range expansion of each group with nonzero elements."""
    x = x[np.any(x != 0, axis=1)]
    options = {"granularity": coat.PerGroup(GROUP), "expand": True}
    return np.asarray(coat.quantize(jnp.asarray(x), **options).exponent).ravel() / 16


def replays(capture: Capture) -> Trajectories:
    """Returns the errors of Adam with each scheme of `REPLAYED` and each b2.

    Each of them runs on the captured gradients.
    """
    return {
        (b2, scheme.name): jax.device_get(
            replay(
                scheme,
                capture.start.mu,
                capture.start.nu,
                capture.gradients,
                jax.random.key(0),
                b1=capture.b1,
                b2=b2,
            )
        )
        for b2 in REPLAYED_B2
        for scheme in REPLAYED
    }


def replay_rows(trajectories: Trajectories) -> list[Row]:
    """Returns rows with the errors of replays after some steps and the last step."""
    steps = len(next(iter(trajectories.values())).update_error)
    shown = sorted({step for step in _REPORTED_STEPS if step < steps} | {steps})
    return [
        {"study": "replays", "b2": b2, "scheme": name, "step": step}
        | {
            field: float(values[step - 1])
            for field, values in trajectory._asdict().items()
        }
        for (b2, name), trajectory in trajectories.items()
        for step in shown
    ]


def _measured(error: UpdateError, unit: Array) -> Row:
    return {
        "error": float(error.mse * unit),
        "error_with_lost": float(error.mse_with_lost * unit),
        "lost_percent": 100 * float(error.lost),
    }
