"""Runs random programs under `fp8_remat`, and counts those that are wrong.

A program is a random function around FP8 matmuls. It runs with codes of float16, so
that the errors of right programs are 0.1%, and is compared with the same function
without FP8. The exit code is 1 if a program is wrong.
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from tqdm import tqdm

from experiments.common.programs import new_parser
from experiments.common.results import Bar, default_path, write_results
from experiments.rewrites.wide import widen

if TYPE_CHECKING:
    from experiments.rewrites.judge import Judged
    from experiments.rewrites.programs import Program

_KEPT = 200  # The programs after which compiled operations are forgotten.


def run(seeds: range) -> list[tuple["Program", "Judged"]]:
    """Judges the programs of some seeds, and prints those that are wrong."""
    # The library reads dtypes when it is imported.
    from experiments.rewrites.judge import judged
    from experiments.rewrites.programs import random_program

    verdicts = []
    for count, seed in enumerate(tqdm(seeds, unit="program", disable=None)):
        program = random_program(seed)
        verdict = judged(program)
        verdicts.append((program, verdict))
        if verdict.is_wrong:
            elements = ", ".join(program.elements)
            tqdm.write(f"{seed}: {verdict.verdict}: {verdict.said} ({elements})")
        if count % _KEPT == _KEPT - 1:
            jax.clear_caches()
    return verdicts


def rows_of(judged_programs: list[tuple["Program", "Judged"]]) -> list[dict[str, Any]]:
    """Returns a row for each element of the grammar, and one for all programs."""
    elements = {"all": [verdict for _, verdict in judged_programs]}
    for program, verdict in judged_programs:
        for element in program.elements:
            elements.setdefault(element, []).append(verdict)
    return [
        {"element": element} | _counts(verdicts)
        for element, verdicts in sorted(elements.items(), key=lambda e: e[0] != "all")
    ]


def _counts(verdicts: list["Judged"]) -> dict[str, int]:
    counts = Counter(verdict.verdict for verdict in verdicts)
    return {
        "programs": len(verdicts),
        "beyond the bound": counts["beyond the bound"] + counts["ill-conditioned"],
        "explained as ill-conditioned": counts["ill-conditioned"],
        "errors": counts["error"],
        "saved bytes compared": sum(any(v.saved) for v in verdicts),
        "saved bytes that differ": sum(v.saved[0] != v.saved[1] for v in verdicts),
    }


def bars_of(rows: list[dict[str, Any]]) -> list[Bar]:
    """Returns the targets: no program is wrong."""
    total = rows[0]
    compared = total["saved bytes compared"]
    unexplained = total["beyond the bound"] - total["explained as ill-conditioned"]
    return [
        Bar.of("unexplained", "<=", 0, unexplained),
        Bar.of("errors", "<=", 0, total["errors"]),
        Bar.of("programs of which saved bytes are compared", ">=", 1, compared),
        Bar.of("saved bytes that differ", "<=", 0, total["saved bytes that differ"]),
    ]


def _arguments() -> argparse.Namespace:
    parser = new_parser("experiments.rewrites.rewrites", __doc__ or "")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=default_path("rewrites"))
    return parser.parse_args()


def main() -> int:
    """Runs the programs, and writes a results file."""
    arguments = _arguments()
    first = arguments.first_seed
    seeds = range(first, first + arguments.programs)
    widen()
    verdicts = run(seeds)
    rows = rows_of(verdicts)
    bars = bars_of(rows)
    wrong = [
        {"seed": program.seed, "verdict": verdict.verdict, "said": verdict.said}
        for program, verdict in verdicts
        if verdict.is_wrong
    ]
    spans = {"first_seed": first, "programs": arguments.programs}
    write_results(arguments.out, rows=rows, bars=bars, seeds=spans, wrong=wrong)
    return int(not all(bar.holds for bar in bars))


if __name__ == "__main__":
    raise SystemExit(main())
