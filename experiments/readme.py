"""Renders README.md's headline table and experiments/README.md.

The figures come from the results files in experiments/results/.

uv run python -m experiments.readme
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from experiments.common.results import default_path, load
from experiments.optimizer.drift_cases import METHODS, OURS
from experiments.pretrain.mesh_losses import ALONE, EARLY
from experiments.pretrain.settings import PRESETS

PROJECT = Path(__file__).resolve().parent.parent
# Case and batch size of each row of the table at the top of README.md.
_HEADLINE = (
    ("bf16", 2),
    ("bf16, products and attention saved", 8),
    ("te", 2),
    ("coat", 2),
    ("coat", 8),
)
_BEGIN, _END = "<!-- headline: begin -->\n", "<!-- headline: end -->\n"
_RESULTS = """\
# Results

Every figure comes from a file `results/NAME/NAME.json`, which also says by which
`command`, on which `device` and with which `versions` it was measured. `rows` holds the
records, with units in their keys, and `bars` says what was asked for and whether it
holds. `uv run python -m experiments.readme` renders this page from these files. Where a
command has `--data runs/packages`, that folder held the .py files of the machine's
installed packages.

"""


def headline(readme: str) -> str:
    """Returns README.md's text with a new table between the two headline markers."""
    before, _, rest = readme.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return before + _BEGIN + _headline() + _END + after


def results() -> str:
    """Returns the text of experiments/README.md."""
    sections = (
        _end_to_end(),
        _estimates(),
        _layer(),
        _activations(),
        _pretraining(),
        _meshes(),
        _vision_language(),
        _optimizer(),
        _drift(),
        _curves(),
        _wrapped(),
        _kernels(),
    )
    return _RESULTS + "\n".join(filter(None, sections))


def main(argv: Sequence[str] | None = None) -> None:
    """Rewrites README.md's headline table and experiments/README.md."""
    argparse.ArgumentParser(
        prog="python -m experiments.readme", description=__doc__
    ).parse_args(argv)
    readme = PROJECT / "README.md"
    readme.write_text(headline(readme.read_text()))
    (PROJECT / "experiments" / "README.md").write_text(results())


def _headline() -> str:
    rows = {(row["case"], row["batch"]): row for row in load("bench_e2e")["rows"]}
    lines = [
        "| Recipe, batch | tokens/s | peak memory | of which optimizer |",
        "| --- | --- | --- | --- |",
    ]
    for case, batch in _HEADLINE:
        row = rows[case, batch]
        lines.append(
            f"| {case}, {batch} | {row['tokens_per_s']:,.0f} "
            f"| {row['peak_gib']:.0f} GiB | {row['optimizer_gib']:.0f} GiB |"
        )
    return "\n".join([*lines, ""])


