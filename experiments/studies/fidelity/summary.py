"""Differences between variants and references over seeds: rows, tables and figures."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from experiments.common import tables
from experiments.common.intervals import half_of_few
from experiments.common.results import Bar
from experiments.common.style import framed
from experiments.common.tables import Column
from experiments.studies.fidelity.variants import REFERENCE, VARIANTS

Row = Mapping[str, Any]
# The losses of a training, by their key in rows.
LOSSES = {
    "last_own": "last weights",
    "average_own": "averaged weights",
    "last_in_bf16": "last weights, in BF16",
    "average_in_bf16": "averaged weights, in BF16",
}
_COLORS = {
    "last_own": "#8d99ae",
    "average_own": "#d1495b",
    "average_in_bf16": "#33415c",
}
_MOST_PERCENT, _MOST_HALF = 0.2, 0.06


def differences(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns a row for each variant except `bf16`, and for each kind of loss.

    A difference is taken between two trainings with the same seed, which continue from
    the same shared steps if there are any. `nats` is the mean difference, and `percent`
    the mean of the differences in percent of the reference's loss. `nats_half` and
    `percent_half` are the half-widths of 95% intervals by Student's t distribution.
    `nats_deviation` and `percent_deviation` are standard deviations over seeds.
    Half-widths and deviations are None for a single seed.
    """
    by_run = {run_of(row): row for row in rows}
    summary = []
    for name, variant in VARIANTS.items():
        both = [
            (row, by_run[variant.reference, *run])
            for (of, *run), row in by_run.items()
            if of == name and (variant.reference, *run) in by_run
        ]
        if name == variant.reference or not both:
            continue
        about = {"variant": name, "reference": variant.reference, "seeds": len(both)}
        for key in LOSSES:
            pairs = [(row[key], reference[key]) for row, reference in both]
            row = about | {"loss": key, "reference_nats": fmean(b for _, b in pairs)}
            row |= _interval("nats", [a - b for a, b in pairs])
            row |= _interval("percent", [100 * (a / b - 1) for a, b in pairs])
            summary.append(row)
    return summary


def run_of(row: Row) -> tuple[str, int, str | None]:
    """Returns a row's variant, seed, and hash of the state after the shared steps."""
    return row["variant"], row["seed"], row.get("start")


def _interval(unit: str, values: Sequence[float]) -> dict[str, float | None]:
    deviation = half = None
    if len(values) > 1:
        deviation = stdev(values)
        half = half_of_few(deviation / math.sqrt(len(values)), len(values))
    halves = {f"{unit}_half": half, f"{unit}_deviation": deviation}
    return {unit: fmean(values), **halves}


def bars(summary: Sequence[Row], settings: Mapping[str, Any]) -> list[Bar]:
    """Returns the targets of `coat` for text without shared steps, otherwise none.

    Args:
      summary: The rows of `differences`.
      settings: The settings of the trainings.
    """
    if settings["regime"] != "text" or settings["shared"]:
        return []
    targets = []
    for row in summary:
        of_coat = (row["variant"], row["loss"]) == ("coat", "average_own")
        if of_coat and row["percent_half"] is not None:
            name = f"coat, % of averaged weights' loss above {REFERENCE}"
            targets = [
                Bar.of(name, "<=", _MOST_PERCENT, row["percent"]),
                Bar.of(f"{name}, half of 95%", "<=", _MOST_HALF, row["percent_half"]),
            ]
    return targets


def columns(unit: str) -> tuple[Column, ...]:
    """Returns the columns of a table of differences, in "percent" or "nats"."""
    number = ".3f" if unit == "percent" else ".5f"
    sign = "%" if unit == "percent" else "nats"
    each = [
        Column(
            f"{title}, {sign}",
            (f"{key}_{unit}", f"{key}_{unit}_half"),
            f"{{:+{number}}} ± {{:{number}}}",
        )
        for key, title in LOSSES.items()
    ]
    return (
        Column("", "variant"),
        Column("what differs", lambda row: VARIANTS[row["variant"]].about),
        Column("from", "reference"),
        Column("seeds", "seeds"),
        *each,
        Column("deviation", f"average_own_{unit}_deviation", f"{{:{number}}}"),
    )


