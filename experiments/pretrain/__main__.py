"""Entry point of `python -m experiments.pretrain`, the main job."""

from experiments.training import interrupts


def _load():
    from experiments.pretrain.program import run_program

    return run_program


if __name__ == "__main__":
    interrupts.run_module(_load)
