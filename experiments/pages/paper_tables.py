"""The paper's tables, with the numbers that were measured here."""

from collections.abc import Iterable, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any

from experiments.activations import operations
from experiments.bench.e2e import BY_KIND
from experiments.bench.model_step import ModelSize
from experiments.common.answers import ALL
from experiments.common.paper import (
    LOSS_COLUMNS,
    MODELS,
    MOMENT_CODES,
    POSTER,
    TABLE_1,
    TABLE_2,
    TABLE_2_COLUMNS,
    TABLE_3,
    TABLE_4,
    TABLE_4_COLUMNS,
    TABLE_5,
    TABLE_5_COLUMNS,
    TABLE_6,
    TABLE_7,
    TABLE_7_COLUMNS,
    TABLE_8,
    TASK_COLUMNS,
)
from experiments.common.results import load, origin
from experiments.common.seeds import over_seeds
from experiments.common.tables import grouped
from experiments.finetune.tasks import BENCHMARKS
from experiments.pages.cells import Cell, Here, NotRun, Printed, Section, Text

_RECIPES = ("bf16", "te", "coat")
_OTHER_DATA = NotRun("no downloads of these data sets; see the text")
Rows = list[tuple[str, Sequence[Cell]]]


def tables() -> list[Section]:
    """Returns the sections of all tables, in the paper's order."""
    return [
        _moments("Table 1", TABLE_1),
        _activations(),
        _pretraining(),
        _poster(),
        _finetuning(),
        _vision(),
        _layers(),
        _end_to_end(),
        _moments("Table 8", TABLE_8),
    ]


def _printed(values: Iterable[float | None]) -> list[Cell]:
    return [Text("-") if value is None else Printed(value) for value in values]


def _moments(title: str, paper: dict[str, tuple[float, ...]]) -> Section:
    results = load("quantization_error", "quantization_error_124m")
    columns = MOMENT_CODES[: len(next(iter(paper.values())))]
    pairs = (row for row in results["rows"] if row["study"] == "pairs")
    errors = {
        formats: fmean(row["error"] for row in rows)
        for formats, rows in grouped(pairs, itemgetter("mu", "nu")).items()
    }
    rows: Rows = []
    for mu, printed in paper.items():
        rows.append((f"{mu}, here", [Here(errors[mu, nu]) for nu in columns]))
        rows.append((f"{mu}, paper", _printed(printed)))
    return Section(
        title=f"{title}: error of Adam's update by the formats of both moments",
        text="Rows are formats of the first moment, columns of the second. Ours are of "
        "a 124M Llama, scaled so that two moments of E4M3+Expand have the paper's "
        "error. Elements with a second moment of zero are left out.",
        columns=columns,
        rows=rows,
        source=origin(results),
    )


def _activations() -> Section:
    results = load("activation_memory")
    names = list(operations.TITLES)
    rows: Rows = []
    for row in results["rows"]:
        if row["recipe"] in (*_RECIPES, "coat_max"):
            units = [row[f"{name}_units"] for name in names]
            cells = [Here(value) for value in (*units, row["units"])]
            rows.append((f"{row['recipe']}, here", cells))
        if paper := TABLE_2.get(row["recipe"]):
            rows.append((f"{row['recipe']}, paper", _printed(paper[:-1])))
    return Section(
        title="Table 2: saved activations of one layer, in U",
        text="U is batch x sequence x hidden x 2 bytes, for Llama-2-7B's layer. JAX's "
        "autodiff saves more of norms and gates than the paper's BF16, and rope saves "
        "nothing here, because its angles are recomputed.",
        columns=TABLE_2_COLUMNS[:-1],
        rows=rows,
        source=origin(results),
    )


