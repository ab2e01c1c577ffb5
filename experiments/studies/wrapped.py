"""Training curves of optimizers other than AdamW, with 8-bit moving averages.

    uv run python -m experiments.studies.wrapped --steps 2000

The command trains the model of `experiments.pretrain` with the recipe `bf16` and Lion,
Muon, SGD with momentum, AdEMAMix or Adan. Each optimizer runs as optax provides it, and
wrapped in `coat.with_quantized_state`. For each seed, all trainings start from the same
initialization and read the data in the same order. Call the command again after an
interruption, or with more seeds, and it runs only the missing trainings.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

import coat_jax as coat
from experiments.studies.curves import Variant, compare
from experiments.training.optimizer import Optimizer

Schedule = Callable[[Any], Any]


def _scaled(learning_rate: Schedule, factor: float) -> Schedule:
    return lambda step: factor * learning_rate(step)


def _lion(learning_rate, *, b1, b2, weight_decay, mask):
    # Lion's b1 and b2 have another meaning than Adam's, so optax's defaults are used.
    del b1, b2
    rate = _scaled(learning_rate, 0.1)
    return optax.lion(rate, weight_decay=weight_decay, mask=mask)


def _muon(learning_rate, *, b1, b2, weight_decay, mask):
    """Returns Muon for matrices and stacks of matrices, and AdamW for the rest.

    The embedding is updated by AdamW, too. The arguments are the arguments of
    `optax.adamw`.
    """

    def dimensions(params):
        def of(path, x):
            name = jax.tree_util.keystr(path)
            if "norm" in name or "embedding" in name or x.ndim < 2:
                return None
            return optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)

        return jax.tree_util.tree_map_with_path(of, params)

    return optax.contrib.muon(
        learning_rate,
        weight_decay=weight_decay,
        weight_decay_mask=mask,
        adam_b1=b1,
        adam_b2=b2,
        muon_weight_dimension_numbers=dimensions,
        consistent_rms=0.2,
    )


def _momentum(learning_rate, *, b1, b2, weight_decay, mask):
    del b2, weight_decay, mask
    return optax.sgd(_scaled(learning_rate, 100.0), momentum=b1, nesterov=True)


def _ademamix(learning_rate, *, b1, b2, weight_decay, mask):
    # The slow average outlives gradients that b2 = 0.95 has forgotten, and diverges.
    del b2
    options = dict(b1=b1, b2=0.999, b3=0.999, alpha=2.0)
    rate = _scaled(learning_rate, 0.5)
    return optax.contrib.ademamix(rate, **options, weight_decay=weight_decay, mask=mask)


def _adan(learning_rate, *, b1, b2, weight_decay, mask):
    # Adan has three rates, which are weights of new gradients: optax's defaults are
    # used.
    del b1, b2
    return optax.adan(learning_rate, weight_decay=weight_decay, mask=mask)


def _pair(name: str, make: Callable) -> tuple[Variant, Variant]:
    """Returns variants of an optimizer: as it is, and with moving averages in 8 bits.

    Args:
      name: The optimizer's name.
      make: A function that returns the optimizer.
    """

    def wrapped(*args, **kwargs):
        return coat.with_quantized_state(make(*args, **kwargs))

    return (
        Variant(name=name, optimizer=Optimizer(make, fused=False), beside=name),
        Variant(
            name=f"{name}, 8 bits",
            optimizer=Optimizer(wrapped, fused=False),
            beside=name,
        ),
    )


VARIANTS = (
    *_pair("lion", _lion),
    *_pair("muon", _muon),
    *_pair("momentum", _momentum),
    *_pair("ademamix", _ademamix),
    *_pair("adan", _adan),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with the arguments `argv`, and returns an exit code."""
    program = "experiments.studies.wrapped"
    return compare(argv, VARIANTS, program, "wrapped_optimizers", __doc__)


if __name__ == "__main__":
    sys.exit(main())
