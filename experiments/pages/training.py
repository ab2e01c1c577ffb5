"""Sections on pretraining, meshes, fine-tuning and a vision-language model."""

import textwrap
from collections.abc import Mapping, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any

from experiments.common.answers import ALL
from experiments.common.paper import TABLE_3
from experiments.common.results import load
from experiments.common.seeds import over_seeds
from experiments.common.tables import Column, grouped, markdown
from experiments.pages.sections import markdown_image, section
from experiments.pretrain import comparison
from experiments.pretrain.mesh_losses import ALONE, EARLY
from experiments.training.settings import PRESETS

_TRAININGS = "pretrain_300m_compared", "pretrain_124m_compared"
_FURTHER = "pretrain_300m_h200_compared"  # Further seeds of the larger model.
_LARGER = _TRAININGS[0], _FURTHER


def losses() -> str:
    """Returns README.md's text about validation losses and its figure of losses."""
    results = load("pretrain", _TRAININGS[0])
    of_larger, every = all_gaps(_LARGER), all_gaps()
    gaps, means = (
        {recipe: f"{fmean(each):.1f}%" for recipe, each in by_recipe.items()}
        for by_recipe in (of_larger, every)
    )
    paper = 100 * (TABLE_3["coat"][0] / TABLE_3["bf16"][0] - 1)
    size = _millions(results["rows"][0]["parameters"])
    text = (
        f"A Llama of {size} parameters that reads {_millions(_tokens(results))} bytes "
        "of source code ends with a validation loss above `bf16`'s: by "
        f"{gaps['te']} with `te`, {gaps['coat']} with `coat` and {gaps['coat_max']} "
        f"with `coat_max`, the means of {_counts(of_larger)} seeds. Over all "
        f"{_counts(every)} trainings of this model and a smaller one the mean "
        f"gaps are {means['te']}, {means['coat']} and {means['coat_max']}. The paper's "
        f"OLMo-1B ends {paper:.1f}% above its BF16 run. "
        "[Nearly all](experiments/README.md) of our gap comes from FP8 in forward "
        "matmuls. `coat_bf16` has them in BF16, and BF16 in the last tenth of the "
        f"steps (`--bf16-last 0.1`) leaves {_part_left():.0%} of what the end of a "
        "small training costs. Training losses:"
    )
    return textwrap.fill(text, 98) + "\n"


def _part_left() -> float:
    """Returns what `coat_last_10` costs, as a part of what `coat` costs."""
    results = load("fidelity", "fidelity_text_10m_after_70")
    rows = (row for row in results["summary"] if row["loss"] == "average_own")
    percents = {row["variant"]: row["percent"] for row in rows}
    return percents["coat_last_10"] / percents["coat"]


def _counts(by_recipe: Mapping[str, Sequence[float]]) -> str:
    """Returns the numbers of trainings, as the fewest and the most of a recipe."""
    counts = {len(each) for each in by_recipe.values()}
    return " to ".join(str(count) for count in sorted({min(counts), max(counts)}))


def all_gaps(names: Sequence[str] = (*_TRAININGS, _FURTHER)) -> dict[str, list[float]]:
    """Returns the percentages by which validation losses exceed `bf16`'s, by recipe.

    Each training in the results files `names` is compared with the `bf16` training of
    the same seed and data.
    """
    by_recipe: dict[str, list[float]] = {}
    for name in names:
        rows = load("pretrain", name)["rows"]
        for recipe, each in comparison.gaps(rows, "val_loss").items():
            by_recipe.setdefault(recipe, []).extend(each)
    return by_recipe


