"""Measures the cost in loss of each part of the FP8 recipes, to tenths of a percent.

    uv run python -m experiments.studies.fidelity --regime text --variants bf16,coat

The command trains small models: `bf16`, and variants with one thing changed. All
variants of a seed start from the same initialization and read the data in the same
order, and the learning rate decays to zero. The results file is written after every
training. The same command continues where an earlier one ended, or adds seeds and
variants. At the end it prints the differences with 95% intervals, and draws them.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from experiments.common.programs import new_parser, one_line, results_path
from experiments.common.results import default_path, device, known_rows, write_results
from experiments.studies.fidelity import summary, training
from experiments.studies.fidelity.model import Shape
from experiments.studies.fidelity.texts import Windows
from experiments.studies.fidelity.variants import VARIANTS, Variant, chosen

_CANCELLED = 130
_GPU = {"batch_size": 64, "seq_len": 512, "lr": 1e-3, "test_windows": 4096}
# Settings by preset; "10m" and "20m" are numbers of parameters.
_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"shape": Shape(layers=3, hidden=32, intermediate=64, head_dim=16),
             "batch_size": 2, "seq_len": 16, "lr": 3e-3, "steps": 4,
             "test_windows": 4, "set_windows": 4},
    "10m": {"shape": Shape(layers=6, hidden=384, intermediate=1024),
            "steps": 1000, "set_windows": 256, **_GPU},
    "20m": {"shape": Shape(layers=6, hidden=512, intermediate=1408),
            "steps": 1000, "set_windows": 256, **_GPU},
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with the arguments `argv`, and returns an exit code."""
    started = time.monotonic()
    args = _parser().parse_args(argv)
    if args.list:
        print("\n".join(f"{v.name:22}{v.about}" for v in VARIANTS.values()))
        return 0
    try:
        study = Study.open(args)
    except (OSError, ValueError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    try:
        study.train(started + args.seconds)
    except KeyboardInterrupt:
        print(f"\n{study.out} keeps what is finished; the same command goes on")
        return _CANCELLED
    summary.report(study.write(), study.out)
    for name, error in study.errors.items():
        print(f"error: {name} did not train: {error}", file=sys.stderr)
    return 1 if study.errors else 0


def _parser() -> argparse.ArgumentParser:
    top = new_parser("experiments.studies.fidelity", __doc__)
    add = top.add_argument
    add("--regime", choices=("text", "memorize"), default="text", help="(text)")
    add(
        "--variants",
        default="bf16,te,coat,coat_max",
        metavar="A,B",
        help="or all; those that they are compared with are added",
    )
    add("--list", action="store_true", help="prints the variants, and trains nothing")
    add("--preset", choices=_PRESETS, default="10m", help="size of the model (10m)")
    add("--seeds", type=int, default=8, help="trainings of each variant (8)")
    add("--seed", type=int, default=0, help="first seed (0)")
    add("--steps", type=int, help="steps of a training (the preset's)")
    add("--batch-size", type=int, help="windows of a step (the preset's)")
    add("--lr", type=float, help="peak learning rate (the preset's)")
    add(
        "--shared",
        type=float,
        default=0.0,
        metavar="PART",
        help="the part of the steps that are the reference's for its variants, too; "
        "what a change costs after it is known with fewer seeds (0)",
    )
    add(
        "--seconds",
        type=float,
        default=float("inf"),
        help="no training starts so many seconds after the program",
    )
    add("--out", type=results_path, help="results file; the figure goes next to it")
    return top  # fmt: skip


def setup_of(args: argparse.Namespace) -> training.Setup:
    """Returns the settings of the trainings in a command line.

    Raises:
      ValueError: If a number is not positive, or `shared` is not in [0, 1).
    """
    settings = _PRESETS[args.preset] | {
        name: value
        for name in ("steps", "batch_size", "lr")
        if (value := getattr(args, name)) is not None
    }
    for name in ("steps", "batch_size", "lr"):
        if not settings[name] > 0:
            raise ValueError(f"{name} must be positive, got {settings[name]}")
    if not 0 <= args.shared < 1:
        raise ValueError(f"shared must be at least 0 and below 1, got {args.shared}")
    return training.Setup(regime=args.regime, shared=args.shared, **settings)


@dataclasses.dataclass(kw_only=True)
class Study:
    """The trainings of a command, and their results file.

    Attributes:
      setup: The settings.
      variants: The variants, references first.
      seeds: The seeds.
      data: The windows to train and to test on.
      out: The results file.
      finished: The rows of finished trainings.
      errors: The first lines of errors, by the names of the variants that failed.
    """

    setup: training.Setup
    variants: tuple[Variant, ...]
    seeds: range
    data: Windows
    out: Path
    finished: list[dict[str, Any]]
    errors: dict[str, str] = dataclasses.field(default_factory=dict)
    _shared: tuple[tuple[str, int], training.State, str] | None = None

    @classmethod
    def open(cls, args: argparse.Namespace) -> "Study":
        """Reads the text and the finished trainings, and returns the study.

        Raises:
          ValueError: If an argument is invalid, or there are rows of other settings.
        """
        if args.seeds < 1 or args.seed < 0:
            raise ValueError(
                "seeds must be positive and the first one 0 or more, got "
                f"{args.seeds}, {args.seed}"
            )
        variants, setup = chosen(args.variants), setup_of(args)
        name = f"fidelity_{args.regime}_{args.preset}"
        out = args.out or default_path("fidelity", name)
        out.parent.mkdir(parents=True, exist_ok=True)
        data, finished = setup.windows(), known_rows(out)
        if any(row.get("setup") != setup.id(data) for row in finished):
            raise ValueError(
                f"{out} has other settings or data, with losses that do not compare; "
                "name another --out"
            )
        return cls(
            setup=setup,
            variants=variants,
            seeds=range(args.seed, args.seed + args.seeds),
            data=data,
            out=out,
            finished=finished,
        )

    def train(self, until: float) -> None:
        """Runs the missing trainings, seed by seed.

        A variant that fails is not trained again. No training starts after `until`.

        Args:
          until: A time of `time.monotonic`.
        """
        runs = {(row["variant"], row["seed"]) for row in self.finished}
        missing = [
            (variant, seed)
            for seed in self.seeds
            for variant in self.variants
            if (variant.name, seed) not in runs
        ]
        if not missing:
            return
        windows = jax.device_put(self.data.train), jax.device_put(self.data.test)
        begun = {(self._first(variant), seed) for variant, seed in missing}
        names = {v.name for v, _ in (*missing, *begun)}
        needed = tuple(v for v in self.variants if v.name in names)
        steps, shared = self.setup.steps, self.setup.shared_steps
        total = len(missing) * (steps - shared) + len(begun) * shared
        with (
            training.ahead(self.setup, needed, self.data) as programs,
            tqdm(total=total, unit="step", mininterval=5.0) as bar,
        ):
            for variant, seed in missing:
                bar.set_description(f"{variant.name}, seed {seed}")
                ready = self._ready(variant, programs[variant.name])
                if time.monotonic() > until:
                    break
                first = self._first(variant)
                of_first = self._ready(first, programs[first.name])
                if ready and of_first:
                    both = ready, of_first
                    self._run(variant, both, seed, windows, bar)

    def _first(self, variant: Variant) -> Variant:
        """Returns the variant that runs the first steps of a variant's training.

        It is the reference if steps are shared, and otherwise the variant itself.
        """
        return VARIANTS[variant.reference] if self.setup.shared_steps else variant

    def _ready(
        self, variant: Variant, programs: Callable[[], training.Programs]
    ) -> training.Programs | None:
        """Returns a variant's compiled programs, or None if the variant has failed.

        A failure to compile is recorded in `errors`, like failed trainings, and the
        variant is not tried again.
        """
        if variant.name in self.errors:
            return None
        try:
            return programs()
        except Exception as error:
            self.errors[variant.name] = one_line(repr(error))[:300]
            return None

    def _run(
        self,
        variant: Variant,
        both: tuple[training.Programs, training.Programs],
        seed: int,
        windows: tuple[jax.Array, jax.Array],
        bar: tqdm,
    ) -> None:
        """Runs a training, and writes the results with the new row.

        If the reference has no training from the same state yet, it is trained first.

        Args:
          variant: The variant.
          both: The programs of the variant, and the programs of the first steps.
          seed: The seed.
          windows: The windows to train and to test on.
          bar: The progress bar.
        """
        programs, of_first = both
        arguments = seed, windows, bar.update
        reference = VARIANTS[variant.reference]
        pairs = [(variant, programs)]
        try:
            start, end = self._start(variant.reference, of_first, *arguments)
            runs = set(map(summary.run_of, self.finished))
            if end and variant != reference and (reference.name, seed, end) not in runs:
                # The reference has no training from this state after the shared steps.
                pairs.insert(0, (reference, of_first))
                bar.total += self.setup.steps - self.setup.shared_steps
            for trained, compiled in pairs:
                losses = training.train(self.setup, compiled, *arguments, start=start)
                self._finish(trained, seed, losses | ({"start": end} if end else {}))
        except jax.errors.JaxRuntimeError as error:
            self.errors[variant.name] = one_line(error)[:300]

    def _finish(self, variant: Variant, seed: int, values: dict[str, Any]) -> None:
        """Adds the row of a finished training, and writes the results."""
        of = {"setup": self.setup.id(self.data), "regime": self.setup.regime}
        row = of | {"variant": variant.name, "seed": seed} | values
        row |= {"reference": variant.reference, "device": device()["name"]}
        self.finished.append(row)
        self.write()

    def _start(
        self,
        reference: str,
        programs: training.Programs,
        seed: int,
        windows: tuple[jax.Array, jax.Array],
        advance: Callable[[int], Any],
    ) -> tuple[training.State | None, str | None]:
        """Returns the state after the shared steps, and its hash.

        Both are None if no steps are shared. The latest state is stored for the next
        variant.
        """
        if not self.setup.shared_steps:
            return None, None
        if self._shared is None or self._shared[0] != (reference, seed):
            arguments = self.setup, programs, seed, windows[0], advance
            state = training.shared(*arguments)
            self._shared = (reference, seed), state, training.digest(state)
        return self._shared[1:]

    def write(self) -> dict[str, Any]:
        """Writes the results file, and returns its contents."""
        differences = summary.differences(self.finished)
        extra = {
            "regime": self.setup.regime,
            "settings": dataclasses.asdict(self.setup),
            "summary": differences,
        }
        extra |= {"data": self.data.fingerprint, "errors": self.errors}
        extra["test_tokens"] = self.data.test[:, 1:].size
        bars = summary.bars(differences, extra["settings"])
        return write_results(self.out, rows=self.finished, bars=bars, **extra)


if __name__ == "__main__":
    sys.exit(main())
