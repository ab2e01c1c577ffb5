"""The section on trainers outside this library, such as tunix."""

from experiments.common.results import load
from experiments.common.tables import Column, markdown
from experiments.pages.sections import section

_FILES = ("flax_2048", "tunix_4096", "flax_4096_two")
_TRAINERS = {"flax": "plain Flax, `nnx.Optimizer`", "tunix": "tunix's `PeftTrainer`"}


def steps() -> str:
    """Returns the section on training steps of trainers outside this library."""
    files = [load("bench_trainer", name) for name in _FILES]
    rows = [row for results in files for row in results["rows"]]
    columns = (
        Column("Trainer", lambda row: _TRAINERS[row["trainer"]]),
        Column("hidden, layers", ("hidden", "layers"), "{:,}, {}"),
        Column("GPUs", "gpus", missing="1"),
        Column("case", "case"),
        Column("ms", "ms_per_step", "{:.1f}"),
        Column("tokens/s a GPU", "tokens_per_s", "{:,.0f}"),
        Column("peak, GiB", "peak_gib", "{:.1f}"),
    )
    row = rows[0]
    text = (
        "**Trainers that others wrote** (`bench_trainer`): steps of a Qwen 3 on "
        f"{files[0]['device']['name']}s with JAX {files[0]['versions']['jax']} (batch "
        f"{row['batch']} a GPU, sequence {row['seq']:,}). On two GPUs `jit` spreads "
        "each parameter along its largest axis. `bf16` has each layer under "
        "`jax.checkpoint`; both cases in BF16 train with `optax.adamw` and float32 "
        "moments, and `ours` with `coat.fp8` of the model and `coat.fp8_adamw`. tunix "
        "writes its attention out, and `ours` runs flash attention in its place. Plain "
        "Flax runs cuDNN's attention, but in the case that names another one."
    )
    return section(text, markdown(columns, rows))
