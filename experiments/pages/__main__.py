"""Renders the pages with results, from the files in experiments/results/.

    uv run python -m experiments.pages

The command renders the results and pictures of README.md and of the docs' home page,
experiments/README.md, docs/pages/paper.md with all tables and figures of the paper, and
the tables of docs/pages/release.md, docs/pages/models-hf.md, docs/pages/experts.md and
docs/pages/ecosystem.md.
"""

from collections.abc import Sequence

from experiments.common.programs import new_parser
from experiments.common.results import picture
from experiments.pages import paper, pictures
from experiments.pages.readme import (
    ECOSYSTEM,
    EXPERTS,
    HOME,
    MODELS,
    PROJECT,
    RELEASE,
    headline_rows,
    home,
    models,
    of_experts,
    readme,
    released,
    results,
    trainings,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program with the arguments `argv`, by default the command line's."""
    new_parser("experiments.pages", __doc__).parse_args(argv)
    page = PROJECT / "README.md"
    page.write_text(readme(page.read_text()))
    rows = headline_rows()
    memory, speed = pictures.draw_memory(rows), pictures.draw_speed(rows)
    memory.savefig(picture("bench_e2e", "bench_e2e_memory"))
    speed.savefig(picture("bench_e2e", "bench_e2e_speed"))
    HOME.write_text(home(HOME.read_text(), page.read_text()))
    memory.savefig(HOME.parent / "images" / "memory.png")
    speed.savefig(HOME.parent / "images" / "speed.png")
    RELEASE.write_text(released(RELEASE.read_text()))
    MODELS.write_text(models(MODELS.read_text()))
    EXPERTS.write_text(of_experts(EXPERTS.read_text()))
    ECOSYSTEM.write_text(trainings(ECOSYSTEM.read_text()))
    (PROJECT / "experiments" / "README.md").write_text(results())
    paper.PAGE.write_text(paper.page())


if __name__ == "__main__":
    main()
