"""The main job: recipes beside each other on one model, one order of the data."""
