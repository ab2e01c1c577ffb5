"""Sections on the optimizer's step inside the backward pass."""

from experiments.bench.e2e import Row
from experiments.bench.model_step import ModelSize
from experiments.common.results import load
from experiments.common.tables import Column, markdown
from experiments.estimate.cards import COLUMNS
from experiments.pages.sections import section

_LONGER = "release_4096"
_FILES = ("release", _LONGER, "release_h200", "release_moe", "release_two")


def released() -> str:
    """Returns the section on steps with the optimizer inside the backward pass."""
    files = [load("release", name) for name in _FILES]
    rows = [row | _device(results) for results in files for row in results["rows"]]
    columns = (
        Column("Model", lambda row: ModelSize.of_row(row).name),
        Column("GPUs", ("gpus", "gpu"), "{} {}"),
        Column("recipe", "case"),
        Column("batch a GPU", "batch"),
        Column("ms", "ms_per_step", "{:.0f}"),
        Column("tokens/s a GPU", "tokens_per_s_per_gpu", "{:,.0f}"),
        Column("peak, GiB", "peak_gib", "{:.1f}"),
        Column("predicted", "predicted_gib", "{:.1f}"),
    )
    text = (
        "**The optimizer's step inside the backward pass** (`release`): steps of "
        "`coat.value_and_update` (`released`) next to steps of `jax.value_and_grad` "
        "and `coat.fused_update`. `bf16` trains with `optax.adamw`. Parameters are "
        f"BF16, and JAX is {load('release')['versions']['jax']}."
    )
    expected = _thirteen_billion(rows)
    note = (
        "A step of Llama-2-13B with all gradients does not fit on this H100. On the "
        f"line through 10 and 20 of its layers it would take {expected:.0f} ms. At "
        "4,096 tokens the fastest `coat` row of Llama-3-8B has "
        f"{times_bf16():.2f} times the tokens/s of the fastest `bf16` row."
    )
    return section(text, markdown(columns, rows), note)


def times_bf16() -> float:
    """Returns the speed of Llama-3-8B with `coat` over BF16's, at 4,096 tokens.

    Each speed is at the fastest batch that was measured.
    """
    rates: dict[bool, list[float]] = {False: [], True: []}
    for row in load("release", _LONGER)["rows"]:
        rates[row["case"].startswith("bf16")].append(row["tokens_per_s"])
    return max(rates[False]) / max(rates[True])


def cards() -> str:
    """Returns the table of the largest batches on one GPU."""
    return markdown(COLUMNS, load("release", "cards")["rows"]) + "\n"


def _device(results: dict) -> dict[str, str]:
    name = results["device"]["name"]
    return {"gpu": next(kind for kind in ("H100", "H200") if kind in name)}


def _thirteen_billion(rows: list[Row]) -> float:
    """Returns the milliseconds of a step of 40 layers of Llama-2-13B.

    They are extrapolated from steps of 10 and 20 layers.
    """
    times = {
        row["layers"]: row["ms_per_step"]
        for row in rows
        if row["part"] == "llama2-13b" and row["case"] == "coat"
    }
    return times[20] + 2 * (times[20] - times[10])
