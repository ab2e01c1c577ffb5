"""Compares optax's AdamW with `coat.fp8_adamw` on models of other codebases.

Each program of this folder has a function of an optimizer that returns a `Run`: a model
of the codebase in the codebase's own training step. `compare` trains the model for 100
steps with each optimizer. It also restores the state that `coat.fp8_adamw` has after 50
steps into a new run, and checks that this run goes on in the same way.

The data are batches of a fixed random walk on tokens (a Markov chain). Every batch is
new, so the model has not seen the data of its loss. The walk's entropy is about 1.4.
"""

import argparse
import datetime
import importlib.metadata
import io
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

import coat_jax as coat

STEPS = 100
LEARNING_RATE = 2e-3
_MEAN_OF = 10  # The last steps, over which a loss is averaged.
_LARGE = 8192  # The fewest elements of a parameter with moments that count.


class Run(Protocol):
    """A model and its optimizer in a codebase's own training step."""

    def step(self, number: int) -> float:
        """Trains on batch `number` and returns its loss before the step."""

    def arrays(self) -> Any:
        """Returns all that a checkpoint holds: parameters and optimizer, a pytree."""

    def restore(self, arrays: Any) -> None:
        """Replaces parameters and optimizer by the `arrays` of another run."""

    def opt_state(self) -> Any:
        """Returns the optimizer's state, a pytree."""


Start = Callable[[optax.GradientTransformation], Run]


def tokens(number: int, *, batch: int, length: int, vocab: int) -> np.ndarray:
    """Returns batch `number` of the random walk, int32 [batch, length]."""
    table = np.random.default_rng(0).integers(vocab, size=(vocab, 4))
    rng = np.random.default_rng(1000 + number)
    walk = [rng.integers(vocab, size=batch)]
    for _ in range(length - 1):
        walk.append(table[walk[-1], rng.integers(4, size=batch)])
    return np.stack(walk, axis=1).astype(np.int32)


def next_token_loss(logits: Any, batch: Any) -> Any:
    """Returns the mean cross-entropy of each next token."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1].astype(jnp.float32), batch[:, 1:]
    )
    return losses.mean()


class TreeRun:
    """A run of a model that is a function of a pytree of parameters.

    Args:
      params: The parameters, a pytree of floating arrays.
      loss: Returns the loss of parameters and a batch.
      batch_of: Returns the batch of a number.
      tx: The optimizer.
    """

    def __init__(self, params: Any, loss: Callable, batch_of: Callable, tx: Any):
        self._batch_of, self._state = batch_of, (params, tx.init(params))

        @jax.jit
        def step(state, batch):
            params, opt_state = state
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), value

        self._step = step

    def step(self, number: int) -> float:
        """Trains on batch `number` and returns the loss."""
        self._state, loss = self._step(self._state, self._batch_of(number))
        return float(loss)

    def arrays(self) -> Any:
        """Returns the parameters and the optimizer's state."""
        return self._state

    def restore(self, arrays: Any) -> None:
        """Replaces the parameters and the optimizer's state."""
        self._state = arrays

    def opt_state(self) -> Any:
        """Returns the optimizer's state."""
        return self._state[1]


def _saved(arrays: Any) -> bytes:
    """Returns the bits of all arrays of a tree, as a file's contents."""
    file = io.BytesIO()
    leaves = [np.asarray(x) for x in jax.tree.leaves(_raw(arrays))]
    np.savez(file, *[x.reshape(-1).view(np.uint8) for x in leaves])
    return file.getvalue()


def _loaded(contents: bytes, like: Any) -> Any:
    """Returns a tree like `like` with the arrays of a file."""
    raw = _raw(like)
    leaves, tree = jax.tree.flatten(raw)
    with np.load(io.BytesIO(contents)) as file:
        bits = [file[f"arr_{j}"] for j in range(len(leaves))]
    loaded = [
        jnp.asarray(b.view(x.dtype).reshape(x.shape))
        for b, x in zip(bits, leaves, strict=True)
    ]
    return _typed(tree.unflatten(loaded), like)


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _raw(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if _is_key(x) else jnp.asarray(x), tree
    )


def _typed(tree: Any, like: Any) -> Any:
    return jax.tree.map(
        lambda x, y: jax.random.wrap_key_data(x) if _is_key(y) else x, tree, like
    )


def _state_ratio(opt_state: Any) -> float:
    """Returns the bytes of large moments, divided by their bytes in float32."""
    nodes = jax.tree.leaves(opt_state, is_leaf=_is_moment)
    moments = [x for x in nodes if _is_moment(x)]
    wide = [x for x in nodes if not _is_moment(x) and getattr(x, "size", 0) >= _LARGE]
    held = sum(x.nbytes for x in jax.tree.leaves((moments, wide)))
    elements = sum(_codes(m).size for m in moments) + sum(x.size for x in wide)
    return held / (4 * elements)


def _is_moment(x: Any) -> bool:
    """Returns whether a node is a quantized moment, or the state dict of one."""
    is_dict = isinstance(x, Mapping) and "codes" in x
    return isinstance(x, coat.QuantizedArray) or is_dict


def _codes(moment: Any) -> Any:
    return moment["codes"] if isinstance(moment, Mapping) else moment.codes


def compare(
    name: str,
    start: Start,
    *,
    packages: Sequence[str],
    ours: Start | None = None,
    note: str = "",
) -> dict:
    """Trains with both optimizers and returns a row of results.

    Args:
      name: The codebase and its model.
      start: Starts a run with an optimizer.
      packages: The codebase's packages; the row has their versions.
      ours: Starts a run with our optimizer; None means `start`.
      note: A remark for the row.
    """
    began = time.time()
    wide = start(optax.adamw(LEARNING_RATE))
    expected = [wide.step(number) for number in range(STEPS)]
    ours = ours or start
    run = ours(coat.fp8_adamw(LEARNING_RATE))
    losses = [run.step(number) for number in range(STEPS // 2)]
    saved = _saved(run.arrays())
    losses += [run.step(number) for number in range(STEPS // 2, STEPS)]
    resumed = ours(coat.fp8_adamw(LEARNING_RATE))
    resumed.restore(_loaded(saved, resumed.arrays()))
    again = [resumed.step(number) for number in range(STEPS // 2, STEPS)]
    exact = again == losses[STEPS // 2 :]
    exact &= _saved(run.arrays()) == _saved(resumed.arrays())
    optax_loss, coat_loss = (float(np.mean(x[-_MEAN_OF:])) for x in (expected, losses))
    row = {
        "codebase": name,
        "versions": ", ".join(map(_version, (*packages, "jax", "flax", "optax"))),
        "python": platform.python_version(),
        "first_loss": expected[0],
        "optax_loss": optax_loss,
        "coat_loss": coat_loss,
        "difference": coat_loss / optax_loss - 1,
        "state_ratio": _state_ratio(run.opt_state()),
        "resume_exact": bool(exact),
        "seconds": round(time.time() - began, 1),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "note": note,
    }
    print(json.dumps(row), flush=True)
    return row


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"


def main(rows: Callable[[], list[dict]]) -> None:
    """Runs a program of this folder and writes its rows to the file of `--out`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.write_text(json.dumps(rows(), indent=2) + "\n")
