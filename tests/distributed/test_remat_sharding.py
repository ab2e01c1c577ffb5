"""Runs the tests of fp8_remat on sharded arrays, `eight_devices_remat.py`."""

import os
import subprocess
import sys
from pathlib import Path


def test_on_eight_virtual_devices():
    """The tests need a process of their own, which fixes the number of devices."""
    flags = [
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
    ]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q"]
    run = subprocess.run(
        [*command, "eight_devices_remat.py"],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
