"""The section on the loss that each part of the FP8 recipes costs."""

from experiments.common.results import load
from experiments.common.tables import Column, markdown
from experiments.pages.sections import markdown_image, section
from experiments.studies.fidelity.summary import by_shared

_NAMES = [
    "fidelity_memorize_10m_after_70",
    *(f"fidelity_text_10m_after_{shared}" for shared in (10, 30, 70)),
]


def fidelity() -> str:
    """Returns the section on the loss that each part of the FP8 recipes costs."""
    files = [load("fidelity", name) for name in _NAMES]
    rows, last = by_shared(files), files[-1]
    setup = last["settings"]
    memorized = files[0]["settings"]
    shape = setup["shape"]
    tokens = setup["steps"] * setup["batch_size"] * setup["seq_len"]
    text = (
        f"**What each step costs in loss** (`fidelity`): a model of {shape['layers']} "
        f"layers of {shape['hidden']}, {setup['steps']:,} steps on "
        f"{tokens / 1e6:.0f}M bytes of source code, a learning rate that falls to "
        f"zero, {last['test_tokens'] / 1e6:.1f}M bytes to test on, on one "
        f"{last['device']['name']}. Percent above `bf16`, with 95% intervals over "
        "seeds, for averaged weights. Trainings that differ in one bit end as far "
        "apart as trainings of other seeds (`again`), if the bit differs early. So "
        "variants go on from `bf16`'s state after a part of the steps, and their "
        "difference is what the rest of the steps costs. The last column has the same "
        "weights in a forward pass in BF16. The first column is of trainings that read "
        f"{memorized['set_windows'] * memorized['seq_len']:,} bytes again and again in "
        f"{memorized['steps']:,} steps, and know them by heart at the end. "
        "`coat_last_5`, `coat_last_10` and `coat_last_20` end with BF16 matmuls, as "
        "`--bf16-last` of `experiments.pretrain` does."
    )
    titles = [title for title in rows[0] if title != "variant"]
    columns = (
        Column("", "variant", "`{}`"),
        *(Column(title, title) for title in titles),
    )
    picture = markdown_image("Differences by variant", "fidelity", _NAMES[-1])
    return section(text, markdown(columns, rows), picture)
