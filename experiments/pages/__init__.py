"""Renders pages with results, such as README.md and docs/pages/paper.md."""
