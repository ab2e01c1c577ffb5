"""Training curves of optimizers: optax.adamw against FP8 moments and BF16 parameters.

    uv run python -m experiments.studies.curves

The command trains the model of `experiments.pretrain` with the recipe `bf16` and
several optimizers: `optax.adamw` and `coat.fp8_adamw` with float32 parameters, COAT's
scheme as it was published, an earlier form of `coat.fp8_adamw`, and both optimizers
with BF16 parameters, rounded to nearest or (only `coat.fp8_adamw`) stochastically. For
each seed, all trainings start from the same initialization and read the data in the
same order. Results are written after every training. Call the command again after an
interruption, or with more seeds, and it runs only the missing trainings.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from tqdm import tqdm

import coat_jax as coat
from experiments.common.programs import results_path
from experiments.common.results import default_path, read_results, write_results
from experiments.optimizer.drift_cases import EARLIER
from experiments.optimizer.moments import GROUP
from experiments.pretrain import program as pretrain
from experiments.studies import curve_summary
from experiments.training import arguments
from experiments.training.interrupts import STOPPED
from experiments.training.job import Inputs, train_batches
from experiments.training.optimizer import Optimizer
from experiments.training.settings import ParamDtype, Rounding, Settings, model_config
from experiments.training.trainer import Trainer

Row = dict[str, Any]
# Settings that differ between trainings, or that change no result. A results file may
# be continued with other values of these.
_NOT_SHARED = ("recipes", "param_dtype", "rounding", "seed", "data", "minutes")
_NOT_SHARED += ("save_every", "keep")
# Results files that lack one of these settings are older than the setting, and have its
# default.
_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(Settings)
    if field.default is not dataclasses.MISSING and field.name not in _NOT_SHARED
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """An optimizer and a parameter dtype to train with.

    Attributes:
      name: The name in tables and results.
      optimizer: The optimizer.
      param_dtype: The dtype in which parameters are stored.
      rounding: The rounding of BF16 parameters by `coat.fp8_adamw`.
      beside: The name of the variant to compare with; None means the first variant.
    """

    name: str
    optimizer: Optimizer
    param_dtype: ParamDtype = "float32"
    rounding: Rounding = "nearest"
    beside: str | None = None


OPTAX = Optimizer(optax.adamw, fused=False)
FP8 = Optimizer(coat.fp8_adamw, fused=True)
# COAT's scheme as it was published: the first moment itself instead of m / sqrt(v),
# E4M3 for both moments, codes rounded to nearest, float32 scales.
_COAT = Optimizer(
    partial(
        coat.fp8_adamw, normalize_mu=False, nu_format=coat.E4M3, rounding="nearest"
    ),
    fused=True,
)


def _earlier(learning_rate, *, b1, b2, weight_decay, mask):
    """Returns AdamW that stores its moments in the earlier scheme `EARLIER`.

    The arguments are the arguments of `optax.adamw`.
    """
    adam, key = optax.scale_by_adam(b1, b2), jax.random.key(0)

    def stored(mu, nu):
        pad = -mu.size % GROUP
        groups = [jnp.pad(x.ravel(), (0, pad)).reshape(-1, GROUP) for x in (mu, nu)]
        rounded = EARLIER.read(EARLIER.store(*groups, key))
        return [x.ravel()[: mu.size].reshape(mu.shape) for x in rounded]

    def update(updates, state, params=None):
        updates, state = adam.update(updates, state, params)
        leaves, treedef = jax.tree.flatten(state.mu)
        pairs = map(stored, leaves, treedef.flatten_up_to(state.nu))
        mu, nu = map(treedef.unflatten, zip(*pairs, strict=True))
        return updates, state._replace(mu=mu, nu=nu)

    return optax.chain(
        optax.GradientTransformation(adam.init, update),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


_BF16: dict[str, Any] = {"param_dtype": "bfloat16"}
VARIANTS = (
    Variant(name="optax.adamw", optimizer=OPTAX),
    Variant(name="fp8_adamw", optimizer=FP8),
    Variant(name="COAT as published", optimizer=_COAT),
    Variant(name="an earlier fp8_adamw", optimizer=Optimizer(_earlier, fused=False)),
    Variant(name="optax.adamw, BF16 nearest", optimizer=OPTAX, **_BF16),
    Variant(name="fp8_adamw, BF16 nearest", optimizer=FP8, **_BF16),
    Variant(
        name="fp8_adamw, BF16 stochastic", optimizer=FP8, rounding="stochastic", **_BF16
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with the arguments `argv`, and returns an exit code."""
    program = "experiments.studies.curves"
    return compare(argv, VARIANTS, program, "optimizer_curves", __doc__)


