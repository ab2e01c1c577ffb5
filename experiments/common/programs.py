"""Command lines of programs."""

import argparse
from typing import Any


def new_parser(module: str, doc: str, **options: Any) -> argparse.ArgumentParser:
    """Returns a parser without arguments, whose help is a module's docstring.

    Args:
      module: The program's module, as `python -m` takes it.
      doc: The module's docstring.
      **options: Further options of `argparse.ArgumentParser`.
    """
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )
