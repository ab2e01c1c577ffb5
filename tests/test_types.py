"""Tests of types: of public names, and of a user's program that checkers accept."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.marks import slow

import coat_jax
import pallas_kernels

_ROOT = Path(__file__).resolve().parent.parent
_PROGRAM = _ROOT / "tests" / "helpers" / "typed_program.py"


def _run(*arguments):
    command = [sys.executable, "-m", *map(str, arguments)]
    # Pyright looks for packages next to the first Python of PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path}
    return subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("package", [coat_jax, pallas_kernels])
def test_types_of_public_names_are_known(package):
    name = package.__name__
    actual = _run("pyright", "--outputjson", "--verifytypes", name, "--ignoreexternal")
    symbols = json.loads(actual.stdout)["typeCompleteness"]["symbols"]
    recorded = {symbol["name"]: symbol["isTypeKnown"] for symbol in symbols}
    public = [f"{name}.{public}" for public in package.__all__]
    assert [public for public in public if not recorded.get(public, True)] == []
    assert len(recorded.keys() & set(public)) > len(public) / 2


_STRICT = ("mypy", "--strict", "--ignore-missing-imports", "--cache-dir", "/dev/null")


@pytest.mark.parametrize(
    "checker",
    [("pyright",), slow(_STRICT)],
    ids=lambda checker: checker[0],
)
def test_checkers_accept_a_users_program(checker):
    actual = _run(*checker, _PROGRAM)
    assert actual.returncode == 0, actual.stdout


def test_a_users_program_runs():
    actual = subprocess.run([sys.executable, _PROGRAM], capture_output=True, text=True)
    assert actual.returncode == 0, actual.stderr
