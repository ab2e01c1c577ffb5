"""Joins results of processes that trained different seeds or variants with one setup.

    uv run python -m experiments.studies.fidelity.join a.json b.json --out ab.json

The processes may run at the same time, each on its own GPU and with its own results
file. Device and versions come from the files, so this command can run anywhere. The
joined file lists the commits and commands of all files, and this command.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.common.programs import new_parser, one_line, results_path
from experiments.common.results import read_results, write_results
from experiments.studies.fidelity import summary

Results = dict[str, Any]
# Trainings that are compared have these entries in common.
_SHARED = ("regime", "settings", "data", "test_tokens")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with the arguments `argv`, and returns an exit code."""
    args = _parser().parse_args(argv)
    try:
        results = write_results(args.out, **joined(args.files))
    except (OSError, ValueError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    summary.report(results, args.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    top = new_parser("experiments.studies.fidelity.join", __doc__)
    top.add_argument("files", nargs="+", type=Path, metavar="FILE")
    top.add_argument(
        "--out", required=True, type=results_path, help="a figure goes next to it"
    )
    return top


def joined(paths: Sequence[Path]) -> Results:
    """Returns the trainings of all files, as arguments of `write_results`.

    Raises:
      ValueError: If a file is not a results file of this study, has other settings,
        data, devices or packages than the first file, or has a training that another
        file has, too.
    """
    files = [_read(path) for path in paths]
    first, rows = files[0], {}
    for path, results in zip(paths, files, strict=True):
        for name, value in _common(results).items():
            if value != _common(first)[name]:
                raise ValueError(f"{path} and {paths[0]} differ in their {name}")
        for row in results["rows"]:
            run = summary.run_of(row)
            if run in rows:
                raise ValueError(
                    f"{path} has {run[0]} with seed {run[1]}, as another file does"
                )
            rows[run] = row
    errors = {k: v for results in files for k, v in results["errors"].items()}
    differences = summary.differences(list(rows.values()))
    return {name: first[name] for name in _SHARED} | {
        "rows": list(rows.values()),
        "bars": summary.bars(differences, first["settings"]),
        "measured": files,
        "summary": differences,
        "errors": errors,
    }


def _read(path: Path) -> Results:
    results = read_results(path)
    if missing := {*_SHARED, "summary", "errors", "versions"} - results.keys():
        raise ValueError(f"{path} is no file of this study: it has no {min(missing)}")
    return results


def _common(results: Results) -> dict[str, Any]:
    """Returns the values that must be equal in all files, by the names for errors."""
    packages = {k: v for k, v in results["versions"].items() if k != "commit"}
    shared = {name: results[name] for name in _SHARED}
    return shared | {"device": results["device"], "packages": packages}


if __name__ == "__main__":
    sys.exit(main())