def lines(summary: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns a row for each variant, with the values of each kind of loss.

    Half-widths and deviations that are None become NaN.
    """
    by_variant: dict[str, dict[str, Any]] = {}
    for row in summary:
        about = {key: row[key] for key in ("variant", "reference", "seeds")}
        line = by_variant.setdefault(row["variant"], about)
        for unit in ("nats", "percent"):
            for key in (unit, f"{unit}_half", f"{unit}_deviation"):
                value = row[key]
                line[f"{row['loss']}_{key}"] = math.nan if value is None else value
    return list(by_variant.values())


def by_shared(files: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each variant, with differences in percent.

    Args:
      files: The contents of results files of trainings that share a part of the steps
        with their reference. The last file must have all variants.

    Returns:
      Rows with the variant, a text on what differs, and an entry for each file, such as
      "after 10%": a text with the averaged weights' difference and its interval, or
      None if the file has no trainings of the variant. A further entry has the
      difference of the last file's weights in a BF16 forward pass.
    """
    losses = {
        _column(results): {line["variant"]: line for line in lines(results["summary"])}
        for results in files
    }
    last = list(losses)[-1]

    def text(line: Row | None, loss: str) -> str | None:
        if line is None:
            return None
        return f"{line[f'{loss}_percent']:+.3f} ± {line[f'{loss}_percent_half']:.3f}"

    return [
        {"variant": name, "what differs": VARIANTS[name].about}
        | {title: text(of.get(name), "average_own") for title, of in losses.items()}
        | {f"{last}, in BF16": text(line, "average_in_bf16")}
        for name, line in losses[last].items()
    ]


def _column(results: Mapping[str, Any]) -> str:
    after = f"after {results['settings']['shared']:.0%}"
    return after if results["regime"] == "text" else f"memorized, {after}"


def table(summary: Sequence[Row], title: str, unit: str) -> Table:
    """Returns a table of differences, in "percent" or "nats", for a terminal."""
    return tables.table(title, columns(unit), lines(summary))


def report(results: Mapping[str, Any], out: Path) -> None:
    """Prints the differences in the contents of a results file, and draws them.

    `out` is the path of the file; the figure has the same name.
    """
    if differences := results["summary"]:
        title, unit = _title(results), _unit(results)
        figure(differences, title, unit).savefig(out.with_suffix(".png"))
        Console(width=200).print(table(differences, title, unit))
    print(f"{out}, with {len(results['rows'])} trainings")


def _unit(results: Mapping[str, Any]) -> str:
    return "percent" if results["regime"] == "text" else "nats"


def _title(results: Mapping[str, Any]) -> str:
    s = results["settings"]
    tokens = s["steps"] * s["batch_size"] * s["seq_len"]
    shared = f", the first {s['shared']:.0%} shared" if s["shared"] else ""
    return (
        f"{results['regime']}: {s['shape']['layers']} layers of "
        f"{s['shape']['hidden']}, {s['steps']} steps{shared}, "
        f"{tokens / 1e6:,.1f} million bytes"
    )


def figure(summary: Sequence[Row], title: str, unit: str) -> Figure:
    """Draws differences by variant with 95% intervals, in "percent" or "nats"."""
    names = list(dict.fromkeys(row["variant"] for row in summary))
    size = (9, 1.8 + 0.42 * len(names))
    drawn = Figure(figsize=size, layout="constrained", dpi=150)
    axes = drawn.subplots()
    for offset, (key, color) in zip((-0.2, 0.0, 0.2), _COLORS.items(), strict=True):
        of_key = [row for row in summary if row["loss"] == key]
        axes.errorbar(
            [row[unit] for row in of_key],
            [names.index(row["variant"]) + offset for row in of_key],
            xerr=[row[f"{unit}_half"] or math.nan for row in of_key],
            fmt="o", markersize=4, capsize=2, color=color, label=LOSSES[key],
        )  # fmt: skip
    axes.axvline(0, color="0.4", linewidth=0.8)
    labels = [f"{name} − {VARIANTS[name].reference}" for name in names]
    axes.set_yticks(range(len(names)), labels)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("difference of losses, " + ("%" if unit == "percent" else "nats"))
    framed(axes)
    where = dict(loc="outside lower center", ncols=3, fontsize=9)
    drawn.legend(frameon=False, **where)
    return drawn
