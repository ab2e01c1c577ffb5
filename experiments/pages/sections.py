"""Sections of pages in Markdown."""

from experiments.common.results import default_path


def section(*parts: str) -> str:
    """Joins paragraphs, tables and pictures with empty lines."""
    return "\n\n".join(parts) + "\n"


def markdown_image(text: str, experiment: str, name: str) -> str:
    """Returns Markdown for the picture next to a results file, with an alt text."""
    path = default_path(experiment, name).with_suffix(".png")
    return f"![{text}]({path.relative_to('experiments')})"
