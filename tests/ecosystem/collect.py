"""Writes the results file of all trainings from the rows of each program.

    uv run python tests/ecosystem/collect.py FOLDER

Rows of programs without a file in FOLDER stay as they are.
"""

import argparse
import json
from pathlib import Path

from experiments.common.results import Bar, default_path, load, write_results

_DIFFERENCE, _STATE = 0.01, 0.27


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    files = sorted(parser.parse_args().folder.glob("*.json"))
    new = {
        file.stem: [
            row | {"program": file.stem} for row in json.loads(file.read_text())
        ]
        for file in files
    }
    earlier = load("ecosystem")["rows"] if default_path("ecosystem").exists() else []
    rows = [row for row in earlier if row["program"] not in new]
    rows = sorted(
        [*rows, *(row for part in new.values() for row in part)],
        key=lambda row: row["program"],
    )
    bars = [
        Bar.of(
            "largest difference of the loss",
            "<=",
            _DIFFERENCE,
            max(abs(row["difference"]) for row in rows),
        ),
        Bar.of(
            "largest state / float32 moments",
            "<=",
            _STATE,
            max(row["state_ratio"] for row in rows),
        ),
        Bar.of(
            "resumes to the bit",
            ">=",
            len(rows),
            sum(row["resume_exact"] for row in rows),
        ),
    ]
    command = ".ci/ecosystem"
    write_results(default_path("ecosystem"), rows=rows, bars=bars, command=command)


if __name__ == "__main__":
    main()
