"""Parts of pages in Markdown."""

from experiments.common.results import default_path


def section(*parts: str) -> str:
    """Returns paragraphs, tables and pictures, separated by empty lines."""
    return "\n\n".join(parts) + "\n"


def markdown_image(text: str, experiment: str, name: str) -> str:
    """Returns Markdown for the picture of a results file; `text` is the alt text."""
    path = default_path(experiment, name).with_suffix(".png")
    return f"![{text}]({path.relative_to('experiments')})"
