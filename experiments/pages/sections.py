"""Sections of pages in Markdown."""

from experiments.common.results import default_path


def section(*parts: str) -> str:
    """Returns paragraphs, tables and pictures with empty lines between them."""
    return "\n\n".join(parts) + "\n"


def markdown_image(text: str, experiment: str, name: str) -> str:
    """Returns the picture next to a results file, with its alternative text."""
    path = default_path(experiment, name).with_suffix(".png")
    return f"![{text}]({path.relative_to('experiments')})"
