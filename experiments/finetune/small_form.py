"""The comparison of `experiments.finetune.compare` in a small form, for a CPU."""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.common.results import default_path, load, read_results

_PROJECT = Path(__file__).resolve().parents[2]
_NAME = "finetune_compare"
FLAGS = shlex.split(
    "--seeds 1 --preset tiny --recipes bf16,te,coat "
    "--families expressions,stories,reading,steps --largest 20 --problems 2000 "
    "--test-questions 80 --eval-questions 80 --eval-batches 1 "
    "--steps 80 --batch-size 4 --seq-len 256 --eval-every 80 --save-every 80"
)
# The commands of the large form, which has a base.
LARGE = (
    "uv run python -m experiments.pretrain --preset 124m --recipes bf16 "
    "--out runs/base\n"
    "uv run python -m experiments.finetune.compare --base runs/base "
    "--recipes bf16,te,coat"
)


def results(*, is_large: bool) -> dict[str, Any]:
    """Returns a comparison, and prints where it comes from.

    Args:
      is_large: Whether the committed results of a GPU are meant. If there are none yet,
        the commands that make them are printed, and the small form runs.
    """
    if is_large:
        try:
            found = load("finetune", _NAME)
        except FileNotFoundError:
            print(f"{default_path('finetune', _NAME)} does not exist. Its commands:")
            print(f"{LARGE}\nHere is the small form.")
        else:
            print(f"{found['device']['name']}, {found['date'][:10]}:")
            print(found["command"])
            return found
    found = run()
    print(f"the small form on a CPU, {found['device']['name']}:")
    print(f"uv run python -m experiments.finetune.compare {shlex.join(FLAGS)}")
    return found


def run() -> dict[str, Any]:
    """Runs the small form in a process of its own, and returns its results.

    Raises:
      RuntimeError: If the process fails. The message is the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_PROJECT)}
        paths = ["--runs", "runs", "--out", f"{_NAME}.json"]
        done = subprocess.run(
            [sys.executable, "-m", "experiments.finetune.compare", *FLAGS, *paths],
            cwd=folder,
            env=os.environ | own,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-2000:])
        return read_results(Path(folder) / f"{_NAME}.json")
