"""Runs a small form of the comparison `experiments.finetune.compare`, for a CPU."""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.common.results import read_results

_PROJECT = Path(__file__).resolve().parents[2]
_NAME = "finetune_compare"
FLAGS = shlex.split(
    "--seeds 1 --preset tiny --recipes bf16,te,coat "
    "--families expressions,stories,reading,steps --largest 20 --problems 2000 "
    "--test-questions 80 --eval-questions 80 --eval-batches 1 "
    "--steps 80 --batch-size 4 --seq-len 256 --eval-every 80 --save-every 80"
)


def run() -> dict[str, Any]:
    """Runs the small form in its own process, and returns its results.

    Raises:
      RuntimeError: If the process fails. The message is the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        search = filter(None, (str(_PROJECT), os.environ.get("PYTHONPATH")))
        variables = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(search)}
        paths = ["--runs", "runs", "--out", f"{_NAME}.json"]
        process = subprocess.run(
            [sys.executable, "-m", "experiments.finetune.compare", *FLAGS, *paths],
            cwd=folder,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode:
            raise RuntimeError((process.stdout + process.stderr)[-2000:])
        return read_results(Path(folder) / f"{_NAME}.json")
