"""Tests the pictures of README.md."""

import pytest

from experiments.common.results import picture
from experiments.pages import pictures
from experiments.pages import readme as pages


def bars(axes):
    """Returns the right ends of the bars, a list for each container of the axes."""
    return [
        [patch.get_x() + patch.get_width() for patch in container]
        for container in axes.containers
    ]


def test_memory_is_that_of_the_headline():
    rows = pages.headline_rows()
    [axes] = pictures.draw_memory(rows).axes
    optimizer, saved, remaining = bars(axes)
    assert optimizer == pytest.approx([row["optimizer_gib"] for row in rows])
    both = [row["optimizer_gib"] + row["activations_gib"] for row in rows]
    assert saved == pytest.approx(both)
    assert remaining == pytest.approx([row["peak_gib"] for row in rows])
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels[0] == "bf16\nbatch 2"
    assert labels[1] == "bf16,\nproducts and attention saved\nbatch 8"


def test_the_readme_shows_memory_speed_and_losses():
    readme = (pages.PROJECT / "README.md").read_text()
    shown = [
        picture("bench_e2e", "bench_e2e_memory"),
        picture("bench_e2e", "bench_e2e_speed"),
        picture("pretrain", "pretrain_300m_compared"),
    ]
    for path in shown:
        assert path.exists()
        assert f'src="{path.relative_to(pages.PROJECT)}"' in readme
