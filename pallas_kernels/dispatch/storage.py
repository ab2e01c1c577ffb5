"""Lowered kernels in the folder of JAX's persistent compilation cache.

JAX's cache spares a process what XLA compiled before, but not the lowering of kernels,
which is 0.3 s of Python each. So if `jax_compilation_cache_dir` is a folder, what each
launch is lowered to is stored in its subfolder "coat_kernels". The name of a file is a
hash of the launch's fingerprint, the versions of JAX and jaxlib, and the target GPU. A
damaged file is not read, and is written again.
"""

import base64
import contextlib
import hashlib
import json
import uuid
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from jax.extend import backend, core

from pallas_kernels.checks import warn_once
from pallas_kernels.dispatch.custom_calls import Call, Calls
from pallas_kernels.dispatch.fingerprints import UnknownError, fingerprint

# It changes with what `Calls` has, and with what is removed from kernels.
_FORMAT = "1"
_FOLDER = "coat_kernels"


def path_of(program: core.ClosedJaxpr, target: Any) -> Path | None:
    """Returns the file of a launch's kernels; None if they are not stored.

    Args:
      program: The traced launch.
      target: The abstract device that it is lowered for; None means JAX's default.
    """
    folder = jax.config.jax_compilation_cache_dir
    is_on = jax.config.jax_enable_compilation_cache and folder and "://" not in folder
    if not is_on:
        return None
    # Mosaic GPU also asks for this device where there is a target.
    device = backend.get_default_device()
    devices = target, device.device_kind, getattr(device, "compute_capability", None)
    names = _FORMAT, jax.__version__, jaxlib.__version__, repr(devices)
    try:
        name = hashlib.sha256("\n".join(names).encode() + fingerprint(program))
    except UnknownError as error:
        warn_once(f"kernels are not stored for later processes: {error}")
        return None
    return Path(folder, _FOLDER, name.hexdigest())


def read(path: Path) -> Calls | None:
    """Returns the kernels in a file; None if there is none, or it is damaged."""
    try:
        digest, text = path.read_bytes().split(b"\n", 1)
    except (OSError, ValueError):
        return None
    if hashlib.sha256(text).hexdigest().encode() != digest:
        return None
    written = json.loads(zlib.decompress(text))
    return Calls(tuple(map(_call, written["calls"])), tuple(written["results"]))


def write(path: Path, calls: Calls) -> None:
    """Writes kernels into a file, of which other processes see all or nothing.

    Warns if the folder cannot be written to.
    """
    written = {"calls": list(map(_written, calls.calls)), "results": calls.results}
    text = zlib.compress(json.dumps(written).encode())
    unfinished = path.with_suffix(f".{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
        unfinished.replace(path)
    except OSError as error:
        warn_once(f"kernels are not stored for later processes: {error}")
        with contextlib.suppress(OSError):
            unfinished.unlink()


def _written(call: Call) -> dict[str, Any]:
    def types(avals):
        return [[aval.shape, str(aval.dtype)] for aval in avals]

    return {
        "operands": call.operands,
        "takes": types(call.takes),
        "returns": types(call.returns),
        "aliases": list(call.aliases.items()),
        "kernel": base64.b64encode(call.kernel).decode(),
    }


def _call(written: dict[str, Any]) -> Call:
    def avals(types):
        return tuple(jax.core.ShapedArray(x, jnp.dtype(dtype)) for x, dtype in types)

    return Call(
        operands=tuple(written["operands"]),
        takes=avals(written["takes"]),
        returns=avals(written["returns"]),
        aliases=dict(written["aliases"]),
        kernel=base64.b64decode(written["kernel"]),
    )
