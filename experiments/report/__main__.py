"""Renders docs/pages/paper.md, the page of all tables and figures of the paper.

uv run python -m experiments.report
"""

import argparse
from collections.abc import Sequence

from experiments.report.page import PAGE, page


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv`, this process's by default."""
    argparse.ArgumentParser(prog="experiments.report", description=__doc__).parse_args(
        argv
    )
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}")


if __name__ == "__main__":
    main()