def compare(
    argv: Sequence[str] | None,
    variants: Sequence[Variant],
    program: str,
    name: str,
    doc: str,
) -> int:
    """Runs a program that trains with some of `variants`; returns an exit code.

    Args:
      argv: The program's command line; None means this process's.
      variants: The variants that `--optimizers` chooses from.
      program: The program's module.
      name: The name of the results, without the preset's name.
      doc: The program's description, which `--help` prints.
    """
    flags = arguments.read(parser(program, doc), argv)
    seeds, out = flags.pop("seeds", 4), flags.pop("out", None)
    names = flags.pop("optimizers", None)
    try:
        variants = chosen(names, variants)
        settings = arguments.settings(flags)
        if out is None:
            out = default_path(name, f"{name}_{settings.preset}")
            out.parent.mkdir(exist_ok=True)
        curves = Curves.open(out, settings, seeds, variants)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        curves.train()
    except KeyboardInterrupt:
        print(f"\n{out} keeps what is finished; the same command goes on from there")
        return STOPPED
    summary = curves.write()
    title = curves.title(summary[0]["seeds"])
    figure = curve_summary.figure(curves.rows, title)
    figure.savefig(out.with_suffix(".png"))
    Console().print(curve_summary.table(summary, title))
    print(f"{out}, and a figure next to it")
    return 0


