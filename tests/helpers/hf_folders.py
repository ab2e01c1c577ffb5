"""Folders of tiny checkpoints, written by the library safetensors."""

import functools
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from helpers.hf_values import values_of

FIXTURES = Path(__file__).parents[1] / "models" / "hf" / "fixtures"
CASES = sorted(path.stem for path in FIXTURES.glob("*.json"))
TOKENS = [[3, 17, 88, 5, 41, 2, 60, 9, 33, 71, 12, 90, 4, 55, 28, 66, 19, 7, 80, 31]]


@functools.cache
def fixture(case: str) -> tuple[dict, dict[str, np.ndarray]]:
    """Returns the config.json of a case and its tensors, in float32."""
    found = json.loads((FIXTURES / f"{case}.json").read_text())
    shapes = found["shapes"].items()
    return found["config"], {name: values_of(name, s, case) for name, s in shapes}


def write_folder(
    folder: Path, case: str, dtype: str = "float32", **changes: object
) -> Path:
    """Writes a case's folder with the library safetensors."""
    config, tensors = fixture(case)
    folder.mkdir()
    config = {**config, "dtype": dtype, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: x.astype(np.dtype(dtype)) for name, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
