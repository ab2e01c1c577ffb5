"""A transformer layer as four segments, and the recipes that say what each saves.

The FP8 precision flow of COAT (arXiv 2410.19313, section 5). A segment is a plain
function from its parameters and activations; a `Recipe` chooses its matrix product and
what the backward pass keeps of it. In `coat` every segment but attention keeps only its
inputs, in FP8 groups, and recomputes the rest: norm outputs, gate products and rotary
embeddings are not saved, and one FP8 copy serves a tensor's linear and non-linear
consumers. The residual stream stays in BF16 and is not saved.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax import nonlinear
from coat_jax.linear import linear as fp8_linear

RecipeName = Literal["bf16", "te", "coat", "coat_max"]


def _plain_linear(x: Array, w: Array) -> Array:
    return x @ w.astype(x.dtype)