def _pretraining() -> Section:
    results = load("pretrain", "pretrain_300m_compared")
    columns = (*LOSS_COLUMNS, "validation loss", *TASK_COLUMNS)
    at = len(LOSS_COLUMNS)
    rows: Rows = []
    ours = over_seeds(results["rows"])
    for recipe in _RECIPES:
        missing = [_OTHER_DATA] * (len(columns) - 2)
        cells = [Here(ours[recipe]["train_loss"], 4), *missing]
        cells.insert(at, Here(ours[recipe]["val_loss"], 4))
        rows.append((f"{recipe}, here", cells))
        values = list(TABLE_3[recipe])
        cells = _printed([*values[:at], None, *values[at:]])
        rows.append((f"{recipe}, paper", cells))
    return Section(
        title="Table 3: pretraining of OLMo-1B",
        text=f"Ours is a {ours['bf16']['parameters'] / 1e6:.0f}M Llama after "
        f"{results['steps']:,} steps on source code, in nats a byte, as means over "
        f"{ours['bf16']['seeds']} seeds; the paper's OLMo-1B has read text in tokens. "
        "Gaps between recipes compare, losses do not. "
        "The paper's perplexities and tasks need data sets that would be downloads. "
        "Notebook 05_pretraining compares gaps over several seeds with the paper's.",
        columns=columns,
        rows=rows,
        source=origin(results),
    )


def _poster() -> Section:
    columns = (*LOSS_COLUMNS, *TASK_COLUMNS)
    missing = [NotRun("300 billion tokens of a 7B model do not fit")] * len(columns)
    rows: Rows = []
    for recipe, values in POSTER.items():
        rows += [(f"{recipe}, here", missing), (f"{recipe}, paper", _printed(values))]
    return Section(
        title="The poster's table: pretraining of OLMo-7B",
        text="After 300 billion tokens.",
        columns=columns,
        rows=rows,
    )


def _finetuning() -> Section:
    results = load("finetune", "finetune_compare")
    families = {benchmark: family for family, benchmark in BENCHMARKS.items()}
    match = {
        (row["recipe"], row["family"]): Here(row["exact_match_percent"], 1)
        for row in results["rows"]
    }
    rows: Rows = []
    for recipe, values in TABLE_4.items():
        ours = [match[recipe, families.get(name, "all")] for name in TABLE_4_COLUMNS]
        rows += [(f"{recipe}, here", ours), (f"{recipe}, paper", _printed(values))]
    parameters = results["training"]["parameters"]
    return Section(
        title="Table 4: fine-tuning of Llama-2-7B on mathematics, percent",
        text=f"Ours are of a Llama of {parameters / 1e6:.0f}M parameters that has read "
        f"source code, means over {results['rows'][0]['seeds']} seeds. Four families "
        "of generated problems stand for the four benchmarks, so that differences "
        "between recipes compare and accuracies do not. Notebook 06_math_finetuning "
        "has their intervals.",
        columns=TABLE_4_COLUMNS,
        rows=rows,
        source=origin(results),
    )


def _vision() -> Section:
    results = load("vlm", "vlm_gpu")
    answers = {r["recipe"]: r for r in results["summary"] if r["kind"] == ALL}
    *names, _ = TABLE_5_COLUMNS
    rows: Rows = []
    for recipe, values in TABLE_5.items():
        average: Cell = NotRun("not trained on a GPU yet")
        if recipe in answers:
            average = Here(answers[recipe]["accuracy_percent"], 1)
        rows.append((f"{recipe}, here", [*[_OTHER_DATA] * len(names), average]))
        rows.append((f"{recipe}, paper", _printed(values)))
    return Section(
        title="Table 5: fine-tuning of VILA1.5-7B, percent",
        text="Ours are of a model of VILA's shape with "
        f"{results['rows'][0]['parameters'] / 1e6:.0f}M parameters, trained from "
        "nothing on generated scenes: right answers to six kinds of questions, means "
        f"over {answers['bf16']['seeds']} seeds. They stand below the paper's average; "
        "only differences between recipes compare. Notebook 07_vision_language has "
        "each kind, with intervals.",
        columns=TABLE_5_COLUMNS,
        rows=rows,
        source=origin(results),
    )


