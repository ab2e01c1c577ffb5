"""Entry point of `python -m experiments.pretrain`, the main job."""

import sys

from experiments.pretrain import interrupts


def _run(stop: interrupts.Interrupts) -> int:
    # Importing takes seconds, in which Ctrl-C is answered too.
    from experiments.pretrain.program import run_program

    return run_program(None, stop)


sys.exit(interrupts.run(_run))
