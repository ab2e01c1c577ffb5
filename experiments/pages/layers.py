"""Sections of experiments/README.md on layers: on two versions of JAX, and of users."""

from typing import Any

from experiments.common.results import NEWEST_JAX, OLDEST_JAX, load

_VERSIONS = (OLDEST_JAX, NEWEST_JAX)
_MS = "forward_backward_ms"


def versions() -> str:
    """Returns the section on one Llama layer with the oldest and the newest JAX."""
    found = [load("bench_layer", f"bench_layer_h100_jax_{v}") for v in _VERSIONS]
    old, new = ({row["case"]: row for row in f["rows"]} for f in found)
    shape = next(iter(new.values()))
    lines = [
        "**One Llama layer with the oldest and the newest JAX** (`bench_layer`): the "
        f"layer of Llama-3-8B (hidden {shape['hidden']:,}, {shape['intermediate']:,}, "
        f"{shape['kv_heads']} key heads, batch {shape['batch']}, sequence "
        f"{shape['seq']:,}), both on the same {found[0]['device']['name']}: "
        "milliseconds of forward, of backward and of both, and times "
        "`bf16`.",
        "",
        "| | saved | " + " | ".join(f"JAX {v}" for v in _VERSIONS) + " |",
        "| --- | --- |" + " --- |" * len(_VERSIONS),
    ]
    for case, row in new.items():
        cells = [
            f"{r['forward_ms']:.2f} + {r['backward_ms']:.2f} = "
            f"{r['forward_backward_ms']:.2f} ({r['ratio_to_bf16']:.2f})"
            for r in (old[case], row)
        ]
        lines.append(f"| {case} | {row['saved_units']:.1f}U | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def table_6() -> str:
    """Returns the section on the layers of the paper's table 6 with both versions."""
    found = [load("bench_layer", f"bench_layer_table_6_jax_{v}") for v in _VERSIONS]
    old, new = ({_case_of(row): row for row in f["rows"]} for f in found)
    shapes = list(dict.fromkeys((hidden, seq) for _, hidden, seq in new))
    times = (old[key][_MS] / row[_MS] for key, row in new.items())
    furthest = max(abs(ratio - 1) for ratio in times)
    titles = (f"{hidden:,}, sequence {seq:,}" for hidden, seq in shapes)
    lines = [
        f"The layers of the paper's table 6 on one {found[0]['device']['name']} "
        f"(batch {found[0]['rows'][0]['batch']}): milliseconds of forward and backward "
        f"with JAX {_VERSIONS[0]} and {_VERSIONS[1]}, and times `bf16` with each. The "
        f"versions differ by {furthest:.1%} at most.",
        "",
        "| | hidden " + " | hidden ".join(titles) + " |",
        "| --- |" + " --- |" * len(shapes),
    ]
    for case in dict.fromkeys(case for case, *_ in new):
        pairs = ((old[case, *shape], new[case, *shape]) for shape in shapes)
        cells = [
            f"{a[_MS]:.2f}, {b[_MS]:.2f} "
            f"({a['ratio_to_bf16']:.2f}, {b['ratio_to_bf16']:.2f})"
            for a, b in pairs
        ]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _case_of(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["case"], row["hidden"], row["seq"]


def _time(row: dict[str, Any]) -> str:
    return f"{row[_MS]:.2f} ({row['ratio_to_bf16']:.2f})"


def foreign() -> str:
    """Returns the section on layers that users of Flax wrote."""
    newest = load("bench_foreign")
    shape = newest["rows"][0]
    text = (
        "**Layers of plain Flax** (`bench_foreign`): milliseconds of forward and "
        f"backward in BF16 (hidden {shape['hidden']:,}, batch {shape['batch']}, "
        f"sequence {shape['seq']:,}), times `bf16`, and what is saved. `both` is "
        "`coat.fp8_remat` around a layer whose `dot_general` is "
        "`coat.fp8_dot_general`, `attention again` has `rerun_attention=True`, and "
        "`fp8` is the layer converted by `coat.fp8`. `own layer` is this library's "
        "layer in its `coat` recipe."
    )
    others = load("bench_foreign", f"bench_foreign_jax_{_VERSIONS[0]}")
    return "\n".join([text, "", *_foreign(others), "", *_foreign(newest), ""])


def _foreign_cell(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{_time(row)}, {row['saved_units']:.1f}U"


def _foreign(results: dict[str, Any]) -> list[str]:
    """Returns the lines of a results file, with a table."""
    rows = {(row["layer"], row["case"]): row for row in results["rows"]}
    cases = list(dict.fromkeys(case for _, case in rows))
    lines = [
        f"One {results['device']['name']} with JAX {results['versions']['jax']}.",
        "",
        "| | " + " | ".join(f"`{case}`" for case in cases) + " |",
        "| --- |" + " --- |" * len(cases),
    ]
    for layer in dict.fromkeys(layer for layer, _ in rows):
        cells = [_foreign_cell(rows.get((layer, case))) for case in cases]
        lines.append(f"| {layer} | {' | '.join(cells)} |")
    return lines
