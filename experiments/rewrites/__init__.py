"""Tests `fp8_remat` on random programs, against the same programs without FP8."""
