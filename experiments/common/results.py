"""Reads and writes the results files of all experiments and benchmarks."""

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax

_PROJECT = Path(__file__).resolve().parent.parent.parent
_VERSIONED = ("jax", "jaxlib", "flax", "optax")
_SCALARS = (str, int, float, bool, type(None))
# The versions of JAX with which benchmarks are measured, as in names of files.
OLDEST_JAX, NEWEST_JAX = "0.11.2", "0.12.0.1"


class Bar(NamedTuple):
    """A target of an experiment, the measured value, and whether the target holds.

    Attributes:
      name: The name of the measured quantity.
      target: The target, for instance "<= 1.01".
      measured: The measured value.
      holds: Whether the measured value reaches the target.
    """

    name: str
    target: str | float
    measured: float | str | None
    holds: bool

    @classmethod
    def of(cls, name: str, relation: str, target: float, measured: float) -> "Bar":
        """Returns a bar that compares `measured` with `target`.

        The bar holds if `measured` is at most `target` for the relation "<=", and if
        `measured` is at least `target` for the relation ">=".
        """
        holds = measured <= target if relation == "<=" else measured >= target
        return cls(name, f"{relation} {target}", measured, holds)


def write_results(
    path: Path | str,
    *,
    rows: Sequence[Mapping[str, Any]],
    bars: Sequence[Bar] = (),
    command: str | None = None,
    measured: Sequence[Mapping[str, Any]] = (),
    **extra: Any,
) -> dict[str, Any]:
    """Writes a results file atomically, and returns its contents.

    Args:
      path: The path of the file; its folder is created.
      rows: Flat records of strings, numbers, booleans and None. Keys contain the units.
      bars: The targets of the experiment.
      command: The command line that repeats the experiment; None means the command
        lines of `measured` and of this process.
      measured: The contents of the results files that the rows are taken from. The
        device, date, versions and commits come from these files; without any file, they
        come from this process.
      **extra: Further top-level entries.

    Raises:
      ValueError: If a row is not flat, an extra entry has a name of the schema, or the
        files differ in their devices or in versions other than the commit.

    Examples:
      >>> bar = Bar("products / BF16", ">= 1.5", 1.7, True)
      >>> written = write_results("/tmp/example.json", rows=[{"ms": 3.1}], bars=[bar])
      >>> list(written)
      ['command', 'date', 'device', 'versions', 'rows', 'bars']
    """
    for row in rows:
        for key, value in row.items():
            if not isinstance(key, str) or not isinstance(value, _SCALARS):
                raise ValueError(
                    f"a row holds strings, numbers, booleans and None, got {key!r}: "
                    f"{value!r}"
                )
    earlier = dict.fromkeys(file["command"] for file in measured)
    results = {"command": command or "; ".join([*earlier, command_line()])}
    results |= _origin_of(measured) if measured else _here_and_now()
    results |= {
        "rows": [dict(row) for row in rows],
        "bars": [bar._asdict() for bar in bars],
    }
    if clashes := results.keys() & extra.keys():
        raise ValueError(f"{sorted(clashes)} are entries of the schema, not extra ones")
    results |= extra
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, results)
    return results


def _here_and_now() -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"date": now, "device": device(), "versions": versions()}


