"""Sections on the optimizer."""

from typing import Any

from experiments.common.results import load
from experiments.optimizer.drift_cases import METHODS, OURS
from experiments.pages.image import markdown_image


def optimizer() -> str:
    """Returns the section on the benchmark of a step."""
    results = load("bench_optimizer")
    lines = [
        "**A step of the optimizer** (`bench_optimizer`): a matrix of a billion "
        "parameters, smaller ones whose last axis is 5,000 or 64, and Llama 2 7B's, as "
        "291 tensors and as stacks of layers; on one "
        f"{results['device']['name']}, parameters and state donated. `optax.adamw` has "
        "float32 moments; trees are compared with its time for the BF16 matrix.",
        "",
        "| | step | ms for 1e9 | times `optax.adamw` | state, bytes a parameter "
        "| temporaries |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["rows"]:
        lines.append(
            f"| {row['what']} | {row['method']} | {row['ms_per_1e9']:.2f} "
            f"| {row['ratio_to_optax']:.2f} "
            f"| {row['state_bytes_per_parameter']:.3f} "
            f"| {row['temporaries_mib']:,.0f} MiB |"
        )
    return "\n".join([*lines, ""])


def drift() -> str:
    """Returns the section on the drift of moments."""
    usual, longest = 10_000, 100_000
    rows = [row for row in load("drift")["rows"] if row["ratio"]]
    b2s = sorted({row["b2"] for row in rows})
    stories = {row["story"] for row in rows}
    lines = [
        f"**Moments over {usual:,} steps** (`drift`): how many times too large updates "
        f"are, beside float32 moments; the means in {len(stories)} stories that "
        "gradients tell (stationary, falling, spiking, rare, frozen, ...), from the "
        "smallest to the largest. In the figure b2 is optax's default, 0.999. `coat "
        "nearest` is a form that this library had before.",
        "",
        "| moments | " + " | ".join(f"b2 = {b2:g}" for b2 in b2s) + " |",
        "| --- |" + " --- |" * len(b2s),
    ]
    for method, steps in (*((name, usual) for name in METHODS), (OURS, longest)):
        cells = []
        for b2 in b2s:
            found = [
                row["ratio"]
                for row in rows
                if (row["method"], row["b2"], row["steps"]) == (method, b2, steps)
            ]
            low, high = min(found), max(found)
            cells.append(
                f"{low:.2f} to {high:.2f}"
                if high < 100
                else f"{low:.2f} to {high:,.0f}"
            )
        name = method if steps == usual else f"{method}, {steps:,} steps"
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    image = markdown_image("Updates over exact ones", "drift", "drift")
    return "\n".join([*lines, "", image, ""])


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
    return "\n".join(
        [
            text,
            "",
            *_gaps(usual),
            "",
            markdown_image("Loss curves and differences", "optimizer_curves", name),
            "",
            f"The same with a learning rate that falls to zero (`{name}_falling`), "
            f"{falling['summary'][0]['seeds']} seeds. {falling['note']}",
            "",
            *_gaps(falling),
            "",
            f"An earlier form of `fp8_adamw`, with BF16 parameters too "
            f"(`{name}_bf16`): b2 = {bf16['settings']['b2']:g}, {_length(bf16)}.",
            "",
            *_gaps(bf16),
            "",
        ]
    )


def _length(results: dict[str, Any]) -> str:
    """Returns the size of trainings, their device and the number of seeds."""
    settings = results["settings"]
    return (
        f"{settings['steps']:,} steps of {settings['batch_size']} x "
        f"{settings['seq_len']} bytes on one {results['device']['name']}, "
        f"{results['summary'][0]['seeds']} seeds"
    )


def _gaps(results: dict[str, Any]) -> list[str]:
    """Returns the lines of a table of validation losses and their gaps."""
    lines = ["| | validation loss | gap | at most |", "| --- | --- | --- | --- |"]
    for row in results["summary"]:
        gap = most = ""
        if row["optimizer"] != row["beside"]:
            gap, most = f"{row['percent']:+.2f}%", f"{row['most_percent']:+.2f}%"
        loss = f"{row['val_loss']:.4f}"
        lines.append(f"| {row['optimizer']} | {loss} | {gap} | {most} |")
    return lines


def wrapped() -> str:
    """Returns the section on wrapped optimizers."""
    results = load("wrapped_optimizers", "wrapped_optimizers_tiny")
    text = (
        "**Other optimizers** (`wrapped_optimizers_tiny`): each of optax's as it is "
        "and within `coat.with_quantized_state`, on the "
        f"{results['settings']['preset']} preset's model, {_length(results)}."
    )
    return "\n".join([text, "", *_gaps(results), ""])
