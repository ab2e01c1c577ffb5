"""Entry point of `python -m experiments.finetune`."""

from experiments.training import interrupts


def _load():
    from experiments.finetune.program import run_program

    return run_program


if __name__ == "__main__":
    interrupts.run_module(_load)
