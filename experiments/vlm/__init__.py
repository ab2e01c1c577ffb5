"""Vision-language models: recipes on one model that answers questions on pictures."""
