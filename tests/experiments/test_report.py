"""Tests of the page of the paper's tables and figures."""

import json
import re
from pathlib import Path
from statistics import fmean

import pytest

from experiments.common.paper import FIGURES, TABLE_3, TABLE_4, TABLE_7
from experiments.pages import paper as page
from experiments.pages.cells import Here, NotRun, Printed, Section, Text

_ROOT = Path(__file__).parents[2]
_RESULTS = _ROOT / "experiments" / "results"


def rows_of(title: str) -> dict[str, list[str]]:
    """Returns the cells of a table of the committed page, by their rows' labels."""
    _, _, text = page.PAGE.read_text().partition(f"## {title}")
    lines = [s for s in text.partition("\n## ")[0].splitlines() if s.startswith("|")]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    return {label: remaining for label, *remaining in cells}


def test_the_committed_page_is_that_of_the_results():
    assert page.PAGE.read_text() == page.page()


def test_every_table_and_figure_has_its_place():
    text = page.PAGE.read_text()
    for number in range(1, 9):
        assert f"## Table {number}: " in text
    assert "## The poster's table" in text
    assert sorted(FIGURES) == list(range(1, 10))
    pictures = re.findall(r"`(experiments/results/\S+\.png)`", text)
    assert len(pictures) >= 5
    for picture in pictures:
        assert (_ROOT / picture).exists()


def test_cells_are_those_of_results_files():
    actual = json.loads(
        (_RESULTS / "quantization_error/quantization_error_124m.json").read_text()
    )
    errors = [
        row["error"]
        for row in actual["rows"]
        if row.get("mu") == "DE8" and row.get("nu") == "E5M2"
    ]
    assert rows_of("Table 8")["DE8, here"][2] == f"**{fmean(errors):.2f}**"


def test_commands_of_results_name_programs_that_exist():
    files = [*_RESULTS.rglob("*.json")]
    text = "\n".join(
        re.findall(r'"command": "(.*)"', "".join(map(Path.read_text, files)))
    )
    programs = {*re.findall(r"-m ([\w.]+)", text)}
    assert len(programs) > 20
    for program in programs:
        path = _ROOT / program.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def test_averages_of_the_paper_are_those_of_its_columns():
    """Averages reveal mistakes in the figures that were copied from the paper."""
    for *parts, average in TABLE_4.values():
        assert fmean(parts) == pytest.approx(average, abs=0.06)
    for row in TABLE_3.values():
        assert fmean(row[1:4]) == pytest.approx(row[4], abs=0.01)
        # The paper has averaged before it rounded.
        assert fmean(row[5:9]) == pytest.approx(row[9], abs=0.0015)
    for (_, gpus, _), rows in TABLE_7.items():
        if rows["te"]:
            assert rows["coat"][4] > rows["bf16"][4]
        assert len(rows["coat"]) == 5
        assert gpus in (1, 2, 4, 8)


def test_sections_letter_their_reasons():
    section = Section(
        title="t",
        text="Text.",
        columns=("x", "y", "z"),
        rows=[
            ("one", [Here(1234.5, 1), NotRun("no time"), NotRun("no GPU")]),
            ("two", [Printed(12345), NotRun("no GPU"), Text("OOM")]),
        ],
    )
    lines = section.render().splitlines()
    assert "| one | **1,234.5** | (a) | (b) |" in lines
    assert "| two | 12,345 | (b) | OOM |" in lines
    assert "(a) not run: no time; (b) not run: no GPU." in lines
    with pytest.raises(ValueError, match="row 'one' of 't' needs 2 cells, got 1"):
        Section(title="t", text="", columns=("x", "y"), rows=[("one", [Printed(1)])])


def test_a_table_of_many_columns_has_them_as_lines():
    """A window of 1,280 pixels shows at most eight columns."""
    columns = tuple("abcdefghi")
    cells = [Printed(n) for n in range(9)]
    section = Section(title="t", text="", columns=columns, rows=[("paper", cells)])
    lines = section.render().splitlines()
    assert "| | paper |" in lines
    assert "| c | 2 |" in lines
    for line in page.PAGE.read_text().splitlines():
        assert not line.startswith("|") or line.count("|") <= 10


def test_rows_of_nothing_that_was_run_are_left_out():
    missing = [NotRun("no time"), NotRun("no time")]
    rows = [("ours", missing), ("paper", [Printed(1), Printed(2)])]
    text = Section(title="t", text="", columns=("x", "y"), rows=rows).render()
    assert "ours" not in text
    assert "Not run here: no time." in text
