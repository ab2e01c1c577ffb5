"""Measures the perplexity of a Hugging Face checkpoint in several precisions.

    uv run python -m experiments.studies.checkpoints FOLDER

The text is the documentation in Python's standard library (`pydoc_data.topics`), in
windows of 1,024 tokens. All tokens of a window are predicted, except the first. Each
window begins with the tokens that the tokenizer puts before a text. The command
compares two kinds of models with the model in float32: its forward passes with other
recipes, and the model after it was saved in FP8 and loaded again. `--reference` is the
perplexity of another implementation on these tokens.
"""

import argparse
import math
import pydoc_data.topics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int32
from rich.console import Console

from coat_jax.models import hf, llama
from coat_jax.models.hf.quantized import FP8Format
from experiments.common.programs import new_parser, results_path
from experiments.common.results import Bar, default_path, write_results
from experiments.common.tables import bars as bars_table

LENGTH = 1024
# The name of a row, and the options of `hf.load`.
CASES: dict[str, dict[str, Any]] = {
    "float32": {"recipe": "bf16", "dtype": "float32"},
    "bf16": {"recipe": "bf16", "dtype": "bfloat16"},
    "te": {"recipe": "te", "dtype": "bfloat16"},
    "coat": {"recipe": "coat", "dtype": "bfloat16"},
    "coat_block": {"recipe": "coat_block", "dtype": "bfloat16"},
    "coat_bf16": {"recipe": "coat_bf16", "dtype": "bfloat16"},
}
# The name of a row in float32, and the format that the model was saved in before.
SAVED: dict[str, FP8Format] = {
    f"float32 after {format}": format for format in get_args(FP8Format)
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with the arguments `argv`, and returns an exit code."""
    args = parser().parse_args(argv)
    try:
        rows = list(measured(args.folder, args.tokens, args.cases))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    checked = bars(rows, args.reference)
    out = args.out or default_path("hf", args.folder.name)
    write_results(out, rows=rows, bars=checked)
    Console().print(bars_table(checked))
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    found = new_parser("experiments.studies.checkpoints", __doc__)
    found.add_argument("folder", type=Path, help="a Hugging Face folder")
    found.add_argument("--tokens", type=int, default=4096, help="tokens of the text")
    cases = (*CASES, *SAVED)
    found.add_argument(
        "--cases", nargs="+", choices=cases, default=cases, metavar="CASE"
    )
    found.add_argument("--reference", type=float, help="perplexity to compare with")
    found.add_argument("--out", type=results_path, help="results file")
    return found


def measured(
    folder: Path, count: int, cases: Sequence[str] = (*CASES, *SAVED)
) -> list[dict[str, Any]]:
    """Measures "float32" and other cases, and returns one row per case.

    Args:
      folder: The Hugging Face folder.
      count: The number of tokens of the text.
      cases: The names of cases in `CASES` and `SAVED`.

    Raises:
      ValueError: If there are too few tokens for a window.
    """
    windows = text_windows(folder, count)
    rows = []
    for name in dict.fromkeys(("float32", *cases)):
        if name in CASES:
            rows.append(_row(name, folder, windows, CASES[name], folder))
            continue
        with tempfile.TemporaryDirectory() as scratch:
            saved = Path(scratch) / "model"
            hf.save(hf.load(folder), saved, format=SAVED[name])
            rows.append(_row(name, saved, windows, CASES["float32"], folder))
    return rows


def _row(
    name: str, saved: Path, windows: Int32, options: dict[str, Any], folder: Path
) -> dict[str, Any]:
    loss = mean_loss(hf.load(saved, **options), windows)
    print(f"{folder.name} {name}: {math.exp(loss):.4f} a token", flush=True)
    return {
        "model": folder.name,
        "case": name,
        "tokens": windows[:, 1:].size,
        "loss_nats": loss,
        "perplexity": math.exp(loss),
    }


def text_windows(folder: Path, count: int) -> Int32[np.ndarray, "windows length"]:
    """Returns up to `count` tokens from the start of the text, in full windows.

    Each window begins with the tokens that the tokenizer puts before a text, because
    models such as Gemma have not learned to read texts without these tokens.

    Raises:
      ValueError: If there are too few tokens for a window.
    """
    text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    tokenizer = hf.load_tokenizer(folder)
    first = tokenizer.encode("").ids
    ids = tokenizer.encode(text[: 10 * count], add_special_tokens=False).ids
    length = LENGTH - len(first)
    rows = min(count // LENGTH, len(ids) // length)
    if not rows:
        raise ValueError(f"a window needs {LENGTH} tokens, got {min(count, len(ids))}")
    windows = np.array(ids[: rows * length], np.int32).reshape(rows, length)
    return np.insert(windows, [0] * len(first), first, axis=1)


def mean_loss(
    model: llama.Llama, windows: Int32[np.ndarray, "windows length"]
) -> float:
    """Returns the mean negative log-likelihood of a token in the windows, in nats."""
    graph, state = nnx.split(model)

    @jax.jit
    def loss(state: nnx.State, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graph, state)
        return llama.cross_entropy(model, tokens[:, :-1], tokens[:, 1:])

    with jax.default_matmul_precision("highest"):
        losses = [float(loss(state, jnp.asarray(row[None]))) for row in windows]
    return sum(losses) / len(losses)


def bars(rows: Sequence[dict[str, Any]], reference: float | None) -> list[Bar]:
    """Returns the targets for perplexities.

    Each case must be within 1.5% above float32, and float32 within 0.1% of the
    reference, if there is one.
    """
    found = {row["case"]: row["perplexity"] for row in rows}
    exact = found.pop("float32")
    checked = [
        Bar.of(f"perplexity of {case} / float32", "<=", 1.015, perplexity / exact)
        for case, perplexity in found.items()
    ]
    if reference is not None:
        gap = abs(exact / reference - 1)
        checked.append(Bar.of("float32 from the reference", "<=", 0.001, gap))
    return checked


if __name__ == "__main__":
    sys.exit(main())
