"""Pictures of results."""

from experiments.common.results import default_path


def markdown_image(text: str, experiment: str, name: str) -> str:
    """Returns the picture beside a results file, with its alternative text."""
    path = default_path(experiment, name).with_suffix(".png")
    return f"![{text}]({path.relative_to('experiments')})"