def _layers() -> Section:
    results = load("bench_layer")
    rows: Rows = []
    ours = {(r["case"], r["hidden"], r["seq"]): r for r in results["rows"]}
    for (hidden, seq), paper in TABLE_6.items():
        first = paper["bf16"]
        for recipe in _RECIPES:
            row = ours[recipe, hidden, seq]
            label = f"{hidden:,}, {seq:,}, {recipe}"
            keys = ("forward_ms", "backward_ms", "forward_backward_ms")
            cells = [Here(row[key]) for key in (*keys, "ratio_to_bf16")]
            rows.append((f"{label}, here", [*cells, Here(row["saved_mib"], 0)]))
            forward, backward, mib = paper[recipe]
            total = forward + backward
            ratio = round(sum(first[:2]) / total, 2)
            values = (forward, backward, round(total, 2), ratio, mib)
            rows.append((f"{label}, paper", _printed(values)))
    return Section(
        title="Table 6: one layer, forward and backward",
        text="By hidden size, sequence and recipe, at batch 4, all on an H100. Here it "
        "is one XLA program with cuDNN's attention, so that `bf16` is faster, too.",
        columns=("forward, ms", "backward, ms", "both, ms", "times bf16", "saved, MiB"),
        rows=rows,
        source=origin(results),
    )


def _end_to_end() -> Section:
    files = [load("bench_e2e", name) for name in ("bench_e2e", *BY_KIND.values())]
    ours: dict[tuple[str, int], Rows] = {}
    for results in files:
        kind = results["device"]["name"].split()[1]
        for row in results["rows"]:
            model = MODELS.get(ModelSize.of_row(row).name)
            if model and row["case"] in _RECIPES and not row.get("xla_flags"):
                gpus = row.get("gpus", 1)
                where = f"{gpus} {kind}{'s' * (gpus > 1)}, batch {row['batch']}"
                label = f"{model}, {where}, {row['case']}, here"
                ours.setdefault((model, gpus), []).append((label, _step(row)))
    theirs: dict[tuple[str, int], Rows] = {}
    for (model, gpus, batch), paper in TABLE_7.items():
        for recipe, values in paper.items():
            label = f"{model}, {gpus} GPU{'s' * (gpus > 1)}, batch {batch}, {recipe}"
            cells = _printed(values) or [Text("OOM")] * len(TABLE_7_COLUMNS)
            theirs.setdefault((model, gpus), []).append((f"{label}, paper", cells))
    keys = sorted(ours.keys() | theirs.keys(), key=_by_size)
    return Section(
        title="Table 7: training steps, GB and tokens/s of a GPU",
        text="Ours have BF16 parameters and float32 moments of `bf16` and `te`. One "
        "H200 has 141 GB, where BF16 fits too; several GPUs split parameters, moments "
        "and batch. The paper's 30B has sequences of 1,024 tokens, all others 2,048.",
        columns=TABLE_7_COLUMNS,
        rows=[row for key in keys for row in ours.get(key, []) + theirs.get(key, [])],
        source="; ".join(map(origin, files)),
    )


def _step(row: dict[str, Any]) -> list[Cell]:
    """Returns the cells of a measured training step, in the columns of table 7."""
    sizes = (row["optimizer_gib"], row["activations_gib"], row["peak_gib"])
    cells: list[Cell] = [Here(size, 1) for size in sizes]
    cells.append(NotRun("the largest batch is predicted in notebook 08_end_to_end"))
    if "tokens_per_s" in row:
        return [*cells, Here(row["tokens_per_s"] / row.get("gpus", 1), 0)]
    return [*cells, Text("OOM")]


def _by_size(key: tuple[str, int]) -> tuple[int, int]:
    model, gpus = key
    return list(MODELS.values()).index(model), gpus
