"""Kills runs of `experiments.pretrain` at random moments and resumes them.

    uv run python -m tests.robustness.kills --count 60

Runs differ in recipe, dtype and rounding of the parameters, scaling and tokenizer. Each
is started, killed once to three times by SIGKILL, SIGTERM or SIGINT, at its start,
while it compiles, in a step or in a save, and resumed until it ends. Its rows must
equal an undisturbed run's, and its last state must have the same bits.
"""

import dataclasses
import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from coat_jax.layers.recipes import RECIPES
from experiments.training.settings import COAT_RECIPES
from tests.robustness import trials

Row = dict[str, Any]
_DTYPES = (("float32", "nearest"), ("bfloat16", "nearest"), ("bfloat16", "stochastic"))
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_MOMENTS = ("start", "compiling", "step", "save")
_MOST_KILLS = 3
_POLL_S = 0.002


@dataclasses.dataclass(frozen=True)
class Case:
    """The settings of a run.

    Attributes:
      recipe: The recipe.
      param_dtype: The dtype of the parameters.
      rounding: The rounding of BF16 parameters.
      scaling: "just_in_time" or "delayed".
      tokenizer: "bytes" or "bpe".
    """

    recipe: str
    param_dtype: str
    rounding: str
    scaling: str
    tokenizer: str

    def arguments(self) -> tuple[str, ...]:
        """Returns the settings as arguments of the program."""
        arguments = ["--recipes", self.recipe, "--param-dtype", self.param_dtype]
        arguments += ["--rounding", self.rounding, "--scaling", self.scaling]
        arguments += ["--tokenizer", self.tokenizer]
        arguments += ["--vocab-size", "300"] if self.tokenizer == "bpe" else []
        return *trials.SMALL, *arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, this process's by default; returns an exit code."""
    top = trials.new_program("kills", __doc__)
    top.add_argument("--count", type=int, default=60, help="disturbed runs (60)")
    args = top.parse_args(argv)
    # A background process may ignore SIGINT, and those it starts would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with trials.scratch() as folder:
        rows = list(disturb(folder, args.count, random.Random(args.seed)))
    counts = {"runs": _count(rows)}
    for name in ("recipe", "rounding", "scaling", "tokenizer"):
        for value in dict.fromkeys(row[name] for row in rows):
            counts[value] = _count([row for row in rows if row[name] == value])
    for name in (*(number.name for number in _SIGNALS), *_MOMENTS):
        counts[f"with {name}"] = _count([row for row in rows if name in row["kills"]])
    return trials.conclude(rows, counts, args.out, "Killed and resumed")


def _count(rows: Sequence[Row]) -> tuple[int, int]:
    return sum(row["holds"] for row in rows), len(rows)


def cases() -> list[Case]:
    """Returns a case for each valid combination of settings, with bytes as tokens.

    There is one more case for each recipe, with a BPE. It changes the shapes of
    programs, but not their steps.
    """
    actual = []
    for recipe, (dtype, rounding) in itertools.product(RECIPES, _DTYPES):
        if rounding == "stochastic" and recipe not in COAT_RECIPES:
            continue
        for scaling in RECIPES[recipe].scalings:
            actual.append(Case(recipe, dtype, rounding, scaling, "bytes"))
    bpe = [Case(name, "bfloat16", "nearest", "just_in_time", "bpe") for name in RECIPES]
    return actual + bpe


def disturb(scratch: Path, count: int, rng: random.Random) -> Iterator[Row]:
    """Disturbs `count` runs and yields a row for each; the cases come in turns."""
    data = ("--data", trials.write_corpus(scratch))
    order = cases()
    rng.shuffle(order)
    expected: dict[Case, trials.Outcome] = {}
    for number in tqdm(range(count), unit="run"):
        case = order[number % len(order)]
        arguments = (*case.arguments(), *data)
        if case not in expected:
            expected[case] = undisturbed(scratch / "undisturbed", arguments)
        started, folder = time.perf_counter(), scratch / "disturbed"
        kills, ended = kill_until_it_ends(folder, arguments, case.recipe, rng)
        wrong = f"exit code {ended.code}" if ended.code else None
        wrong = wrong or trials.outcome(folder).difference(expected[case])
        yield dataclasses.asdict(case) | {
            "kills": ", ".join(kills),
            "seconds": round(time.perf_counter() - started, 1),
            "wrong": wrong,
            "holds": wrong is None,
        }
        shutil.rmtree(folder)


def undisturbed(folder: Path, arguments: tuple[object, ...]) -> trials.Outcome:
    """Returns the outcome of a run that nothing interrupts."""
    ended = trials.call(*arguments, "--out", folder)
    if ended.code:
        raise RuntimeError(ended.said)
    actual = trials.outcome(folder)
    shutil.rmtree(folder)
    return actual


def kill_until_it_ends(
    folder: Path, arguments: tuple[object, ...], recipe: str, rng: random.Random
) -> tuple[list[str], trials.Ended]:
    """Starts a run, and kills and resumes it.

    Returns:
      The kills, as "SIGNAL at MOMENT after STEP", and the end of the last process.
    """
    kills = []
    for _ in range(rng.randint(1, _MOST_KILLS)):
        number, moment = rng.choice(_SIGNALS), rng.choice(_MOMENTS)
        process = trials.start(*trials.go_on(folder, arguments))
        if wait_for(moment, process, folder, recipe, rng):
            process.send_signal(number)
            step = last_step(folder)
            kills.append(f"{number.name} at {moment} after {step}")
        ended = trials.wait(process)
        if ended.code == 0:
            break
    return kills, trials.wait(trials.start(*trials.go_on(folder, arguments)))


def wait_for(
    moment: str,
    process: subprocess.Popen[str],
    folder: Path,
    recipe: str,
    rng: random.Random,
) -> bool:
    """Blocks until a random moment of a kind; returns False if the process ended."""
    step = last_step(folder) + rng.randint(1, 6)
    checkpoints = folder / "checkpoints" / recipe
    saved = set(_names(checkpoints))
    conditions: dict[str, Callable[[], bool]] = {
        "start": lambda: True,
        "compiling": lambda: checkpoints.exists(),
        "step": lambda: last_step(folder) >= step,
        "save": lambda: any("tmp" in n for n in set(_names(checkpoints)) - saved),
    }
    reached = conditions[moment]
    while not reached():
        if process.poll() is not None:
            return False
        time.sleep(_POLL_S)
    longest = {"start": 4.0, "compiling": 2.0, "step": 0.05, "save": 0.15}[moment]
    time.sleep(rng.uniform(0, longest))
    return process.poll() is None


def last_step(folder: Path) -> int:
    """Returns the step of the last whole row of metrics.jsonl, or 0."""
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.exists() else []


if __name__ == "__main__":
    sys.exit(main())
