"""Parsers of programs' command lines, and their messages."""

import argparse
import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from experiments.common import results


class _Parser(argparse.ArgumentParser):
    """A parser that prints errors in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Prints the error and exits with code 2."""
        self.exit(2, f"error: {one_line(message)}; --help lists the options\n")


def new_parser(module: str, doc: str, **options: Any) -> argparse.ArgumentParser:
    """Returns a parser without arguments, with a module's docstring as its help."""
    return _Parser(
        prog=f"python -m {module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


def positive_int(text: str) -> int:
    """Returns a positive integer; the type of arguments that are sizes or counts.

    Raises:
      argparse.ArgumentTypeError: If the text is no integer above zero.
    """
    return _integer(text, 1, "a positive integer")


def zero_or_more(text: str) -> int:
    """Returns an integer that is zero or more; the type of arguments that are seeds.

    Raises:
      argparse.ArgumentTypeError: If the text is no such integer.
    """
    return _integer(text, 0, "an integer, zero or more")


def _integer(text: str, least: int, rule: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")
    return value


def positive_float(text: str) -> float:
    """Returns a positive number; the type of arguments that are times or factors.

    Raises:
      argparse.ArgumentTypeError: If the text is no finite number above zero.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a positive, finite number, got {text!r}"
        )
    return value


def shape_of_rank(rank: int) -> Callable[[str], tuple[int, ...]]:
    """Returns the type of arguments that are shapes, `rank` sizes and commas."""

    def shape(text: str) -> tuple[int, ...]:
        sizes = tuple(map(positive_int, text.split(",")))
        if len(sizes) != rank:
            raise argparse.ArgumentTypeError(f"must be {rank} sizes, got {text!r}")
        return sizes

    return shape


def results_path(text: str) -> Path:
    """Returns the path of a results file; the type of arguments that name one.

    Raises:
      argparse.ArgumentTypeError: If the name does not end in .json, as a figure next to
        the file could then replace it; if a folder is there; or if no file can be
        written there.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"a results file is no folder, got {text!r}")
    if path.suffix != ".json":
        raise argparse.ArgumentTypeError(f"a results file ends in .json, got {text!r}")
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"nothing can be written at {text!r}: {error.strerror}"
        ) from error


def list_of[Number](kind: type[Number]) -> Callable[[str], tuple[Number, ...]]:
    """Returns the type of arguments that are numbers of a kind, with commas."""

    def numbers(text: str) -> tuple[Number, ...]:
        try:
            return tuple(kind(each) for each in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"must be of type {kind.__name__}, with commas, got {text!r}"
            ) from None

    return numbers


@contextlib.contextmanager
def usage_errors(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Exits with the message of a ValueError that is raised in this context."""
    try:
        yield
    except ValueError as error:
        parser.error(str(error))


def rows_to_join(
    parser: argparse.ArgumentParser, path: Path, of: str = "rows"
) -> list[dict[str, Any]]:
    """Returns `results.known_rows(path, of)`.

    Exits with the message of a ValueError if that function raises one.
    """
    with usage_errors(parser):
        return results.known_rows(path, of)


def one_line(message: object) -> str:
    """Returns a message with escapes in place of line ends and control characters.

    Names of files and arguments may contain such characters.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(message))
