"""Runs random programs under `fp8_remat`, and counts wrong programs.

A program is a random function around FP8 matmuls. It runs with codes in float16, so
that the errors of right programs are 0.1%, and is compared with the same function
without FP8. The exit code is 1 if a program is wrong.
"""

import argparse
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from experiments.common.programs import (
    new_parser,
    positive_float,
    positive_int,
    results_path,
    zero_or_more,
)
from experiments.common.results import Bar, default_path, write_results
from experiments.rewrites.verdicts import Judged, Outcome
from experiments.rewrites.workers import outcomes

_WRITTEN = 500  # The number of programs between writes of the results file.
# The threads of XLA, and of NumPy.
_ONE_THREAD = {"NPROC": "1", "OPENBLAS_NUM_THREADS": "1"}


def rows_of(results: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Returns a row of counts for all programs, and a row for each grammar element."""
    elements: dict[str, list[Judged]] = {"all": []}
    for _, names, verdict in results:
        for element in ("all", *names):
            elements.setdefault(element, []).append(verdict)
    return [
        {"element": element} | _counts(verdicts)
        for element, verdicts in elements.items()
    ]


def _counts(verdicts: list[Judged]) -> dict[str, int]:
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
    """Returns the targets: no program is wrong, and some saved bytes are compared."""
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
    parser.add_argument("--first-seed", type=zero_or_more, default=0)
    parser.add_argument("--programs", type=positive_int, default=1000)
    parser.add_argument(
        "--processes",
        type=positive_int,
        default=1,
        help="each judges programs on one thread",
    )
    parser.add_argument(
        "--seconds",
        type=positive_float,
        help="no program starts later; default: no limit",
    )
    parser.add_argument("--out", type=results_path, default=default_path("rewrites"))
    return parser.parse_args()


def _write(arguments: argparse.Namespace, results: list[Outcome]) -> list[Bar]:
    """Writes the results file for the programs that ran, and returns its targets."""
    results = sorted(results)
    rows = rows_of(results)
    bars = bars_of(rows)
    wrong = [
        {"seed": seed, "verdict": verdict.verdict, "said": verdict.said}
        for seed, _, verdict in results
        if verdict.is_wrong
    ]
    seeds = {
        "first_seed": arguments.first_seed,
        "programs": arguments.programs,
        "programs that ran": len(results),
    }
    write_results(arguments.out, rows=rows, bars=bars, seeds=seeds, wrong=wrong)
    return bars


def main() -> int:
    """Runs programs, prints the wrong ones, writes a file, and returns an exit code."""
    arguments = _arguments()
    first, count = arguments.first_seed, arguments.programs
    seeds = range(first, first + count)
    os.environ |= _ONE_THREAD  # New processes read these variables.
    as_they_end = outcomes(seeds, arguments.processes, arguments.seconds)
    results = []
    for outcome in tqdm(as_they_end, total=count, unit="program", disable=None):
        results.append(outcome)
        seed, names, verdict = outcome
        if verdict.is_wrong:
            elements = ", ".join(names)
            tqdm.write(f"{seed}: {verdict.verdict}: {verdict.said} ({elements})")
        if len(results) % _WRITTEN == 0:
            _write(arguments, results)
    bars = _write(arguments, results)
    return int(not all(bar.holds for bar in bars))


if __name__ == "__main__":
    raise SystemExit(main())
