"""Tests that notebooks run from top to bottom and contain their committed output."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

_FOLDER = Path(__file__).parents[2] / "experiments" / "notebooks"
_SECONDS_A_CELL = 300

_PATHS = sorted(_FOLDER.glob("*.ipynb"))
_QUICK = ("00_quickstart", "02_activation_memory", "08_end_to_end")

each_notebook = pytest.mark.parametrize("path", _PATHS, ids=lambda path: path.stem)


def _code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _warnings_and_errors(notebook):
    outputs = [output for cell in _code(notebook) for output in cell.outputs]
    return [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]


@pytest.mark.notebook
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path, id=path.stem, marks=[] if path.stem in _QUICK else [pytest.mark.slow]
        )
        for path in _PATHS
    ],
)
def test_runs_in_a_fresh_kernel(path):
    notebook = nbformat.read(path, as_version=4)
    shown = [bool(cell.outputs) for cell in _code(notebook)]
    client = NotebookClient(
        notebook,
        timeout=_SECONDS_A_CELL,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    )
    # Some notebooks train, so that optimized compilation pays off.
    client.execute(env=os.environ | {"XLA_FLAGS": ""})
    assert not _warnings_and_errors(notebook)
    assert [bool(cell.outputs) for cell in _code(notebook)] == shown


@each_notebook
def test_keeps_the_outputs_of_one_run(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = _code(notebook)
    outputs = [output for cell in cells for output in cell.outputs]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert outputs
    assert not _warnings_and_errors(notebook)
