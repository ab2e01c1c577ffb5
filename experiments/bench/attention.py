"""Compares the speed of the attention kernels with cuDNN's attention and XLA's.

    uv run python -m experiments.bench.attention

first compares the kernels with attention in float64 on short sequences, and ends with
exit code 2 if they differ. Then it times causal attention in BF16: the forward pass
alone, and the forward and backward passes together. Timing alternates between the
kernels with several tiles, cuDNN's attention if there is no soft cap, and XLA's
attention. For packed sequences, cuDNN's and XLA's attention read a mask. The program
writes `bench_attention.json` after each case. Rates count matmuls of the scores that
are not masked: two in the forward pass, and five in the backward pass.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import pallas_kernels
from experiments.common import results, tables
from experiments.common.programs import (
    new_parser,
    positive_int,
    results_path,
    rows_to_join,
)
from experiments.common.results import Bar, default_path
from experiments.common.tables import Column
from experiments.common.timing import Program, add_turns, timed, turns_of
from pallas_kernels import AttentionTiles as Tiles
from pallas_kernels import AttentionTuning as Tuning

Row = dict[str, Any]
_HEADS = {
    128: (32, 8),
    256: (16, 8),
}  # Numbers of heads of queries and of keys, by size.
_SOFTCAP = 50.0
_BOUND = 8e-3  # The largest relative error; rounding to BF16 alone causes 2e-3.
# The target on one H200: the speed with a soft cap, relative to XLA's attention.
_OVER_XLA = 2.0
_FORWARD, _BACKWARD = 2, 5  # Matmuls of scores.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Causal attention of one shape.

    Attributes:
      head_dim: The size of heads.
      seq: The length of sequences.
      batch: The number of sequences.
      softcap: The soft cap of scores, or None.
      window: The number of positions that a query attends to; None means no limit.
      documents: The number of documents of random lengths in each sequence.
    """

    head_dim: int
    seq: int
    batch: int = 4
    softcap: float | None = None
    window: int | None = None
    documents: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `pallas_kernels.attention`."""
        ids = jnp.asarray(self.ids()) if self.documents > 1 else None
        return {"softcap": self.softcap, "window": self.window, "segment_ids": ids}

    def ids(self) -> np.ndarray:
        """Returns the index of each position's document, int32 [batch, seq]."""
        rng = np.random.default_rng(self.documents)
        starts = np.zeros((self.batch, self.seq), np.int32)
        for sequence in starts:
            places = 1 + rng.choice(self.seq - 1, self.documents - 1, replace=False)
            sequence[places] = 1
        return starts.cumsum(1, dtype=np.int32)

    def counts(self) -> np.ndarray:
        """Returns the mask of scores, true if not masked, bool [batch, 1, seq, seq]."""
        distance = np.arange(self.seq)[:, None] - np.arange(self.seq)
        near = (distance >= 0) & (distance < (self.window or self.seq))
        ids = self.ids()
        return (near & (ids[:, :, None] == ids[:, None]))[:, None]

    def arrays(self) -> tuple[jax.Array, ...]:
        """Draws queries, keys, values, and the gradient of the output."""
        n, m = _HEADS[self.head_dim]
        keys = jax.random.split(jax.random.key(self.seq), 4)
        shapes = [(self.batch, self.seq, heads, self.head_dim) for heads in (n, m)]
        return tuple(
            jax.random.normal(key, shapes[i], jnp.bfloat16)
            for key, i in zip(keys, (0, 1, 1, 0), strict=True)
        )

    def flops(self, matmuls: int) -> float:
        """Returns the FLOPs of matmuls of the scores that are not masked.

        `matmuls` is the number of matmuls.
        """
        scores = int(self.counts().sum()) * _HEADS[self.head_dim][0]
        return 2 * matmuls * scores * self.head_dim


def main() -> None:
    """Checks the kernels, times them, prints a table and writes the results file."""
    parser = new_parser("experiments.bench.attention", __doc__)
    add = parser.add_argument
    add("--head-dims", type=int, nargs="+", choices=_HEADS, default=list(_HEADS))
    add("--seqs", type=positive_int, nargs="+", default=[2048, 4096])
    add(
        "--windows",
        type=positive_int,
        nargs="*",
        default=[1024],
        help="of windowed cases",
    )
    add(
        "--documents", type=positive_int, nargs="*", default=[8], help="of packed cases"
    )
    add("--batch", type=positive_int, default=4)
    add("--default-tiles", action="store_true", help="time no other tiles")
    add_turns(parser)
    parser.set_defaults(calls=5, round_s=0.1)
    add("--out", type=results_path, default=default_path("bench_attention"))
    args = parser.parse_args()
    if args.documents and max(args.documents) > min(args.seqs):
        parser.error(
            "--documents must be at most the tokens of each of --seqs, got "
            f"{max(args.documents)} and {min(args.seqs)}"
        )
    rows = rows_to_join(parser, args.out)
    console = Console(width=110)
    checks = list(checked(args.head_dims))
    console.print(*checks, sep="\n")
    if wrong := [row for row in checks if not row["error"] <= _BOUND]:
        parser.error(f"the kernels are wrong in {len(wrong)} of {len(checks)} checks")
    commit = results.versions()["commit"]
    for case in tqdm(list(cases(args)), unit="case", disable=None):
        for row in measured(case, args.default_tiles, turns_of(args)):
            rows = results.joined(rows, row | {"commit": commit}, _case_of)
        results.write_results(args.out, rows=rows, bars=bars(rows), checks=checks)
    console.print(table(rows), tables.bars(bars(rows)))


