"""Figures of the quantization error studies, after the paper's figures 2, 3 and 9."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import coat_jax as coat
from experiments.common.style import framed
from experiments.optimizer import error_studies as studies
from experiments.optimizer.error_studies import DEFAULT, REFERENCE_ERROR, Row
from experiments.optimizer.moments import GROUP, MomentSamples
from experiments.optimizer.schemes import exact_update

_BEFORE, _AFTER, _OURS = "#33415c", "#d1495b", "#2a9d8f"
_LINES = ("#8d99ae", _AFTER, _OURS, "#edae49", "#b5651d", "#3a86ff", "#8338ec", "0.2")
_TITLES = {"mu": "first moment", "nu": "second moment"}
# log2 of E4M3's smallest normal and smallest subnormal number over its maximum, 448.
_NORMAL, _SMALLEST = np.log2([2.0**-6 / 448, 2.0**-9 / 448])
_FULL = np.log2(coat.E4M3.dynamic_range)


def ranges(moments: MomentSamples) -> Figure:
    """Draws the paper's figures 9 and 2: magnitudes and dynamic ranges of groups.

    The left panels show all magnitudes relative to their group's amax, before and after
    range expansion. The darker shade marks E4M3's normal numbers, with three mantissa
    bits, and the lighter shade its subnormal numbers, with fewer. The right panels show
    the dynamic range of every group; the dotted line is the dynamic range of E4M3.
    """
    figure = Figure(figsize=(9, 5.5), layout="constrained", dpi=150)
    for (left, right), name in zip(figure.subplots(2, 2), _TITLES, strict=True):
        x = np.asarray(getattr(moments, name), np.float64)
        x = np.abs(x[np.any(x != 0, axis=1)])
        k = studies.range_powers(x)
        with np.errstate(divide="ignore"):
            log = np.log2(x / x.max(axis=1, keepdims=True))
        unexpanded, after = (y[np.isfinite(y)] for y in (log, log * k[:, None]))
        shades = _shade(left)
        _histogram(left, (unexpanded, after), np.arange(-25, 0.5, 0.5))
        left.set_title(f"{_TITLES[name]}, step {moments.step}", loc="left", fontsize=11)
        widths = [
            -np.where(np.isfinite(y), y, 0).min(axis=1) for y in (log, log * k[:, None])
        ]
        _histogram(right, widths, np.arange(0, 25.5, 0.5))
        right.axvline(_FULL, color="0.4", linestyle=":", linewidth=1)
        right.set_title(f"median k = {np.median(k):.2f}", loc="left", fontsize=11)
    style = dict(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    figure.legend(shades, ["E4M3, normal", "E4M3, subnormal"], **style)
    left.set_xlabel("log2 of a magnitude over its group's largest")
    right.set_xlabel("octaves from a group's smallest to its largest")
    return figure


def codes(moments: MomentSamples) -> Figure:
    """Draws figure 3: the use of each E4M3 magnitude, before and after range expansion.

    The third panel shows m / sqrt(v), which `coat.fp8_adamw` stores for the first
    moment.
    """
    figure = Figure(figsize=(9, 3.2), layout="constrained", dpi=150)
    mu, nu = jnp.asarray(moments.mu), jnp.asarray(moments.nu)
    counted = np.asarray(nu > 0)
    update, power = exact_update(mu, nu), coat.E4M3.power
    panels = zip(
        figure.subplots(1, 3, sharey=True),
        (mu, nu, update),
        (True, True, power),
        (*_TITLES.values(), f"m / sqrt(v), k = {power:g}"),
        strict=True,
    )
    for axes, x, expand, title in panels:
        used = [_codes(x, how)[counted] for how in (False, expand)]
        _histogram(axes, used, np.arange(128) - 0.5)
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("code of the magnitude, 0 to 126")
    return figure


def schemes(rows: list[Row]) -> Figure:
    """Draws each scheme's mean error over the captured steps, and each step's error."""
    rows = [row for row in rows if row["study"] == "schemes"]
    names = list(dict.fromkeys(row["scheme"] for row in rows))[::-1]
    figure = Figure(figsize=(9, 7), layout="constrained", dpi=150)
    axes = figure.subplots()
    for height, name in enumerate(names):
        errors = [row["error"] for row in rows if row["scheme"] == name]
        color = _OURS if name == DEFAULT.name else "#b8c0cc"
        axes.barh(height, np.mean(errors), color=color, height=0.7)
        axes.plot(errors, [height] * len(errors), ".", color=_BEFORE, markersize=4)
    for value in (REFERENCE_ERROR, REFERENCE_ERROR / 2):
        axes.axvline(value, color=_AFTER, linestyle=":", linewidth=1)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("squared error of m / sqrt(v); dotted: COAT's, and half of it")
    _tidy(axes)
    return figure


def replays(trajectories: studies.Trajectories) -> Figure:
    """Draws the replays: errors of updates and of their sum, and the drift of v."""
    figure = Figure(figsize=(9, 5.5), layout="constrained", dpi=150)
    b2s = sorted({b2 for b2, _ in trajectories})
    grid = figure.subplots(len(b2s), 3, sharex=True, squeeze=False)
    for row, b2 in zip(grid, b2s, strict=True):
        named = {name: t for (b, name), t in trajectories.items() if b == b2}
        for (name, trajectory), color in zip(named.items(), _LINES, strict=False):
            for axes, values in zip(row, trajectory, strict=True):
                steps = np.arange(1, len(values) + 1)
                style = dict(color=color, linewidth=1.4, label=name)
                axes.plot(steps, values, **style)
        row[0].set_ylabel(f"b2 = {b2:g}")
        for axes in row[:2]:
            axes.set_yscale("log")
    for axes in grid.flat:
        _tidy(axes)
    titles = ("update: relative squared error", "sum of updates", "v / exact v, median")
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title, loc="left", fontsize=11)
    for axes in grid[-1]:
        axes.set_xlabel("step")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    where = dict(loc="outside lower center", ncols=4, fontsize=8)
    figure.legend(handles, labels, frameon=False, **where)
    return figure


def _codes(x: Array, expand: bool | float) -> Float[np.ndarray, "groups 128"]:
    """Returns the E4M3 codes of |x| as integers, in the order of the magnitudes."""
    q = coat.quantize(x, granularity=coat.PerGroup(GROUP), expand=expand)
    return np.asarray(jax.lax.bitcast_convert_type(q.codes, jnp.uint8)) & 0x7F


def _histogram(axes: Axes, values, edges: Float[np.ndarray, " n"]) -> None:
    """Draws histograms of two sets of values: before and after range expansion.

    The first and the last bin include values outside the edges.
    """
    for x, color, label in zip(
        values, (_BEFORE, _AFTER), ("before", "after"), strict=True
    ):
        share, _ = np.histogram(np.clip(x, edges[0], edges[-1]), edges)
        share = 100 * share / max(np.size(x), 1)
        axes.stairs(share, edges, color=color, linewidth=1.4, label=label)
    axes.set_ylabel("%")
    axes.legend(frameon=False, fontsize=9)
    _tidy(axes)


def _shade(axes: Axes) -> list[Patch]:
    """Shades the ranges of E4M3's normal and subnormal numbers; returns patches."""
    spans = ((_NORMAL, 0, "0.88"), (_SMALLEST, _NORMAL, "0.95"))
    style = dict(zorder=0, linewidth=0)
    return [axes.axvspan(low, high, color=c, **style) for low, high, c in spans]


def _tidy(axes: Axes) -> None:
    framed(axes)
    axes.set_axisbelow(True)
