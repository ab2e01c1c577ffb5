"""Tests that public names have types, and that type checkers accept a typed program."""

import inspect
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def _members(package) -> Iterator[str]:
    """Yields the public names of a package and of its classes."""
    for name in package.__all__:
        member = getattr(package, name)
        yield f"{package.__name__}.{name}"
        if inspect.isclass(member):
            names = (attribute for attribute in vars(member) if attribute[0] != "_")
            yield from (f"{package.__name__}.{name}.{attribute}" for attribute in names)


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """Returns pyright's output for all public names and a user's program."""
    packages = (coat_jax, pallas_kernels)
    lines = [f"import {package.__name__}" for package in packages]
    lines += [f"reveal_type({n})" for package in packages for n in _members(package)]
    names = tmp_path_factory.mktemp("types") / "names.py"
    names.write_text("\n".join(lines))
    return json.loads(_run("pyright", "--outputjson", names, _PROGRAM).stdout)


def test_types_of_public_names_are_known(checked):
    messages = [entry["message"] for entry in checked["generalDiagnostics"]]
    assert len(messages) > 150
    assert not [message for message in messages if "Unknown" in message]


@pytest.mark.parametrize("package", [coat_jax, pallas_kernels])
def test_parameters_and_results_are_annotated(package):
    for name in package.__all__:
        function = getattr(package, name)
        if inspect.isfunction(inspect.unwrap(function)):
            signature = inspect.signature(function)
            parameters = signature.parameters.values()
            annotations = [p.annotation for p in parameters]
            annotations.append(signature.return_annotation)
            assert inspect.Signature.empty not in annotations, name


@pytest.mark.slow
@pytest.mark.parametrize("package", [coat_jax, pallas_kernels])
def test_types_of_all_members_are_known(package):
    name = package.__name__
    actual = _run("pyright", "--outputjson", "--verifytypes", name, "--ignoreexternal")
    symbols = json.loads(actual.stdout)["typeCompleteness"]["symbols"]
    recorded = {symbol["name"]: symbol["isTypeKnown"] for symbol in symbols}
    public = [f"{name}.{public}" for public in package.__all__]
    assert [public for public in public if not recorded.get(public, True)] == []
    assert len(recorded.keys() & set(public)) > len(public) / 2


def test_pyright_accepts_a_users_program(checked):
    diagnostics = checked["generalDiagnostics"]
    assert [x for x in diagnostics if x["severity"] == "error"] == []
    assert checked["summary"]["filesAnalyzed"] == 2


@pytest.mark.slow
def test_mypy_accepts_a_users_program():
    strict = ("--strict", "--ignore-missing-imports", "--cache-dir", "/dev/null")
    actual = _run("mypy", *strict, _PROGRAM)
    assert actual.returncode == 0, actual.stdout


def test_a_users_program_runs():
    runpy.run_path(str(_PROGRAM), run_name="__main__")
