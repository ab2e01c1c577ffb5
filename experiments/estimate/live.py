"""Measures training steps of the largest Llama that fits on this GPU, or of a tiny one.

The notebook 08_end_to_end calls this module. Without a GPU the model is tiny: it shows
how a measurement works, and its times mean nothing.
"""

from typing import Any

from coat_jax.memory.kinds import GIB
from experiments.bench.e2e import measured
from experiments.bench.model_step import RELEASED, ModelSize, measure
from experiments.bench.predictions import estimate
from experiments.common.memory import device_limit_bytes

Row = dict[str, Any]
# The largest comes first.
PRESETS = ("llama-30b", "llama2-13b", "llama2-7b")
TINY = ModelSize(
    hidden=256, intermediate=512, layers=2, heads=2, kv_heads=2, vocab=512, seq=128
)
_ON_GPU = ("bf16", "te", "coat", "coat_max")
_ON_CPU = ("bf16", "coat")
_STEPS = 3


def measured_here() -> list[Row]:
    """Measures steps of one sequence, and returns rows with their predicted memory.

    On a GPU each case runs in its own process. Before this process uses JAX, it must
    call `model_step.take_memory(at_once=False)`.
    """
    limit = device_limit_bytes()
    if limit is None:
        return [_on_cpu(case) for case in _ON_CPU]
    model = largest_model(limit)
    return [_on_gpu(case, model) for case in _ON_GPU]


def released_here() -> list[Row]:
    """Measures a step with the optimizer inside the backward pass; returns its row.

    Processes are as in `measured_here`. The model is the largest one that fits with
    this kind of step. On a CPU the tiny model is measured, after an ordinary step of
    it.
    """
    limit, case = device_limit_bytes(), f"coat{RELEASED}"
    if limit is None:
        return [_on_cpu("coat"), _on_cpu(case)]
    return [_on_gpu(case, largest_model(limit, case))]


def _on_cpu(case: str) -> Row:
    return measure(case, TINY, 1, _STEPS) | predicted(case, TINY)


def _on_gpu(case: str, model: ModelSize) -> Row:
    return measured(case, model, 1, _STEPS) | predicted(case, model)


def predicted(case: str, model: ModelSize) -> Row:
    """Returns the predicted peak of a case's step with one sequence."""
    return {"predicted_peak_gib": estimate(case, model, 1).peak_bytes / GIB}


def largest_model(limit: int, case: str = "coat") -> ModelSize:
    """Returns the largest preset that is predicted to train within `limit` bytes.

    The prediction is for a step of `case` on one sequence. If no preset fits, the tiny
    model is returned.
    """
    models = (ModelSize.of(preset) for preset in PRESETS)
    fit = (m for m in models if estimate(case, m, 1).peak_bytes <= limit)
    return next(fit, TINY)
