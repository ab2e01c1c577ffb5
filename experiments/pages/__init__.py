"""Pages of results: README.md, experiments/README.md and docs/pages/paper.md."""