def _end_to_end() -> str:
    results = load("bench_e2e")
    first = results["rows"][0]
    lines = [
        f"**Training Llama-2-7B on one GPU** (`bench_e2e`): BF16 parameters, sequences "
        f"of {first['seq']:,} tokens, one {results['device']['name']}. `bf16` and `te` "
        "have `optax.adamw` with float32 moments, `coat` and `coat_max` "
        "`coat.fused_update`. Times its best: over the fastest `bf16` row here.",
        "",
        "| | batch | tokens/s | times `bf16` | times its best | optimizer "
        "| saved activations | peak |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["rows"]:
        found = f"| {row['case']} | {row['batch']} "
        if "tokens_per_s" in row:
            ratio = row.get("ratio_to_bf16")
            found += f"| {row['tokens_per_s']:,.0f} "
            found += f"| {'-' if ratio is None else format(ratio, '.2f')} "
            found += f"| {row['ratio_to_best_bf16']:.2f} "
        else:
            found += f"| {row['error']} | - | - "
        sizes = (row[f"{of}_gib"] for of in ("optimizer", "activations", "peak"))
        lines.append(found + " ".join(f"| {size:.1f} GiB" for size in sizes) + " |")
    return "\n".join([*lines, ""])


def _estimates() -> str:
    results = load("estimate")
    lines = [
        "**Predicted memory** (`estimate`): `python -m experiments.estimate` predicts "
        "the GiB of a training step by kind, and the largest batch that fits, without "
        "a GPU. Predictions stand here beside measured peaks: the device's, or else "
        f"the compiled step's. {_grown(results['rows'])}",
        "",
        "| | batch | parameters, gradients | optimizer | saved | the rest | predicted "
        "| measured | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["rows"]:
        measured = row["device_peak_gib"] or row["step_peak_gib"]
        model = row["parameters_gib"] + row["gradients_gib"]
        rest = row["workspace_gib"] + row["gathered_gib"] + row["logits_gib"]
        lines.append(
            f"| {row['of']}, {row['case']} | {row['batch']} | {model:.1f} "
            f"| {row['optimizer_gib']:.1f} | {row['saved_gib']:.1f} | {rest:.1f} "
            f"| {row['peak_gib']:.1f} | {measured:.1f} | {row['error_percent']:+.1f}% |"
        )
    return "\n".join([*lines, ""])


def _grown(rows: list[dict[str, Any]]) -> str:
    """Returns how the optimizer's state has changed since the peaks were measured."""
    grown = max(row["optimizer_gib"] - row["measured_optimizer_gib"] for row in rows)
    return (
        f"The FP8 state of today is up to {grown:.2f} GiB larger than the measured one "
        "was, so that predictions without it would be lower by as much."
    )


def _layer() -> str:
    results = load("bench_layer")
    rows = {(r["case"], r["hidden"], r["seq"]): r for r in results["rows"]}
    shapes = list(dict.fromkeys(key[1:] for key in rows))
    commit = results["versions"]["commit"]
    older = {key[1:] for key, row in rows.items() if row["commit"] != commit}
    titles = [f"{h}, {s}{' \\*' * ((h, s) in older)}" for h, s in shapes]
    lines = [
        f"**One Llama layer** (`bench_layer`): milliseconds of forward and backward "
        f"with BF16 weights and batch 4 on one {results['device']['name']}, all cases "
        "in turns, and times `bf16`, by hidden size and sequence. `bf16` is what "
        "`jax.vjp` saves, behind it are policies of `jax.checkpoint` and "
        "`coat.fp8_remat` of the same layer.",
        "",
        "| | saved | " + " | ".join(titles) + " |",
        "| --- | --- |" + " --- |" * len(shapes),
    ]
    for case in dict.fromkeys(key[0] for key in rows):
        of_case = [rows[case, *shape] for shape in shapes]
        times = " | ".join(
            f"{row['forward_backward_ms']:.2f} ({row['ratio_to_bf16']:.2f})"
            for row in of_case
        )
        units = [row["saved_units"] for row in of_case]
        saved = f"{units[0]:.1f}U"
        if max(units) > 1.01 * units[0]:
            saved += f", \\* {max(units):.1f}U"
        lines.append(f"| {case} | {saved} | {times} |")
    note = ["", "\\* Measured at an earlier commit."] if older else []
    image = _image("Saved activations and time", "bench_layer", "bench_layer")
    return "\n".join([*lines, *note, "", image, ""])


def _pretraining() -> str:
    results = load("pretrain", "pretrain_124m")
    first = results["rows"][0]
    settings = PRESETS[results["preset"]].settings
    tokens = results["steps"] * settings.tokens_per_step
    lines = [
        f"**Pretraining** (`pretrain_124m`): the 124m preset on the bytes of Python "
        f"packages, {first['parameters'] / 1e6:.0f}M parameters with the small "
        f"vocabulary, {results['steps']:,} steps of "
        f"{settings.batch_size} x {settings.seq_len} tokens "
        f"({tokens / 1e6:.0f}M) on one {results['device']['name']} each:",
        "",
        "| | validation loss | gap | optimizer, bytes a parameter | saved activations "
        "| memory of a step | tokens/s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["rows"]:
        lines.append(
            f"| `{row['recipe']}` | {row['val_loss']:.4f} "
            f"| {row['val_gap_percent']:+.2f}% "
            f"| {row['optimizer_bytes_per_param']:.3f} "
            f"| {row['saved_activation_bytes'] / 2**30:.2f} GiB "
            f"| {row['step_bytes'] / 2**30:.2f} GiB | {row['tokens_per_s']:,.0f} |"
        )
    image = _image("Loss curves and their difference", "pretrain", "pretrain_124m")
    return "\n".join([*lines, "", image, "", *_seeds()])


def _seeds() -> list[str]:
    summary = load("pretrain", "pretrain_124m_seeds")["summary"]
    lines = [
        "Over several seeds (`pretrain_124m_seeds`), each beside `bf16` with the same "
        "seed and data:",
        "",
        "| | scaling | seeds | gap | standard error |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in summary:
        error = row["standard_error_percent"]
        error = "-" if error is None else f"{error:.2f}%"
        lines.append(
            f"| `{row['recipe']}` | {row['scaling'].replace('_', ' ')} "
            f"| {row['seeds']} | {row['val_gap_percent']:+.2f}% | {error} |"
        )
    return [*lines, ""]


def _meshes() -> str:
    found = load("pretrain", "mesh_losses")
    lines = [
        f"**Training on meshes** (`mesh_losses`): the tiny preset, {found['steps']} "
        "steps on eight virtual devices, with one initialization and one order of the "
        "data. `bf16` is computed in float32. Differences are those of a step's loss "
        f"to one device's: the largest of {EARLY} steps and of all.",
        "",
        f"| | mesh | {EARLY} steps | all | validation |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        gap = f"{row['val_gap_percent']:+.3f}%"
        sizes = row["largest_early_difference"], row["largest_difference"]
        if row["mesh"] != ALONE:
            cells = " | ".join(f"{100 * size:.1g}%" for size in sizes)
            lines.append(f"| `{row['recipe']}` | {row['mesh']} | {cells} | {gap} |")
    image = _image("Loss curves on meshes", "pretrain", "mesh_losses")
    return "\n".join([*lines, "", image, ""])


def _vision_language() -> str:
    name = "vlm_gpu"
    try:
        results = load("vlm", name)
    except FileNotFoundError:  # No GPU has measured it yet.
        return ""
    rows = {(row["recipe"], row["kind"]): row for row in results["summary"]}
    recipes, kinds = (list(dict.fromkeys(key)) for key in zip(*rows, strict=True))
    first = rows["bf16", "all"]
    lines = [
        f"**A vision-language model** (`{name}`): a ViT encoder, a projector and "
        f"a Llama decoder, {results['rows'][0]['parameters'] / 1e6:.1f}M parameters, "
        "trained to answer questions about scenes. Right answers in percent to "
        f"{first['questions']:,} questions about unseen scenes, {first['seeds']} "
        f"seed{'s' * (first['seeds'] > 1)}, on one {results['device']['name']}; then "
        "points above `bf16` on the same questions with a 95% interval.",
        "",
        "| | test loss | " + " | ".join(kinds) + " | points |",
        "| --- | --- |" + " --- |" * (len(kinds) + 1),
    ]
    for recipe in recipes:
        own = [r["test_loss"] for r in results["rows"] if r["recipe"] == recipe]
        shares = (rows[recipe, kind]["accuracy_percent"] for kind in kinds)
        cells = " | ".join(f"{share:.1f}" for share in shares)
        points = rows[recipe, "all"]["difference_points"]
        half = rows[recipe, "all"]["difference_high_points"] - points
        gap = "-" if recipe == "bf16" else f"{points:+.1f} ± {half:.1f}"
        lines.append(f"| `{recipe}` | {sum(own) / len(own):.4f} | {cells} | {gap} |")
    image = _image("Loss while training", "vlm", f"{name}_losses")
    return "\n".join([*lines, "", image, ""])


def _optimizer() -> str:
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


def _drift() -> str:
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
    image = _image("Updates over exact ones", "drift", "drift")
    return "\n".join([*lines, "", image, ""])


def _curves() -> str:
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
            _image("Loss curves and differences", "optimizer_curves", name),
            "",
            f"The same with a learning rate that falls to zero (`{name}_falling`):",
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


def _wrapped() -> str:
    results = load("wrapped_optimizers", "wrapped_optimizers_tiny")
    text = (
        "**Other optimizers** (`wrapped_optimizers_tiny`): each of optax's as it is "
        "and within `coat.with_quantized_state`, on the "
        f"{results['settings']['preset']} preset's model, {_length(results)}."
    )
    return "\n".join([text, "", *_gaps(results), ""])


def _kernels() -> str:
    results = load("bench_kernels")
    rows = [row for row in results["rows"] if "ms" in row]
    quick = [row for row in rows if "share_of_copy" in row]
    shape = quick[-1]["shape"]
    lines = [
        f"**The kernels** (`bench_kernels`): arrays of {shape} in BF16 on one "
        f"{results['device']['name']}, in turns with what XLA makes of the same "
        "operation; GB/s count the fewest bytes that it needs.",
        "",
        "| | ms | GB/s | of a device copy's | times XLA |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in quick:
        if row["shape"] == shape:
            lines.append(
                f"| {row['kernel']} | {row['ms']:.3f} | {row['gb_per_s']:,.0f} "
                f"| {row['share_of_copy']:.2f} | {row['ratio_to_xla']:.2f} |"
            )
    lines += [
        "",
        "Matrix products of Llamas' layers at 8,192 and 16,384 tokens, and of 8192^3, "
        "beside cuBLASLt's FP8 call through XLA: the mean over a row's shapes, and the "
        "worst of them. Where XLA is faster XLA runs. Heads are compared with "
        "cuBLASLt's product and XLA's rotary embeddings and splitting behind it, added "
        "ones with an addition behind it. These two and blocks have more scales than "
        "what they are compared with. Kernels run one after the other, at what the "
        f"chip may draw{_rested(rows)}.",
        "",
        "| | shapes | TFLOP/s | times cuBLASLt | at worst |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, found in _grouped_products(rows).items():
        rates = [row["tflop_per_s"] for row in found]
        ratios = [row["ratio_to_xla"] for row in found]
        lines.append(
            f"| {name} | {len(found)} | {geometric_mean(rates):,.0f} "
            f"| {geometric_mean(ratios):.2f} | {min(ratios):.2f} |"
        )
    return "\n".join([*lines, ""])


def _rested(rows: list[dict[str, Any]]) -> str:
    """Returns a clause with the TFLOP/s measured with a pause before each call."""
    rates = {
        row["kernel"]: f"{row['rested_tflop_per_s']:,.0f}"
        for row in rows
        if "rested_tflop_per_s" in row
    }
    if not rates:
        return ""
    listed = ", ".join(f"{kernel} {rate}" for kernel, rate in rates.items())
    return f"; where it rests before each call, 8192^3 has {listed} TFLOP/s"


def _grouped_products(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Groups the matmul rows by kernel and by the last part of the row's name.

    The last part is the pass of a layer's matmul, or the cube of 8192^3.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "tflop_per_s" not in row:
            continue
        of = row["name"].rsplit(", ", 1)[-1]
        of = "8192^3" if of == "cube" else of
        found.setdefault(f"{row['kernel']}, {of}", []).append(row)
    return found


def _activations() -> str:
    results = load("activation_memory")
    shape = results["shape"]
    lines = [
        f"**Saved activations of one Llama layer** (`activation_memory`): hidden "
        f"{shape['hidden']}, batch {shape['batch']}, sequence {shape['seq']}, counted "
        f"on one {results['device']['name']}; 1U is batch x sequence x hidden x 2 "
        "bytes. `bf16` is what `jax.vjp` saves without any `jax.checkpoint`.",
        "",
        "| | MiB | U | U in the paper |",
        "| --- | --- | --- | --- |",
    ]
    for row in results["rows"]:
        paper = "-" if row["paper_units"] is None else row["paper_units"]
        name, mib, units = row["recipe"], row["mib"], row["units"]
        lines.append(f"| `{name}` | {mib:.0f} | {units:.2f} | {paper} |")
    return "\n".join([*lines, ""])


def _image(text: str, experiment: str, name: str) -> str:
    path = default_path(experiment, name).with_suffix(".png")
    return f"![{text}]({path.relative_to('experiments')})"


if __name__ == "__main__":
    main()
