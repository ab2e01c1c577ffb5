"""Conversion of models that others wrote: FP8 matmuls and FP8 residuals by rules."""