def _origin_of(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the latest date, the device, the versions and all commits of files.

    Raises:
      ValueError: If the files differ in their devices or in versions.
    """
    first, *others = map(_setup_of, measured)
    for other in others:
        for name, value in first.items():
            if other[name] != value:
                raise ValueError(
                    f"results were measured with the {name} {value} and {other[name]}"
                )
    commits = [file["versions"].get("commit") or "unknown" for file in measured]
    versions = first["versions"] | {"commit": ", ".join(dict.fromkeys(commits))}
    date = max(file["date"] for file in measured)
    return {"date": date, "device": first["device"], "versions": versions}


def _setup_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the device and the versions of a results file, without the commit."""
    versions = {k: v for k, v in results["versions"].items() if k != "commit"}
    return {"device": results["device"], "versions": versions}


def default_path(experiment: str, name: str | None = None) -> Path:
    """Returns the path of an experiment's results file, relative to the project.

    `name` selects a file if the experiment has several.
    """
    return Path("experiments/results") / experiment / f"{name or experiment}.json"


def load(experiment: str, name: str | None = None) -> dict[str, Any]:
    """Returns the contents of the committed results of an experiment, such as "drift".

    `name` selects a file if the experiment has several.
    """
    return json.loads((_PROJECT / default_path(experiment, name)).read_text())


def origin(results: dict[str, Any]) -> str:
    """Returns a phrase: where, when and by which command results were measured."""
    device, count = results["device"]["name"], results["device"]["count"]
    devices = f"one {device}" if count == 1 else f"{count} {device}"
    return f"on {devices} on {results['date'][:10]} by `{results['command']}`"


def picture(experiment: str, name: str) -> Path:
    """Returns the path of the committed picture in the folder of a results file.

    It has the name of the results file.
    """
    return _PROJECT / default_path(experiment, name).with_suffix(".png")


def known_rows(path: Path, of: str = "rows") -> list[dict[str, Any]]:
    """Returns the rows in the entry `of` of a results file, or [] without a file.

    Raises:
      ValueError: If the file is not a results file, or was measured on another kind of
        device than this process's.
    """
    if not path.exists():
        return []
    contents, name = read_results(path), device()["name"]
    if (theirs := contents["device"]["name"]) != name:
        raise ValueError(
            f"{path} is of {theirs:.100}, this is {name}; name another --out"
        )
    rows = contents.get(of, [])
    if not _are_rows(rows):
        raise ValueError(f"{path} is no results file: its {of} are no rows")
    return rows


def read_results(path: Path) -> dict[str, Any]:
    """Returns the contents of a results file.

    Raises:
      ValueError: If the file is not a results file. The message names the file.
    """
    contents = read_json(path)
    if not isinstance(contents, dict):
        raise ValueError(f"{path} is no results file: it is no object")
    device = contents.get("device")
    name = device.get("name") if isinstance(device, dict) else None
    strings = {"command": contents.get("command"), "date": contents.get("date")}
    for field, value in (strings | {"device's name": name}).items():
        if not isinstance(value, str):
            raise ValueError(f"{path} is no results file: its {field} is no string")
    if not _are_rows(contents.get("rows")):
        raise ValueError(f"{path} is no results file: it has no rows")
    return contents


def _are_rows(rows: Any) -> bool:
    return isinstance(rows, list) and all(isinstance(row, dict) for row in rows)


def joined(
    rows: Sequence[dict[str, Any]], row: dict[str, Any], key: Callable[..., Any]
) -> list[dict[str, Any]]:
    """Returns `rows` with `row`, which replaces the row with the same key, if any."""
    keys = list(map(key, rows))
    at = keys.index(key(row)) if key(row) in keys else len(rows)
    return [*rows[:at], row, *rows[at + 1 :]]


def read_json(path: Path) -> Any:
    """Returns the value in a JSON file.

    Raises:
      ValueError: If the file is not JSON. The message names the file.
    """
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error!s:.200}") from None


def write_json(path: Path, value: Any) -> None:
    """Replaces the content of a file with `value` as JSON, atomically and durably."""
    replace_file(path, f"{json.dumps(value, indent=2, allow_nan=True)}\n".encode())


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file's content, atomically and durably."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def command_line() -> str:
    """Returns the command that started this process, as a user types it."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    name = name and name.removesuffix(".__main__")
    program = f"python -m {name}" if name else f"python {sys.argv[0]}"
    return shlex.join(["uv", "run", *program.split(), *sys.argv[1:]])


def device() -> dict[str, Any]:
    """Returns the name, count and driver of the devices that JAX runs on."""
    devices = jax.devices()
    if devices[0].platform == "cpu":
        name = f"{_processor()}, {os.cpu_count()} cores"
        return {"name": name, "count": len(devices), "driver": None}
    return {
        "name": devices[0].device_kind,
        "count": len(devices),
        "driver": _nvidia_driver(),
    }


def versions() -> dict[str, str | None]:
    """Returns the versions of Python and of packages, and this project's commit."""
    numbers = {"python": platform.python_version()}
    numbers |= {package: metadata.version(package) for package in _VERSIONED}
    return numbers | {"commit": _commit()}


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1) if match else platform.machine()


def _nvidia_driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"(\d+\.\d+(?:\.\d+)?)", text)
    return match.group(1) if match else None


def _commit() -> str | None:
    """Returns the commit of this checkout, with "+changes" if tracked files differ.

    The environment variable GIT_COMMIT overrides the commit, for copies of the files
    without a repository. Without the variable and without a repository the result is
    None.
    """
    if commit := os.environ.get("GIT_COMMIT"):
        return commit
    try:
        changed = _git("status", "--porcelain", "--untracked-files=no")
        return _git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*args: str) -> str:
    command = ["git", "-C", str(_PROJECT), *args]
    return subprocess.check_output(
        command, text=True, stderr=subprocess.DEVNULL
    ).strip()