def chosen(names: str | None, variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Returns the variants named in `names`, separated by semicolons; None means all.

    Raises:
      ValueError: If a name is not the name of a variant.
    """
    by_name = {variant.name: variant for variant in variants}
    requested = list(by_name) if names is None else names.split(";")
    for name in requested:
        if name not in by_name:
            raise ValueError(
                f"--optimizers are some of {';'.join(by_name)}, got {name}"
            )
    return tuple(by_name[name] for name in requested)


def parser(program: str, doc: str) -> argparse.ArgumentParser:
    """Returns a parser with options for trainings, seeds, variants and results.

    Args:
      program: The program's module.
      doc: The program's description.
    """
    top = arguments.training_parser(program, doc)
    add = top.add_argument_group("how often, and where").add_argument
    add("--seed", type=int, help="first seed (0)")
    add("--seeds", type=int, help="trainings of each kind, with seeds in a row (4)")
    add("--optimizers", help="some of the variants, by name", metavar="'A;B'")
    add(
        "--out",
        type=results_path,
        help="results file; the figure goes next to it",
        metavar="F",
    )
    return top


class Curves:
    """A results file with training curves, and the trainings that it lacks.

    Attributes:
      rows: A row for each validation, with the variant, the seed, the step, the mean
        training loss since the previous validation, and the validation loss.
    """

    def __init__(
        self,
        out: Path,
        settings: Settings,
        seeds: int,
        variants: tuple[Variant, ...],
        inputs: Inputs,
    ) -> None:
        self.rows: list[Row] = []
        self._out = out
        self._settings = settings
        self._seeds = seeds
        self._variants = variants
        self._inputs = inputs
        self._shared: dict[str, Any] = {}

    @classmethod
    def open(
        cls,
        out: Path,
        settings: Settings,
        seeds: int,
        variants: tuple[Variant, ...] = VARIANTS,
    ) -> "Curves":
        """Reads the data, and the finished trainings if `out` exists.

        Args:
          out: The results file.
          settings: The settings of the trainings.
          seeds: The number of seeds, from `settings.seed` on.
          variants: The variants to train.

        Returns:
          The curves, with rows for the finished trainings.

        Raises:
          ValueError: If `seeds` is below 1, the folder of `out` does not exist, or
            `out` holds curves of other settings or data.
        """
        if seeds < 1:
            raise ValueError(f"seeds must be positive, got {seeds}")
        if not out.parent.is_dir():
            raise ValueError(f"no folder {out.parent} to write {out.name} to")
        corpus = pretrain.load_corpus(settings, out.parent)
        inputs = pretrain.select_inputs(corpus, settings)
        curves = cls(out, settings, seeds, variants, inputs)
        shared = dataclasses.asdict(settings)
        shared = {k: v for k, v in shared.items() if k not in _NOT_SHARED}
        curves._shared = {"settings": shared, "data": corpus.fingerprint()}
        if out.exists():
            contents = read_results(out)
            if isinstance(theirs := contents.get("settings", {}), dict):
                contents["settings"] = _DEFAULTS | theirs
            for name, value in curves._shared.items():
                if contents.get(name) != value:
                    raise ValueError(f"{out} has curves of other {name}; give an --out")
            curves.rows = contents["rows"]
        return curves

    def train(self) -> None:
        """Runs the missing trainings, seed by seed; writes results after each."""
        missing = list(self._missing())
        trainers = {}
        bar = tqdm(total=len(missing) * self._settings.steps, unit="step")
        with bar:
            for variant, seed in missing:
                bar.set_description(f"seed {seed}, {variant.name}")
                if variant not in trainers:
                    trainers[variant] = self._trainer(variant)
                self.rows += self._curve(trainers[variant], variant, seed, bar)
                self.write()

    def write(self) -> list[Row]:
        """Writes the results file and returns its summary."""
        summary = curve_summary.summarize(self.rows)
        bars = curve_summary.bars(summary)
        shared = self._shared | {"summary": summary}
        write_results(self._out, rows=self.rows, bars=bars, **shared)
        return summary

    def title(self, seeds: int) -> str:
        """Returns a title: the preset, the training's size and the number of seeds."""
        s = self._settings
        plural = "" if seeds == 1 else "s"
        return (
            f"{s.preset}: {s.steps} steps of {s.batch_size} x {s.seq_len} "
            f"{self._inputs.token}s, {seeds} seed{plural}"
        )

    def _missing(self) -> Iterator[tuple[Variant, int]]:
        finished = {(row["optimizer"], row["seed"]) for row in self.rows}
        first = self._settings.seed
        for seed in range(first, first + self._seeds):
            for variant in self._variants:
                if (variant.name, seed) not in finished:
                    yield variant, seed

    def _trainer(self, variant: Variant) -> Trainer:
        settings = dataclasses.replace(
            self._settings, param_dtype=variant.param_dtype, rounding=variant.rounding
        )
        config = model_config(settings, "bf16", self._inputs.vocab_size)
        return Trainer(
            config, settings, steps=settings.steps, optimizer=variant.optimizer
        )

    def _curve(
        self, trainer: Trainer, variant: Variant, seed: int, bar: tqdm
    ) -> list[Row]:
        """Trains a variant with a seed, and returns its rows."""
        settings = dataclasses.replace(self._settings, seed=seed)
        batches = train_batches(self._inputs, settings)
        state, losses, rows = trainer.init(seed), [], []
        for step in range(1, settings.steps + 1):
            state, metrics = trainer.step(state, next(batches))
            losses.append(metrics.loss)
            if step == settings.steps or step % settings.eval_every == 0:
                row = {"optimizer": variant.name, "beside": variant.beside}
                row |= {"seed": seed, "step": step}
                row["train_loss"] = float(np.mean(losses))
                row["val_loss"] = trainer.evaluate(state, self._inputs.validation)
                rows.append(row)
                losses = []
            bar.update()
        return rows


if __name__ == "__main__":
    sys.exit(main())
