"""Renders docs/pages/paper.md, the page of all tables and figures of the paper."""

from pathlib import Path

from experiments.common.paper import FIGURES
from experiments.pages.paper_tables import tables

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pages" / "paper.md"
# The picture that corresponds to a figure of the paper, if any, and a remark.
_RESULTS = "experiments/results"
_OURS = {
    1: ("", "predicted for 13B, next to the paper's, in notebook 08_end_to_end"),
    2: (f"{_RESULTS}/quantization_error/quantization_error_124m_ranges.png", ""),
    3: (f"{_RESULTS}/quantization_error/quantization_error_124m_codes.png", ""),
    4: (
        f"{_RESULTS}/mixed_granularity/mixed_granularity_124m_flows.png",
        "times: mixed_granularity_124m_times.png next to it",
    ),
    5: (
        f"{_RESULTS}/pretrain/pretrain_300m_compared.png",
        "a 309M Llama on source code; a small form is in notebook 05_pretraining",
    ),
    6: ("", "not run: 300 billion tokens of a 7B model do not fit"),
    7: (
        f"{_RESULTS}/vlm/vlm_gpu_losses.png",
        "a small model of VILA's shape on generated scenes",
    ),
    8: (f"{_RESULTS}/vlm/vlm_gpu_captions.png", "captions of the same models"),
    9: (f"{_RESULTS}/quantization_error/quantization_error_124m_ranges.png", ""),
}
_HEAD = """\
---
hide: [toc]
---

# The paper's tables and figures

Every table and figure of COAT (arXiv 2410.19313) and of its poster, with this project's
own next to it. **Bold** numbers were measured here and come from the files in
`experiments/results/`, the others are printed in the paper. Letters say why a number
does not exist here. `uv run python -m experiments.pages` renders this page.
"""


def page() -> str:
    """Returns the page in Markdown."""
    parts = [_HEAD, *(section.render() for section in tables()), figures()]
    return "\n".join(parts)


def figures() -> str:
    """Returns the section on the paper's figures."""
    lines = ["## Figures", "", "| | the paper's | here |", "| --- | --- | --- |"]
    for number, title in FIGURES.items():
        picture, remark = _OURS[number]
        cells = filter(None, (f"`{picture}`" if picture else "", remark))
        lines.append(f"| {number} | {title} | {'; '.join(cells)} |")
    return "\n".join([*lines, ""])