def pretraining() -> str:
    """Returns the section on pretraining."""
    parts = [
        "**Pretraining** on the bytes of Python packages, so that vocabularies are "
        "small. Losses, gaps to `bf16` of the same seed and speeds are means over "
        "seeds."
    ]
    for name in _TRAININGS:
        results = load("pretrain", name)
        preset = results["preset"]
        parts += [
            f"The {preset} preset (`{name}`), {_size(results)}, on one "
            f"{results['device']['name']} each:",
            _losses_and_costs(results),
            markdown_image(f"Loss curves of the preset {preset}", "pretrain", name),
        ]
    further = load("pretrain", _FURTHER)
    columns = (
        Column("", lambda line: line[0], "`{}`"),
        Column("trainings", lambda line: len(line[1])),
        Column("gaps, %", lambda line: ", ".join(f"{gap:+.2f}" for gap in line[1])),
        Column("mean, %", lambda line: comparison.interval(line[1])),
    )
    return section(
        *parts,
        f"Further seeds of the larger model (`{_FURTHER}`), on one "
        f"{further['device']['name']} each:",
        _losses_and_costs(further),
        "All seeds of the larger model, and the 95% interval of the mean:",
        markdown(columns, all_gaps(_LARGER).items()),
        "All trainings of both models:",
        markdown(columns, all_gaps().items()),
        *_length(),
        *_scales_of_blocks(),
        _main_job(),
    )


def _length() -> tuple[str, str, str]:
    """Returns a text, a table and a figure on a training of five times the tokens."""
    name = "pretrain_124m_long_compared"
    results = load("pretrain", name)
    gaps = comparison.gaps(results["rows"], "val_loss")["coat"]
    ends = " and ".join(f"{gap:+.2f}%" for gap in gaps)
    plain = [row["val_loss"] for row in results["rows"] if row["recipe"] == "bf16"]
    return (
        f"The smaller model with more tokens (`{name}`), {_size(results)}, which read "
        f"some of the text twice. Over {len(gaps)} seeds `coat` ends "
        f"{ends} from the `bf16` of the same seed, "
        f"while `bf16` itself differs by {100 * (max(plain) / min(plain) - 1):.1f}% "
        "between seeds. The figure shows whether the mean gap grows:",
        _losses_and_costs(results),
        markdown_image("Loss curves of a longer training", "pretrain", name),
    )


def _main_job() -> str:
    """Returns a sentence on `experiments.pretrain` with its default settings."""
    name = "pretrain_cpu_compared"
    results = load("pretrain", name)
    gaps = comparison.gaps(results["rows"], "val_loss")["coat"]
    return (
        f"The main job with its defaults (`{name}`), {_size(results)}, on "
        f"{results['device']['name']}: over {len(gaps)} seeds `coat` ends "
        f"{comparison.interval(gaps)}% above `bf16`."
    )


def _scales_of_blocks() -> tuple[str, str]:
    """Returns a text and a table on a training with the recipe `coat_block`."""
    name = "pretrain_124m_coat_block"
    results = load("pretrain", name)
    answers = {row["recipe"]: row for row in results["tasks"] if row["text"] == ALL}
    of_blocks = answers["coat_block"]
    return (
        f"`coat_block` at the smaller size (`{name}`), one seed, next to a `bf16` "
        f"of the same machine. It has {of_blocks['difference_points']:+.1f} ± "
        f"{of_blocks['half_points']:.1f} points of {of_blocks['questions']:,} "
        "questions:",
        _losses_and_costs(results),
    )


def _tokens(results: Mapping[str, Any]) -> int:
    settings = PRESETS[results["preset"]].settings
    return results["steps"] * settings.tokens_per_step


def _millions(count: int) -> str:
    return f"{count / 1e6:.{0 if count > 1e7 else 1}f}M"


def _size(results: Mapping[str, Any]) -> str:
    """Returns a phrase with a training's numbers of parameters, steps and tokens."""
    settings = PRESETS[results["preset"]].settings
    return (
        f"{_millions(results['rows'][0]['parameters'])} parameters, "
        f"{results['steps']:,} steps of {settings.batch_size} x {settings.seq_len} "
        f"tokens ({_millions(_tokens(results))})"
    )


def _losses_and_costs(results: Mapping[str, Any]) -> str:
    """Returns a table of losses, memory and speed by recipe, averaged over seeds."""
    columns = (
        Column("", "recipe", "`{}`"),
        Column("seeds", "seeds"),
        Column("validation loss", "val_loss", "{:.4f}"),
        Column("gap", "val_gap_percent", "{:+.2f}%"),
        Column("optimizer, bytes a parameter", "optimizer_bytes_per_param", "{:.3f}"),
        _gib("saved activations", "saved_activation_bytes"),
        _gib("memory of a step", "step_bytes"),
        Column("tokens/s", "tokens_per_s", "{:,.0f}"),
    )
    return markdown(columns, over_seeds(results["rows"]).values())


