"""The main job: compares recipes on one model and one order of the data."""
