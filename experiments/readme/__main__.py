"""Renders README.md's headline table and pictures, and experiments/README.md.

The figures come from the results files in experiments/results/.

uv run python -m experiments.readme
"""

import argparse
from collections.abc import Sequence

from experiments.common.results import picture
from experiments.readme import pictures
from experiments.readme.pages import PROJECT, headline, headline_rows, results


def main(argv: Sequence[str] | None = None) -> None:
    """Rewrites README.md's headline table, its pictures and experiments/README.md."""
    argparse.ArgumentParser(
        prog="python -m experiments.readme", description=__doc__
    ).parse_args(argv)
    readme = PROJECT / "README.md"
    readme.write_text(headline(readme.read_text()))
    rows = headline_rows()
    pictures.draw_memory(rows).savefig(picture("bench_e2e", "bench_e2e_memory"))
    pictures.draw_speed(rows).savefig(picture("bench_e2e", "bench_e2e_speed"))
    (PROJECT / "experiments" / "README.md").write_text(results())


if __name__ == "__main__":
    main()