def _gib(title: str, key: str) -> Column:
    return Column(title, lambda row: row[key] / 2**30, "{:.2f} GiB")


def meshes() -> str:
    """Returns the section on training on meshes."""
    results = load("pretrain", "mesh_losses")
    text = (
        f"**Training on meshes** (`mesh_losses`): the tiny preset, {results['steps']} "
        "steps on eight virtual devices, with one initialization and one order of the "
        "data. `bf16` is computed in float32. Differences are those of a step's loss "
        f"to one device's: the largest of {EARLY} steps and of all."
    )
    columns = (
        Column("", "recipe", "`{}`"),
        Column("mesh", "mesh"),
        Column(f"{EARLY} steps", "largest_early_difference", "{:.1g}%"),
        Column("all", "largest_difference", "{:.1g}%"),
        Column("validation", "val_gap_percent", "{:+.3f}%"),
    )
    in_percent = ("largest_early_difference", "largest_difference")
    rows = [
        row | {key: 100 * row[key] for key in in_percent}
        for row in results["rows"]
        if row["mesh"] != ALONE
    ]
    image = markdown_image("Loss curves on meshes", "pretrain", "mesh_losses")
    return section(text, markdown(columns, rows), image)


def finetuning() -> str:
    """Returns the section on fine-tuning."""
    name = "finetune_compare"
    results = load("finetune", name)
    rows = {(row["recipe"], row["family"]): row for row in results["rows"]}
    gaps = {r["recipe"]: r for r in results["differences"] if r["family"] == "all"}
    first, training = results["rows"][0], results["training"]
    text = (
        f"**Fine-tuning on generated problems** (`{name}`): a Llama of "
        f"{training['parameters'] / 1e6:.0f}M parameters that has read source code, "
        f"{training['steps']:,} steps on one {results['device']['name']}. Exact match "
        f"in percent on {rows['bf16', 'all']['questions']:,} problems that no training "
        f"read, {first['seeds']} seeds; then points above `bf16` on the same problems, "
        "with a 95% interval over problems."
    )
    shares = {key: row["exact_match_percent"] for key, row in rows.items()}
    points = {
        recipe: (row["difference_points"], row["high_points"])
        for recipe, row in gaps.items()
    }
    image = markdown_image("Exact match, and differences", "finetune", name)
    return section(text, _answers(shares, points), image)


def finetuning_real() -> str:
    """Returns the section on fine-tuning a published pretrained model."""
    name = "finetune_real"
    results, in_bf16 = (load(name, n) for n in (name, f"{name}_coat_bf16"))
    first, training = results["rows"][-1], results["training"]
    text = (
        f"**Fine-tuning SmolLM2-135M-Instruct** (`{name}`): "
        f"{_millions(training['parameters'])} parameters, {training['steps']:,} steps "
        "on word problems and dialogues, on one "
        f"{results['device']['name']}, {first['seeds']} seeds. The loss of answers on "
        "conversations that no training read, in nats a token; then exact match in "
        f"percent on {first['questions']:,} of their problems, and points above "
        "`bf16` on the same problems, with a 95% interval over problems. Nothing here "
        "is about speed: few kernels take a hidden size of 576."
    )
    again = (
        f"`coat_bf16` (`{name}_coat_bf16`), next to a `bf16` of the same machine, an "
        f"{in_bf16['device']['name']}:"
    )
    return section(text, _real_answers(results), again, _real_answers(in_bf16))


def _real_answers(results: dict[str, Any]) -> str:
    """Returns a table of losses and right answers of a fine-tuning."""
    shares = {
        (row["recipe"], row["family"]): row["exact_match_percent"]
        for row in results["rows"]
    }
    points = {
        row["recipe"]: (row["difference_points"], row["high_points"])
        for row in results["differences"]
        if row["family"] == "all"
    }
    losses = {
        recipe: fmean(row["val_loss"] for row in rows)
        for recipe, rows in grouped(results["losses"], itemgetter("recipe")).items()
    }
    return _answers(shares, points, losses)


