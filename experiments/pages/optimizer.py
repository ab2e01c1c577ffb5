"""Sections on FP8 AdamW (speed, drift and loss curves) and on other optimizers."""

from typing import Any

from experiments.common.results import load
from experiments.common.tables import Column, markdown
from experiments.optimizer.drift_cases import METHODS, OURS
from experiments.pages.sections import markdown_image, section


def optimizer() -> str:
    """Returns the section on the speed and memory of an optimizer step."""
    results = load("bench_optimizer")
    text = (
        "**A step of the optimizer** (`bench_optimizer`): a matrix of a billion "
        "parameters, smaller ones whose last axis is 5,000 or 64, and Llama 2 7B's, as "
        "291 tensors and as stacks of layers; on one "
        f"{results['device']['name']}, parameters and state donated. `optax.adamw` has "
        "float32 moments; trees are compared with its time for the BF16 matrix."
    )
    columns = (
        Column("", "what"),
        Column("step", "method"),
        Column("ms for 1e9", "ms_per_1e9", "{:.2f}"),
        Column("times `optax.adamw`", "ratio_to_optax", "{:.2f}"),
        Column("state, bytes a parameter", "state_bytes_per_parameter", "{:.3f}"),
        Column("temporaries", "temporaries_mib", "{:,.0f} MiB"),
    )
    return section(text, markdown(columns, results["rows"]))


def drift() -> str:
    """Returns the section on the drift of 8-bit moments."""
    usual, longest = 10_000, 100_000
    rows = [row for row in load("drift")["rows"] if row["ratio"]]
    b2s = sorted({row["b2"] for row in rows})
    stories = {row["story"] for row in rows}
    text = (
        f"**Moments over {usual:,} steps** (`drift`): how many times too large updates "
        f"are, relative to float32 moments; the means in {len(stories)} stories that "
        "gradients tell (stationary, falling, spiking, rare, frozen, ...), from the "
        "smallest to the largest. In the figure b2 is optax's default, 0.999. `coat "
        "nearest` is a form that this library had before."
    )
    by_case: dict[tuple[str, int], dict[float, list[float]]] = {}
    for row in rows:
        of_method = by_case.setdefault((row["method"], row["steps"]), {})
        of_method.setdefault(row["b2"], []).append(row["ratio"])
    lines = {name: by_case[name, usual] for name in METHODS}
    lines[f"{OURS}, {longest:,} steps"] = by_case[OURS, longest]
    columns = [Column("moments", lambda line: line[0])]
    for b2 in b2s:
        columns.append(Column(f"b2 = {b2:g}", lambda line, b2=b2: _range(line[1][b2])))
    image = markdown_image("Updates over exact ones", "drift", "drift")
    return section(text, markdown(columns, lines.items()), image)


def _range(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.2f} to {high:.2f}" if high < 100 else f"{low:.2f} to {high:,.0f}"


def curves() -> str:
    """Returns the section on loss curves of optimizers."""
    name = "optimizer_curves_124m"
    falling, bf16 = (
        load("optimizer_curves", f"{name}_{more}") for more in ("falling", "bf16")
    )
    usual = load("optimizer_curves", name)
    settings = usual["settings"]
    text = (
        f"**Training with it** (`{name}`): the {settings['preset']} preset's model in "
        f"BF16 matrix products, b2 = {settings['b2']:g}, {_length(usual)}. A gap is "
        "the mean over seeds, each with one initialization and one order of the data; "
        "behind it is the upper end of its 95% interval. Parameters are float32 "
        "unless it says BF16, moments of `optax.adamw` always."
    )
    return section(
        text,
        _gaps(usual),
        markdown_image("Loss curves and differences", "optimizer_curves", name),
        f"The same with a learning rate that falls to zero (`{name}_falling`), "
        f"{falling['summary'][0]['seeds']} seeds. {falling['note']}",
        _gaps(falling),
        f"An earlier form of `fp8_adamw`, with BF16 parameters too "
        f"(`{name}_bf16`): b2 = {bf16['settings']['b2']:g}, {_length(bf16)}.",
        _gaps(bf16),
    )


def _length(results: dict[str, Any]) -> str:
    """Returns a phrase with the length of trainings, their device and the seeds."""
    settings = results["settings"]
    return (
        f"{settings['steps']:,} steps of {settings['batch_size']} x "
        f"{settings['seq_len']} bytes on one {results['device']['name']}, "
        f"{results['summary'][0]['seeds']} seeds"
    )


def _gaps(results: dict[str, Any]) -> str:
    """Returns a table of validation losses, and their gaps to a reference."""

    def gap(title: str, key: str) -> Column:
        def of(row: dict[str, Any]) -> float | None:
            return row[key] if row["optimizer"] != row["beside"] else None

        return Column(title, of, "{:+.2f}%", missing="")

    columns = (
        Column("", "optimizer"),
        Column("validation loss", "val_loss", "{:.4f}"),
        gap("gap", "percent"),
        gap("at most", "most_percent"),
    )
    return markdown(columns, results["summary"])


def wrapped() -> str:
    """Returns the section on optax optimizers with `coat.with_quantized_state`."""
    results = load("wrapped_optimizers", "wrapped_optimizers_tiny")
    text = (
        "**Other optimizers** (`wrapped_optimizers_tiny`): each of optax's as it is "
        "and within `coat.with_quantized_state`, on the "
        f"{results['settings']['preset']} preset's model, {_length(results)}."
    )
    return section(text, _gaps(results))
