"""The table of the ecosystem page: trainings in other codebases."""

from typing import Any

from experiments.common.results import load
from experiments.common.tables import Column, markdown


def trainings() -> str:
    """Returns the table of trainings, and notes on some of them."""
    rows = load("ecosystem")["rows"]
    columns = (
        Column("Training", "codebase"),
        Column("`.ci/ecosystem`", "program", "`{}`"),
        Column("Versions, Python {}".format(_one(rows, "python")), "versions"),
        Column("Loss, `optax.adamw`", "optax_loss", "{:.4f}"),
        Column("ours", "coat_loss", "{:.4f}"),
        Column("Difference", lambda row: f"{row['difference']:+.2%}"),
        Column("State", "state_ratio", "{:.3f}"),
        Column("Resume", lambda row: "exact" if row["resume_exact"] else "differs"),
        Column("Date", "date"),
    )
    parts = [markdown(columns, rows)]
    notes = [f"- {row['codebase']}: {row['note']}." for row in rows if row["note"]]
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(parts) + "\n"


def _one(rows: list[dict[str, Any]], key: str) -> str:
    return ", ".join(sorted({row[key] for row in rows}))
