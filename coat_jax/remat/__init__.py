"""`fp8_remat`: any function or module with its residuals in FP8."""
