"""`fp8_remat`: FP8 residuals for any function or module."""
