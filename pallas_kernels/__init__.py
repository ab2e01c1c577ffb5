"""Pallas kernels for NVIDIA Hopper GPUs. Raw arrays in, raw arrays out."""

from pallas_kernels.adam_step import adam
from pallas_kernels.reference.adam import AdamScalars, Moments

__all__ = ["AdamScalars", "Moments", "adam"]
