"""Renders README.md's headline table and experiments/README.md.

The figures come from the results files in experiments/results/.

uv run python -m experiments.readme
"""

import argparse
from collections.abc import Sequence

from experiments.readme.pages import PROJECT, headline, results


def main(argv: Sequence[str] | None = None) -> None:
    """Rewrites README.md's headline table and experiments/README.md."""
    argparse.ArgumentParser(
        prog="python -m experiments.readme", description=__doc__
    ).parse_args(argv)
    readme = PROJECT / "README.md"
    readme.write_text(headline(readme.read_text()))
    (PROJECT / "experiments" / "README.md").write_text(results())


if __name__ == "__main__":
    main()
