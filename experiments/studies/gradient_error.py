"""Measures the error of each recipe's gradients against float32, layer by layer.

    uv run python -m experiments.studies.gradient_error

The command trains the model of `experiments.pretrain` and computes gradients of batches
that the model has not seen: in float32, and with each recipe from the same float32
parameters. An error is the root mean square of the difference over the root mean square
of the float32 gradient. For comparison, the column "batch to batch" shows the distance
of a single batch's gradient from the mean over batches. The paper has no table of these
errors; its figures 5 to 7 show that losses agree.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from coat_jax.layers.recipes import RECIPES
from coat_jax.models import llama
from experiments.common import timing
from experiments.common.results import write_results
from experiments.common.style import RECIPE_COLORS, framed
from experiments.common.tables import new_table
from experiments.common.trained import Trained, structure
from experiments.studies import trained
from experiments.training import arguments
from experiments.training.settings import Recipe

Row = dict[str, Any]
NOISE = "batch to batch"
# Names of a model's parameters outside its layers.
OUTSIDE = ("embedding", "norm", "head")
_COLORS = RECIPE_COLORS | {NOISE: "#b8c0cc"}
# Gradients by parameter name. The first axis is the layer.
_Gradient = dict[str, Float[Array, "layers ..."]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with the arguments `argv`, and returns an exit code."""
    top = trained.parser("studies.gradient_error", __doc__)
    top.add_argument("--batches", type=int, help="gradients to compare (4)")
    flags = arguments.read(top, argv)
    try:
        batches = flags.pop("batches", 4)
        out = trained.results_file("gradient_error", flags)
        model = trained.train_as(flags)
        rows = error_rows(model, batches)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Console(width=110).print(table(rows))
    draw(rows).savefig(out.with_suffix(".png"))
    about = {"preset": flags.get("preset", "cpu"), "recipe": model.config.recipe}
    write_results(out, rows=rows, batches=batches, val_loss=model.loss, **about)
    print(f"{out}, and a figure next to it")
    return 0


def error_rows(model: Trained, batches: int) -> list[Row]:
    """Returns rows with the errors of each recipe, by layer and parameter.

    Rows with the kind "all" are for all parameters of a layer, and of the model.

    Args:
      model: The trained model.
      batches: The number of batches.

    Raises:
      ValueError: If `batches` is below 2 or above the number of batches of `model`.
    """
    if not 2 <= batches <= len(model.batches):
        raise ValueError(
            f"batches must be 2 to the {len(model.batches)} there are, got {batches}"
        )
    params = model.wide_params()
    exact = _gradients(model, "bf16", jnp.float32)
    of_recipes = {name: _gradients(model, name, jnp.bfloat16) for name in RECIPES}
    sums = {name: _Sums() for name in RECIPES}
    total = None
    for batch in tqdm(model.batches[:batches], "gradients", disable=None):
        with jax.default_matmul_precision("highest"):
            reference = exact(params, batch)
        for name, gradients in of_recipes.items():
            sums[name].add(gradients(params, batch), reference)
        total = jax.tree.map(jnp.add, total, reference) if total else reference
    mean = jax.tree.map(lambda g: g / batches, total)
    rows = [row for name in RECIPES for row in sums[name].rows(name)]
    return rows + _noise_rows(sums["bf16"], mean, batches)


def _gradients(model: Trained, recipe: Recipe, dtype: DTypeLike) -> Callable:
    """Returns a function of parameters and a batch that computes the loss gradient.

    Its result is a dictionary from parameter names to gradients. `dtype` is the dtype
    of activations.
    """
    graph = structure(model.config_as(recipe, dtype))

    def loss(params, batch):
        merged = nnx.merge(graph, params)
        return llama.cross_entropy(merged, batch[:, :-1], batch[:, 1:])

    def gradients(params, batch) -> _Gradient:
        by_name = nnx.to_pure_dict(jax.grad(loss)(params, batch))
        layers = by_name.pop("layers")
        return layers | {name: g[None] for name, g in by_name.items()}

    return jax.jit(gradients, compiler_options=timing.OPTIONS)


class _Sums:
    """Sums over batches of four scalar products of gradients.

    With a recipe's gradient g and the float32 gradient r, the products are |g - r|^2,
    g . r, |g|^2 and |r|^2, each by parameter name and layer.
    """

    def __init__(self) -> None:
        self.values: dict[str, Float[np.ndarray, "4 layers"]] = {}

    def add(self, gradient: _Gradient, exact: _Gradient) -> None:
        """Adds the products of one batch's gradients to the sums."""
        for name, values in jax.device_get(_compare(gradient, exact)).items():
            self.values[name] = self.values.get(name, 0) + np.asarray(
                values, np.float64
            )

    def rows(self, recipe: str) -> list[Row]:
        """Returns a row per layer and parameter, per layer, and for the model."""
        rows = []
        for layer, kind, (lost, product, norm, exact) in _entries(self.values):
            cosine = product / np.sqrt(norm * exact)
            row = {"recipe": recipe, "layer": layer, "kind": kind}
            error = 100 * np.sqrt(lost / exact)
            rows.append(row | {"error_percent": float(error), "cosine": float(cosine)})
        return rows