def checked(head_dims: list[int]) -> Iterator[Row]:
    """Yields rows with the relative errors of the kernels on short sequences."""
    choices = itertools.product(head_dims, (None, _SOFTCAP), (None, 300), (1, 5))
    for head_dim, softcap, window, documents in choices:
        kind = {"softcap": softcap, "window": window, "documents": documents}
        case = Case(head_dim=head_dim, seq=1024, batch=1, **kind)
        # Scores are several times as large as in models, so that they reach the cap.
        q, k, v, do = (x[:, :, : x.shape[2] // 4] for x in case.arrays())
        arrays = (4 * q, k, v, do)
        actual = jax.jit(partial(_passes, case, "mosaic", None))(*arrays)
        expected = _in_float64(case, *arrays)
        names = ("out", "dq", "dk", "dv")
        for name, x, y in zip(names, actual, expected, strict=True):
            error = np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)
            yield dataclasses.asdict(case) | {"array": name, "error": float(error)}


def _in_float64(case: Case, *arrays: jax.Array) -> Iterator[np.ndarray]:
    """Yields the output of attention and the gradients of q, k and v, in float64."""
    q, k, v, do = (np.asarray(x, np.float64).swapaxes(1, 2) for x in arrays)
    (b, n, s, d), m = q.shape, k.shape[1]
    k, v = (np.repeat(x, n // m, axis=1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) / np.sqrt(d)
    slope = 1.0
    if case.softcap is not None:
        share = np.tanh(scores / case.softcap)
        scores, slope = case.softcap * share, 1 - share**2
    p = np.where(case.counts(), np.exp(scores - scores.max(-1, keepdims=True)), 0)
    p /= p.sum(-1, keepdims=True)
    dp = do @ v.swapaxes(2, 3)
    ds = slope * p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(d)
    yield (p @ v).swapaxes(1, 2)
    yield (ds @ k).swapaxes(1, 2)
    for weights, x in ((ds, q), (p, do)):
        of_heads = weights.swapaxes(2, 3) @ x
        yield of_heads.reshape(b, m, -1, s, d).sum(2).swapaxes(1, 2)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yields all cases of the command line, except windows that sequences fit into.

    The cases are attention without options, with a soft cap, with a window, with both,
    and with several documents in a sequence.
    """
    caps = {}, {"softcap": _SOFTCAP}
    kinds = [*caps, *(cap | {"window": w} for w in args.windows for cap in caps)]
    kinds += [{"documents": documents} for documents in args.documents]
    for head_dim, seq in itertools.product(args.head_dims, args.seqs):
        for kind in kinds:
            # Sequences that fit into the window are left out.
            if kind.get("window", 0) < seq:
                yield Case(head_dim=head_dim, seq=seq, batch=args.batch, **kind)


def tunings(head_dim: int) -> dict[str, Tuning]:
    """Returns tunings by name: the default, and others that each change one kernel."""
    usual = Tuning.of(head_dim)
    others = _TILES[head_dim]
    named = {"default": usual}
    for kernel, tiles in others:
        changed = dataclasses.replace(usual, **{kernel: tiles})
        name = f"{kernel} {tiles.queries}x{tiles.keys}"
        named[f"{name}, {tiles.stages}+{tiles.more_stages} stages"] = changed
    return named


_TILES = {
    128: (
        ("forward", Tiles(queries=128, keys=64, stages=3, more_stages=3)),
        ("forward", Tiles(queries=128, keys=128, stages=3, more_stages=2)),
        ("queries", Tiles(queries=128, keys=64, stages=3, more_stages=3)),
        ("keys", Tiles(queries=64, keys=128, stages=3, more_stages=3)),
        ("keys", Tiles(queries=64, keys=64, stages=3, more_stages=3)),
    ),
    256: (("forward", Tiles(queries=128, keys=64, stages=2, more_stages=1)),),
}


def _passes(
    case: Case, implementation: str, tuning: Tuning | None, q, k, v, do
) -> tuple[jax.Array, ...]:
    """Computes the output and the gradients with the library's attention."""
    options = case.options | {"implementation": implementation, "tuning": tuning}
    out, lse = pallas_kernels.attention(q, k, v, **options)
    grads = pallas_kernels.attention_grad(do, q, k, v, out, lse, **options)
    return out, *grads


def _forward(case: Case, tuning: Tuning | None, q, k, v, do) -> jax.Array:
    del do
    options = case.options | {"implementation": "mosaic", "tuning": tuning}
    return pallas_kernels.attention(q, k, v, **options)[0]


def _of_jax(case: Case, implementation: str, q, k, v) -> jax.Array:
    """Computes attention with JAX's function, or in plain `jnp` with a soft cap."""
    window = None if case.window is None else (case.window - 1, 0)
    ids = jnp.asarray(case.ids())
    within = ids[:, None, :, None] == ids[:, None, None]
    if case.softcap is None:
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=within if case.documents > 1 else None,
            is_causal=True,
            local_window_size=window,
            implementation=implementation,
        )
    groups = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    products = jnp.einsum(
        "bskgd,btkd->bkgst", groups, k, preferred_element_type=jnp.float32
    )
    scores = products / (case.softcap * np.sqrt(case.head_dim))
    scores = case.softcap * jnp.tanh(scores)
    distance = jnp.arange(case.seq)[:, None] - jnp.arange(case.seq)
    near = (distance >= 0) & (distance < (case.window or case.seq))
    counts = near & within if case.documents > 1 else near[None, None]
    scores = jnp.where(counts[:, None], scores, jnp.finfo(jnp.float32).min)
    shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgst,btkd->bskgd", shares, v).reshape(q.shape)


def _both(fn: Callable, q, k, v, do) -> tuple[jax.Array, ...]:
    out, vjp = jax.vjp(fn, q, k, v)
    return out, *vjp(do)


def measured(case: Case, default_tiles: bool, options: dict[str, Any]) -> list[Row]:
    """Times all implementations of a case, and returns a row for each.

    XLA's attention is recomputed in the backward pass.

    Args:
      case: The shape of attention.
      default_tiles: Whether to time no tiles except the default.
      options: The turns of timing, as `turns_of` returns them.
    """
    arrays = case.arrays()
    forward, both = {}, {}
    for name, tuning in tunings(case.head_dim).items():
        if name != "default" and default_tiles:
            continue
        # Each other tuning changes one kernel, and is timed in a pass that runs it.
        if name.startswith(("default", "forward")):
            forward[name] = partial(_forward, case, tuning)
        if not name.startswith("forward"):
            both[name] = partial(_passes, case, "mosaic", tuning)
    plain = {"xla": partial(_of_jax, case, "xla")}
    if case.softcap is None:
        plain["cudnn"] = partial(_of_jax, case, "cudnn")
    for name, fn in plain.items():
        forward[name] = lambda q, k, v, do, fn=fn: fn(q, k, v)
        both[name] = partial(_both, jax.checkpoint(fn) if name == "xla" else fn)
    rows = []
    for passes, matmuls, functions in (
        ("forward", _FORWARD, forward),
        ("forward and backward", _FORWARD + _BACKWARD, both),
    ):
        programs = [Program(name, fn, arrays) for name, fn in functions.items()]
        seconds, errors = timed(programs, options)
        named = {program.name: time for program, time in seconds.items()}
        for name in functions:
            row = dataclasses.asdict(case) | {"passes": passes, "of": name}
            if name in named:
                row["ms"] = 1e3 * named[name]
                row["tflop_per_s"] = case.flops(matmuls) / named[name] / 1e12
                if "xla" in named:
                    row["ratio_to_xla"] = named["xla"] / named[name]
            rows.append(row | {"error": errors.get(f"{name}_error")})
    return rows


def _case_of(row: Row) -> tuple[Any, ...]:
    names = [field.name for field in dataclasses.fields(Case)]
    return tuple(row[name] for name in (*names, "passes", "of"))


def bars(rows: list[Row]) -> list[Bar]:
    """Returns the target for the speed with a soft cap, or no target without a GPU."""
    ratios = [
        row["ratio_to_xla"]
        for row in rows
        if row["of"] == "default" and row["softcap"] and row.get("ratio_to_xla")
    ]
    if not ratios or jax.default_backend() != "gpu":
        return []
    label = "attention with a soft cap, least ratio to XLA's"
    return [Bar.of(label, ">=", _OVER_XLA, min(ratios))]


def table(rows: list[Row]) -> Table:
    """Returns a table of all rows for a terminal."""
    columns = (
        Column("passes", "passes"),
        Column("head", "head_dim"),
        Column("positions", "seq"),
        Column("cap", "softcap"),
        Column("window", "window"),
        Column("documents", "documents"),
        Column("of", "of"),
        Column("ms", lambda row: row["error"] or row["ms"], "{:.3f}"),
        Column("TFLOP/s", "tflop_per_s", "{:.0f}", missing=""),
        Column("times XLA's", "ratio_to_xla", "{:.2f}", missing=""),
    )
    return tables.table("Attention", columns, rows)


if __name__ == "__main__":
    main()
