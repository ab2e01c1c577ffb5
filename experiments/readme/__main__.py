"""Renders README.md's results and pictures, and experiments/README.md.

The figures come from the results files in experiments/results/.

uv run python -m experiments.readme
"""

import argparse
from collections.abc import Sequence

from experiments.common.results import picture
from experiments.readme import pictures
from experiments.readme.pages import PROJECT, headline_rows, readme, results


def main(argv: Sequence[str] | None = None) -> None:
    """Rewrites README.md's results, its pictures and experiments/README.md."""
    argparse.ArgumentParser(
        prog="python -m experiments.readme", description=__doc__
    ).parse_args(argv)
    page = PROJECT / "README.md"
    page.write_text(readme(page.read_text()))
    rows = headline_rows()
    pictures.draw_memory(rows).savefig(picture("bench_e2e", "bench_e2e_memory"))
    pictures.draw_speed(rows).savefig(picture("bench_e2e", "bench_e2e_speed"))
    (PROJECT / "experiments" / "README.md").write_text(results())


if __name__ == "__main__":
    main()
