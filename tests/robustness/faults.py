"""Builds faults.c, a library that makes calls on the files of one folder fail."""

import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("faults.c")


def build(folder: Path) -> Path:
    """Compiles the library into `folder` and returns its path."""
    library = folder / "faults.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-o", str(library)]
    subprocess.run([*command, str(_SOURCE), "-ldl"], check=True)
    return library


def environment(
    library: Path,
    root: Path,
    *,
    kill: int | None = None,
    bytes_: int | None = None,
    switch: Path | None = None,
    log: Path | None = None,
) -> dict[str, str]:
    """Returns the environment variables that load the library into a process.

    Args:
      library: The compiled library.
      root: The folder in which calls are counted and fail.
      kill: Number of the call in which the process dies.
      bytes_: Number of bytes after which the disk is full.
      switch: A path; while a file is there the folder is read-only.
      log: The path of a log file with one line per call.
    """
    arguments = {"KILL": kill, "BYTES": bytes_, "SWITCH": switch, "LOG": log}
    actual = {"LD_PRELOAD": str(library), "FAULTS_ROOT": str(root.resolve())}
    return actual | {
        f"FAULTS_{k}": str(v) for k, v in arguments.items() if v is not None
    }


def logged(path: Path) -> dict[int, tuple[str, int]]:
    """Returns the names and bytes of the calls in a log, by their numbers from 1.

    If the process was killed, calls that its other threads began just then are missing.
    """
    lines = [line.split() for line in path.read_text().splitlines()]
    actual = {int(number): (name, int(size)) for number, name, size in lines}
    return dict(sorted(actual.items()))
