"""Renders README.md, the docs' pages with results, and experiments/README.md."""

import textwrap
from pathlib import Path
from typing import Any

from experiments.common.results import load
from experiments.common.tables import Column, markdown
from experiments.pages import (
    ecosystem,
    experts,
    fidelity,
    layers,
    optimizer,
    release,
    speed,
    trainers,
    training,
)

PROJECT = Path(__file__).resolve().parents[2]
HOME = PROJECT / "docs" / "pages" / "index.md"
RELEASE = PROJECT / "docs" / "pages" / "release.md"
MODELS = PROJECT / "docs" / "pages" / "models-hf.md"
EXPERTS = PROJECT / "docs" / "pages" / "experts.md"
ECOSYSTEM = PROJECT / "docs" / "pages" / "ecosystem.md"
# Case and batch size of each row of the table at the top of README.md.
_HEADLINE = (
    ("bf16", 2),
    ("bf16, products and attention saved", 8),
    ("te", 2),
    ("coat", 2),
    ("coat", 8),
)
_RESULTS = """\
# Results

Every figure comes from a file `results/NAME/NAME.json`, which also says by which
`command`, on which `device` and with which `versions` it was measured. `rows` holds the
records, with units in their keys, and `bars` says what was asked for and whether it
holds. A `command` names its program as it is called today; `versions` has the commit
that ran. `uv run python -m experiments.pages` renders this page from these files. Where
a command has `--data runs/packages`, that folder held the .py files of the machine's
installed packages.

"""


def readme(text: str) -> str:
    """Returns README.md's text with new results between its markers."""
    text = _with(text, "headline", _headline())
    return _with(text, "losses", training.losses())


def home(text: str, readme_text: str) -> str:
    """Returns the home page's text, with README.md's headline table and "pieces".

    Args:
      text: The text of docs/pages/index.md.
      readme_text: The text of README.md, which has links to docs/pages.
    """
    text = _with(text, "headline", _headline())
    pieces = _split(readme_text, "pieces")[1]
    return _with(text, "pieces", pieces.replace("](docs/pages/", "]("))


def released(text: str) -> str:
    """Returns the text of docs/pages/release.md with the largest batches on a GPU."""
    return _with(text, "cards", release.cards())


def models(text: str) -> str:
    """Returns the text of docs/pages/models-hf.md with new tables of layers."""
    return _with(text, "layers", layers.of_models())


def of_experts(text: str) -> str:
    """Returns the text of docs/pages/experts.md with the speed of layers."""
    return _with(text, "layers", experts.of_models())


def trainings(text: str) -> str:
    """Returns the text of docs/pages/ecosystem.md with the table of trainings."""
    return _with(text, "trainings", ecosystem.trainings())


def _split(text: str, name: str) -> tuple[str, str, str]:
    """Returns the text before, between and after the two markers with a name.

    The first part ends with the first marker, and the last begins with the second.
    """
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    head, _, tail = text.partition(begin)
    content, _, tail = tail.partition(end)
    return head + begin, content, end + tail


def _with(text: str, name: str, content: str) -> str:
    """Returns a text with new content between the two markers with a name."""
    head, _, tail = _split(text, name)
    return head + content + tail


def results() -> str:
    """Returns the text of experiments/README.md."""
    sections = (
        speed.end_to_end(),
        speed.several_gpus(),
        speed.long_sequences(),
        release.released(),
        speed.estimates(),
        speed.layer(),
        speed.in_bf16(),
        layers.versions(),
        layers.table_6(),
        layers.foreign(),
        layers.offloaded(),
        layers.attention(),
        layers.compilation(),
        experts.grouped(),
        experts.layers(),
        experts.parallel(),
        experts.training(),
        trainers.steps(),
        speed.activations(),
        training.pretraining(),
        training.meshes(),
        fidelity.fidelity(),
        training.finetuning(),
        training.finetuning_real(),
        training.finetuning_large(),
        training.vision_language(),
        optimizer.optimizer(),
        optimizer.drift(),
        optimizer.curves(),
        optimizer.wrapped(),
        speed.kernels(),
    )
    return _RESULTS + "\n".join(sections)


def headline_rows() -> list[dict[str, Any]]:
    """Returns the rows of `bench_e2e` for the table at the top of README.md."""
    rows = {(row["case"], row["batch"]): row for row in load("bench_e2e")["rows"]}
    return [rows[key] for key in _HEADLINE]


def _headline() -> str:
    columns = (
        Column("Recipe, batch", ("case", "batch"), "{}, {}"),
        Column("tokens/s", "tokens_per_s", "{:,.0f}"),
        Column("peak memory", "peak_gib", "{:.0f} GiB"),
        Column("of which optimizer", "optimizer_gib", "{:.0f} GiB"),
    )
    (experts_row,) = load("bench_e2e", "bench_e2e_experts")["rows"]
    steps = load("bench_e2e", "bench_e2e_coat_bf16")["rows"]
    rows = {(row["case"], row["batch"]): row for row in steps}
    in_bf16, plain = rows["coat_bf16", 8], rows[_HEADLINE[1]]
    others = (
        "`coat_bf16`, with BF16's matmuls and losses, is "
        f"{in_bf16['tokens_per_s'] / plain['tokens_per_s']:.2f} times as fast as the "
        f"second row, in {in_bf16['peak_gib']:.0f} GiB. "
        "At 4,096 tokens Llama-3-8B trains with `coat` "
        f"{release.times_bf16():.2f} times as fast as with BF16 (each at its best "
        "batch). Qwen3-30B-A3B trains in full on two H200s, at "
        f"{experts_row['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU."
    )
    table = markdown(columns, headline_rows())
    return f"{table}\n\n{textwrap.fill(others, 95)}\n"
