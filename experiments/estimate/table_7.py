"""Predicts the memory of the models in the paper's table 7, without a GPU.

    uv run python -m experiments.estimate.table_7

The rows of the study "paper" have the paper's numbers of GPUs, batches and sequence
lengths, on GPUs of 80 GiB. Rows of the study "gpus" have one to eight GPUs of 80 and of
141 GiB, one sequence on each, and also Llama 3 8B and longer sequences. Parameters are
BF16. Several GPUs shard parameters, optimizer states and the batch (FSDP). Batches
count the sequences of all GPUs together.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from coat_jax.layers.recipes import RecipeName
from experiments.common.paper import MODELS, TABLE_7
from experiments.common.programs import new_parser, results_path
from experiments.common.results import default_path, write_results
from experiments.estimate.__main__ import parser, row_of

Row = dict[str, Any]
RECIPES: tuple[RecipeName, ...] = ("bf16", "te", "coat", "coat_max")
PRESETS = {model: preset for preset, model in MODELS.items()}
# GiB of an H100 and of an H200, as their names say; they have about 1 GiB less.
GPU_MEMORIES = (80, 141)
_SEQUENCE = 2048
# The study "gpus": models with the length of their sequences, and numbers of GPUs.
STUDIED = (
    ("Llama-2-7B", 2048),
    ("Llama-2-7B", 4096),
    ("Llama-3-8B", 8192),
    ("Llama-2-13B", 2048),
    ("Llama-30B", 2048),
)
GPUS = (1, 2, 4, 8)
# The paper trains the 30B model on shorter sequences.
_PAPER_SEQUENCES = {"Llama-30B": 1024}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program with the arguments `argv`, by default the command line's."""
    top = new_parser("experiments.estimate.table_7", __doc__)
    out = default_path("estimate", "estimate_table_7")
    top.add_argument("--out", type=results_path, default=out)
    args = top.parse_args(argv)
    cases = itertools.chain(of_the_paper(), of_gpus())
    write_results(args.out, rows=list(tqdm(cases, unit="case", disable=None)))


def of_the_paper() -> Iterator[Row]:
    """Yields the predictions for each setting of the paper's table."""
    for model, gpus, batch in TABLE_7:
        sequence = _PAPER_SEQUENCES.get(model, _SEQUENCE)
        sizes = {"gpus": gpus, "batch": batch * gpus, "sequence": sequence}
        for recipe in RECIPES:
            yield prediction("paper", model, recipe, **sizes)


def of_gpus() -> Iterator[Row]:
    """Yields the predictions for one to eight GPUs of 80 GiB and of 141 GiB."""
    cases = itertools.product(STUDIED, GPUS, GPU_MEMORIES)
    for (model, sequence), gpus, memory in cases:
        sizes = {"gpus": gpus, "batch": gpus, "sequence": sequence}
        for recipe in RECIPES:
            yield prediction("gpus", model, recipe, gpu_memory=memory, **sizes)


def prediction(
    study: str,
    model: str,
    recipe: RecipeName,
    *,
    gpus: int,
    batch: int,
    sequence: int = _SEQUENCE,
    gpu_memory: int = GPU_MEMORIES[0],
) -> Row:
    """Returns a row of `experiments.estimate` for a model, with its largest batch.

    Args:
      study: The name of the study.
      model: The model's name in table 7.
      recipe: The recipe.
      gpus: The number of GPUs.
      batch: The number of sequences on all GPUs.
      sequence: The length of sequences.
      gpu_memory: The GiB of a GPU.
    """
    options = {
        "--preset": PRESETS[model],
        "--batch": batch,
        "--sequence": sequence,
        "--gpu-memory": gpu_memory,
    }
    if gpus > 1:
        options["--mesh"] = f"fsdp={gpus}"
    argv = [str(word) for option in options.items() for word in option]
    row = row_of(parser().parse_args([*argv, "--largest-batch"]), recipe)
    return {"study": study, "model": model, "gpu_memory_gib": gpu_memory} | row


if __name__ == "__main__":
    main()
