"""Gives the training program data that is damaged, hostile, or not what it says.

    uv run python -m tests.robustness.hostile_data

Every input of `tests.robustness.hostile_inputs` must be refused in one line that
names the file and the rule, with nothing left on disk, or be read as just what is in
it. Nothing is trained. The command prints the inputs for which that does not hold.
"""

import contextlib
import io
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.programs import new_parser
from experiments.common.results import Bar, default_path, write_results
from experiments.pretrain import program as pretrain
from experiments.training import arguments
from tests.robustness.hostile_inputs import INPUTS, Input, write

_FLAGS = ("--preset", "tiny", "--recipes", "bf16", "--seq-len", "4")
_SECONDS = 20  # No input may take longer.


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, this process's by default; returns an exit code."""
    parser = new_parser("tests.robustness.hostile_data", __doc__)
    out = default_path("robustness", "hostile_data")
    parser.add_argument("--out", type=Path, default=out)
    args = parser.parse_args(argv)
    rows = []
    for label, flags in INPUTS.items():
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            fault = find_fault(flags, Path(folder))
        rows.append(
            {
                "input": label,
                "expected": "refused" if isinstance(flags.expected, str) else "read",
                "holds": fault is None,
                "seconds": round(time.perf_counter() - started, 3),
            }
        )
        if fault:
            print(f"{label}: {fault}")
    right = sum(row["holds"] for row in rows)
    print(f"{right} of {len(rows)} inputs are refused or read as they must be")
    share = Bar.of("inputs refused or read as they must be", ">=", len(rows), right)
    write_results(args.out, rows=rows, bars=[share])
    return 0 if right == len(rows) else 1


def find_fault(flags: Input, folder: Path) -> str | None:
    """Returns what is wrong with the outcome of an input, or None.

    Args:
      flags: The input.
      folder: An empty folder to work in.
    """
    data = folder / "data"
    data.mkdir()
    with contextlib.chdir(data):  # A name's leading dash is then an argument's.
        write(data / flags.file, flags.content)
        argv = [*_FLAGS, f"--data={flags.file}", *flags.flags]
        if isinstance(flags.expected, str):
            return _find_fault_of_refusal(flags, argv, folder / "run")
        return _find_fault_of_reading(flags, argv)


def _find_fault_of_refusal(flags: Input, argv: list[str], out: Path) -> str | None:
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), _time_limit():
            code = pretrain.main([*argv, "--out", str(out)])
    except SystemExit as stop:
        code = stop.code
    except Exception as error:
        return f"it must be refused, got {error!r:.300}"
    line, name = output.getvalue(), flags.named or flags.file
    requested = {
        "the exit code 2": code == 2,
        "one line": line.count("\n") == 1 and line[:-1].isprintable(),
        f"at most 1,000 characters and {name!r:.300}": len(line) - len(name) <= 1000,
        f"the file's name {name!r}": name in line,
        f"the rule {flags.expected!r}": flags.expected in line,
        "no folder left": not out.exists(),
    }
    missed = [wish for wish, holds in requested.items() if not holds]
    return f"it must have {missed[0]}, got {code} and {line!r:.500}" if missed else None


def _find_fault_of_reading(flags: Input, argv: list[str]) -> str | None:
    try:
        with tempfile.TemporaryDirectory() as scratch, _time_limit():
            actual = _read(argv, Path(scratch))
    except (Exception, SystemExit) as error:
        return f"it must be read, got {error!r:.300}"
    if isinstance(flags.expected, bytes) != isinstance(actual, bytes):
        return f"it must be read as text if it is text, got {type(actual)}"
    if len(actual) != len(flags.expected) or not np.all(flags.expected == actual):
        return f"it must be read as {flags.expected!r:.200}, got {actual!r:.200}"
    return None


def _read(argv: list[str], scratch: Path) -> bytes | np.ndarray:
    """Returns the text or the tokens that a command line trains and validates on."""
    settings = arguments.parse([*argv, "--out", str(scratch / "run")]).settings()
    corpus = pretrain.load_corpus(settings, scratch)
    pretrain.select_inputs(corpus, settings)
    tokens = np.concatenate([*corpus.train, *corpus.validation])
    if corpus.token == "byte":
        return tokens[tokens != 256].astype(np.uint8).tobytes()
    return tokens if corpus.vocab_size is None else _decoded(tokens, scratch)


def _decoded(tokens: np.ndarray, scratch: Path) -> bytes:
    """Returns the text of a BPE's tokens, without separators."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(scratch / "tokenizer.json"))
    return tokenizer.decode(tokens.tolist(), skip_special_tokens=True).encode()


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Raises TimeoutError within the context if it takes too long."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {_SECONDS} seconds")

    initial = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, initial)


if __name__ == "__main__":
    sys.exit(main())
