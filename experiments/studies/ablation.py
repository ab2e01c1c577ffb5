"""Training curves of COAT's parts: what each of them costs in loss.

    uv run python -m experiments.studies.ablation
    uv run python -m experiments.studies.ablation --preset 124m --data runs/packages

The command trains one model with FP8 in a part of the training at a time: in Adam's
moments alone, in the operands of matmuls alone (`te`), in both and in saved activations
(`coat`), and in `coat` without its moments. For each of several seeds, all trainings
start from one initialization and read the data in one order, and losses are compared
with the losses of `bf16`. Results are written after every training. Call the command
again after an interruption, or with more seeds, and it runs only the missing trainings.
"""

import sys
from collections.abc import Sequence

from experiments.studies.curves import FP8, OPTAX, Variant, compare

VARIANTS = (
    Variant(name="bf16", optimizer=OPTAX),
    Variant(name="bf16, moments in FP8", optimizer=FP8),
    Variant(name="te", optimizer=OPTAX, recipe="te"),
    Variant(name="coat, moments in float32", optimizer=OPTAX, recipe="coat"),
    Variant(name="coat", optimizer=FP8, recipe="coat"),
    Variant(name="coat_max", optimizer=FP8, recipe="coat_max"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, this process's by default; returns an exit code."""
    program = "experiments.studies.ablation"
    return compare(argv, VARIANTS, program, "ablation", __doc__)


if __name__ == "__main__":
    sys.exit(main())
