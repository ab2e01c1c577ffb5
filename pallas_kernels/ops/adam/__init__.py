"""Adam's step on FP8 moments."""