@jax.jit
def _compare(gradient: _Gradient, exact: _Gradient) -> _Gradient:
    def sums(g, r):
        pairs = ((g - r, g - r), (g, r), (g, g), (r, r))
        axes = tuple(range(1, r.ndim))
        return jnp.stack([jnp.sum(a * b, axis=axes) for a, b in pairs])

    return jax.tree.map(sums, gradient, exact)


def _noise_rows(sums: _Sums, mean: _Gradient, batches: int) -> list[Row]:
    """Returns rows with the distance of one batch's gradient from the mean gradient.

    The error is sqrt(n / (n - 1) (S - n |mean|^2) / S), where n is the number of
    batches and S the sum of squared float32 gradients over batches.
    """
    of_mean = jax.device_get(_compare(mean, mean))
    rows = []
    pairs = {
        name: np.stack([values[3], batches * of_mean[name][3]])
        for name, values in sums.values.items()
    }
    for layer, kind, (squares, explained) in _entries(pairs):
        error = 100 * np.sqrt(
            max(squares - explained, 0.0) * batches / (batches - 1) / squares
        )
        rows.append(
            {
                "recipe": NOISE,
                "layer": layer,
                "kind": kind,
                "error_percent": float(error),
                "cosine": None,
            }
        )
    return rows


def _entries(values: dict[str, np.ndarray]):
    """Yields the layer, the kind of parameter, and the sums.

    There is one entry per layer and parameter, one of the kind "all" per layer, and one
    of the kind "all" for the model. A layer of None means outside the layers, or all
    parameters of the model.
    """
    layers = [name for name in values if name not in OUTSIDE]
    for name in values:
        for layer, one in enumerate(values[name].T):
            yield (None if name in OUTSIDE else layer), name, one
    sums = sum(values[name] for name in layers)
    for layer, one in enumerate(sums.T):
        yield layer, "all", one
    yield None, "all", sum(v.sum(axis=1) for v in values.values())


def table(rows: list[Row]) -> Table:
    """Returns a table of errors by kind of parameter and recipe.

    A cell has the median over layers, and the worst layer's error in brackets.
    """
    names = list(dict.fromkeys(row["recipe"] for row in rows))
    title = "Error of gradients, % of float32's (worst layer's)"
    result = new_table(title, "", *names)
    for kind in dict.fromkeys(row["kind"] for row in rows):
        cells = []
        for name in names:
            errors = [
                row["error_percent"]
                for row in rows
                if (row["recipe"], row["kind"]) == (name, kind)
                and (kind != "all" or row["layer"] is None)
            ]
            worst = f" ({max(errors):.1f})" if len(errors) > 1 else ""
            cells.append(f"{np.median(errors):.1f}{worst}")
        result.add_row(kind, *cells)
    return result


def draw(rows: list[Row]) -> Figure:
    """Draws errors by layer, with one panel per kind of layer parameter."""
    of_layers = [r for r in rows if r["layer"] is not None and r["kind"] != "all"]
    kinds = list(dict.fromkeys(row["kind"] for row in of_layers))
    figure = Figure(figsize=(9, 5.5), layout="constrained", dpi=150)
    panels = figure.subplots(2, -(-len(kinds) // 2), sharex=True, sharey=True)
    for axes, kind in zip(panels.flat, kinds, strict=False):
        for name in dict.fromkeys(row["recipe"] for row in rows):
            selected = [
                r for r in of_layers if (r["recipe"], r["kind"]) == (name, kind)
            ]
            layers = [row["layer"] for row in selected]
            errors = [row["error_percent"] for row in selected]
            style = dict(color=_COLORS[name], marker=".", linewidth=1.4)
            axes.plot(layers, errors, **style, label=name)
        axes.set_title(kind, loc="left", fontsize=11)
        axes.set_yscale("log")
        axes.xaxis.get_major_locator().set_params(integer=True)
        framed(axes)
    for row in panels:
        row[0].set_ylabel("error, %")
    for axes in panels[-1]:
        axes.set_xlabel("layer")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    where = dict(loc="outside lower center", ncols=len(labels), fontsize=9)
    figure.legend(handles, labels, frameon=False, **where)
    return figure


if __name__ == "__main__":
    sys.exit(main())