def finetuning_large() -> str:
    """Returns the section on fine-tuning a model of Llama-3-8B's shape on one GPU."""
    name = "finetune_large"
    results, of_all = (load("finetune_real", n) for n in (name, f"{name}_all"))
    rows = [*of_all["rows"], *results["rows"]]
    text = (
        f"**Fine-tuning Llama-3-8B's shape** (`{name}`): made-up weights, one sequence "
        f"of {rows[0]['seq_len']:,} tokens a step, {rows[0]['steps']} steps on one "
        f"{results['device']['name']}. All {rows[0]['parameters'] / 1e9:.1f}B "
        "parameters in `coat`, with the optimizer inside backward and an interruption "
        f"half way; and adapters of {_millions(rows[-1]['parameters'])} parameters, "
        "for which `coat` and `coat_max` keep the frozen weights in FP8, a byte a "
        "number."
    )
    columns = (
        Column("", _what_is_trained),
        Column("tokens/s", "tokens_per_s", "{:,.0f}"),
        Column("peak, GiB", lambda row: row["device_peak_bytes"] / 2**30, "{:.1f}"),
        Column("validation loss", "val_loss", "{:.3f}"),
    )
    return section(text, markdown(columns, rows))


def _what_is_trained(row: Mapping[str, Any]) -> str:
    part, recipe = row["training"].split("-")
    return f"{part}, `{recipe}`"


def _answers(
    shares: Mapping[tuple[str, str], float],
    points: Mapping[str, tuple[float, float]],
    losses: Mapping[str, float] | None = None,
) -> str:
    """Returns a table of right answers by recipe.

    Args:
      shares: The percentage of right answers by recipe and kind of question.
      points: The points above `bf16` by recipe, and the upper end of their interval.
      losses: The test loss by recipe; None means no column of losses.
    """
    recipes, kinds = (list(dict.fromkeys(key)) for key in zip(*shares, strict=True))

    def point(recipe: str) -> str:
        mean, high = points[recipe]
        return f"{mean:+.1f} ± {high - mean:.1f}"

    columns = [Column("", lambda recipe: recipe, "`{}`")]
    if losses:
        columns.append(Column("test loss", losses.get, "{:.4f}"))
    for kind in kinds:
        columns.append(
            Column(kind, lambda recipe, kind=kind: shares[recipe, kind], "{:.1f}")
        )
    columns.append(Column("points", lambda r: point(r) if r in points else None))
    return markdown(columns, recipes)


def vision_language() -> str:
    """Returns the section on a vision-language model."""
    name = "vlm_gpu"
    results = load("vlm", name)
    repeated = load("vlm", f"{name}_seeds")
    text = (
        f"**A vision-language model** (`{name}`): a ViT encoder, a projector and "
        f"a Llama decoder, {results['rows'][0]['parameters'] / 1e6:.1f}M parameters, "
        "trained to answer questions about scenes. Right answers in percent to "
        f"{_questions_and_seeds(results)}; then "
        "points above `bf16` on the same questions with a 95% interval."
    )
    again = f"With more seeds (`{name}_seeds`): {_questions_and_seeds(repeated)}."
    image = markdown_image("Loss while training", "vlm", f"{name}_losses")
    return section(
        text, _scene_answers(results), again, _scene_answers(repeated), image
    )


def _questions_and_seeds(results: Mapping[str, Any]) -> str:
    """Returns a phrase with the numbers of questions and seeds, and the device."""
    every = next(row for row in results["summary"] if row["kind"] == ALL)
    return (
        f"{every['questions']:,} questions about unseen scenes, {every['seeds']} "
        f"seeds, on {results['device']['name']}"
    )


def _scene_answers(results: Mapping[str, Any]) -> str:
    rows = {(row["recipe"], row["kind"]): row for row in results["summary"]}
    shares = {key: row["accuracy_percent"] for key, row in rows.items()}
    points = {
        recipe: (row["difference_points"], row["difference_high_points"])
        for (recipe, kind), row in rows.items()
        if kind == ALL and recipe != "bf16"
    }
    means = {
        recipe: fmean(row["test_loss"] for row in trainings)
        for recipe, trainings in grouped(results["rows"], itemgetter("recipe")).items()
    }
    return _answers(shares, points, means)
