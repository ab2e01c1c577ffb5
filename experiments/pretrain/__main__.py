"""Entry point of `python -m experiments.pretrain`, the main job."""

import contextlib
import os
import sys

from experiments.pretrain import interrupts


def _run(stop: interrupts.Interrupts) -> int:
    # Importing takes seconds, in which Ctrl-C is answered too.
    with stop.abrupt():
        from experiments.pretrain.program import run_program
    return run_program(None, stop)


code = interrupts.run(_run)
if code == interrupts.STOPPED:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)  # Python itself takes seconds to free its memory.
sys.exit(code)
