"""Compares trainers outside this library, in BF16 and with `coat.fp8`.

    uv run python -m experiments.bench.trainer --trainer flax
    uv run python -m experiments.bench.trainer --trainer flax --gpus 1 2
    python -m experiments.bench.trainer --trainer tunix

trains a Qwen 3 in BF16. `flax` is a model of plain Flax with `nnx.Optimizer`. With
`--gpus` it trains under `jax.jit` with each array sharded along its largest axis over
the GPUs, and `--batch` is the batch of each GPU. `tunix` is tunix's own Qwen 3 in its
`PeftTrainer`, which needs `pip install google-tunix`. The cases are:

- `bf16`: each layer under `jax.checkpoint`, and `optax.adamw` with float32 moments.
- `bf16, all saved`: the same without checkpoints.
- `ours`: `coat.fp8` of the model, and `coat.fp8_adamw`.
- `ours, attention written out`: for `flax`, which otherwise runs cuDNN's attention,
  attention in plain matmuls and a softmax. tunix always computes attention like this.

Each case runs in its own process, because the peak of memory is measured per process.
"""

import argparse
import functools
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import coat_jax as coat
from experiments.common.foreign_layers import Modules, Qwen, QwenInXla
from experiments.common.layer_cases import Shape, add_sizes, shape_of
from experiments.common.programs import (
    new_parser,
    positive_int,
    results_path,
    usage_errors,
)
from experiments.common.results import Bar, default_path, write_results
from experiments.common.tables import grouped

_WRITTEN_OUT = "ours, attention written out"
CASES = ("bf16", "bf16, all saved", "ours", _WRITTEN_OUT)
TRAINERS = ("flax", "tunix")
_SIZES = ("trainer", "hidden", "layers", "intermediate", "kv_heads", "vocab", "batch")
_SIZES += ("seq",)
_WIDE, _SPEED, _SPEED_WIDE, _PEAK = 4096, 1.2, 1.35, 0.55
# On two GPUs: the speed relative to BF16, and a GPU's tokens/s relative to one GPU.
_SPEED_OF_TWO, _SHARE_OF_TWO = 1.47, 0.92
# The speed with attention that is written out, relative to cuDNN's attention.
_SHARE_WRITTEN_OUT = 0.97


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program with the arguments `argv`, by default the command line's."""
    top = parser()
    args = top.parse_args(argv)
    with usage_errors(top):
        shape_of(args)
    if args.gpus and args.trainer != "flax":
        top.error(f"--gpus is for --trainer flax, got --trainer {args.trainer}")
    if args.case is not None:
        print(json.dumps(measured(args)))
        return
    rows, sizes = [], {name: getattr(args, name) for name in _SIZES}
    cases = [case for case in CASES if (args.trainer, case) != ("tunix", _WRITTEN_OUT)]
    for gpus, case in itertools.product(args.gpus or [None], cases):
        same = sys.argv[1:] if argv is None else list(argv)
        command = [sys.executable, "-m", "experiments.bench.trainer", *same]
        command += ["--case", case] + (["--gpus", str(gpus)] if gpus else [])
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if run.returncode:  # Memory may not suffice.
            failed = {"case": case, "gpus": gpus, "error": "see the log"}
            rows.append(sizes | failed)
        else:
            rows.append(json.loads(run.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    write_results(args.out or _path(args), rows=rows, bars=bars(rows))


def parser() -> argparse.ArgumentParser:
    """Returns the command line parser; the default model has 1.4B parameters."""
    top = new_parser("experiments.bench.trainer", __doc__)
    add = top.add_argument
    add("--trainer", choices=TRAINERS, default="flax")
    add_sizes(
        top,
        Shape(
            hidden=2048, seq=2048, batch=4, intermediate=6144, kv_heads=8, head_dim=128
        ),
    )
    add("--layers", type=positive_int, default=28)
    add("--vocab", type=positive_int, default=32_768)
    add("--steps", type=positive_int, default=20, help="that are timed, after 3 others")
    add("--gpus", type=positive_int, nargs="+", metavar="N", help="with --trainer flax")
    add("--case", choices=CASES, help="runs this case alone, and prints its row")
    add("--out", type=results_path)
    return top


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the row of one case: its speed, peak memory and last loss."""
    tx = coat.fp8_adamw(1e-4) if _is_ours(args.case) else _adamw(1e-4)
    gpus, steps = None, {"flax": _flax_step, "tunix": _tunix_step}
    if args.gpus:
        [gpus], steps = args.gpus, {"flax": _split_step}
    step = steps[args.trainer](args, tx)
    for number in range(3):
        step(number)
    start = time.perf_counter()
    losses = [step(3 + number) for number in range(args.steps)]
    loss = float(losses[-1])  # Waits for all steps.
    seconds = (time.perf_counter() - start) / args.steps
    stats = jax.local_devices()[0].memory_stats() or {}
    return {name: getattr(args, name) for name in _SIZES} | {
        "case": args.case,
        "gpus": gpus,
        "ms_per_step": 1e3 * seconds,
        "tokens_per_s": args.batch * args.seq / seconds,  # Each GPU has its own tokens.
        "peak_gib": stats.get("peak_bytes_in_use", 0) / 2**30,
        "loss": loss,
    }


def bars(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    """Returns the targets for speed and memory, relative to the fastest BF16 case.

    On several GPUs a target also compares their speed with one GPU's.
    """
    by_gpus = grouped(rows, lambda row: row.get("gpus"))
    if None in by_gpus:
        return _beside_bf16(rows)
    targets = []
    for gpus, of_them in by_gpus.items():
        more = gpus is not None and gpus > 1
        of_bf16 = _beside_bf16(of_them, _SPEED_OF_TWO if more else None)
        targets += [bar._replace(name=f"{gpus} GPUs: {bar.name}") for bar in of_bf16]
    ours = {row["gpus"]: row for row in rows if row["case"] == "ours"}
    rates = {n: row["tokens_per_s"] for n, row in ours.items() if "error" not in row}
    for gpus in sorted(rates.keys() - {1}) if 1 in rates else ():
        name = f"{gpus} GPUs: tokens/s a GPU / one's"
        targets.append(Bar.of(name, ">=", _SHARE_OF_TWO, rates[gpus] / rates[1]))
    return targets


def _beside_bf16(
    rows: Sequence[dict[str, Any]], target: float | None = None
) -> list[Bar]:
    """Returns the targets of `ours`, relative to the fastest BF16 case among `rows`.

    All rows have the same number of GPUs. `target` is the least ratio of speeds; None
    means a target that depends on the hidden size.
    """
    by_case = {row["case"]: row for row in rows if "error" not in row}
    in_bf16 = [row for case, row in by_case.items() if not _is_ours(case)]
    if "ours" not in by_case or not in_bf16:
        return []
    ours = by_case["ours"]
    fastest = max(in_bf16, key=lambda row: row["tokens_per_s"])
    target = target or (_SPEED_WIDE if ours["hidden"] >= _WIDE else _SPEED)
    ratio = ours["tokens_per_s"] / fastest["tokens_per_s"]
    targets = [Bar.of("tokens/s / fastest BF16's", ">=", target, ratio)]
    if ours["peak_gib"]:
        ratio = ours["peak_gib"] / fastest["peak_gib"]
        targets.append(Bar.of("peak / fastest BF16's", "<=", _PEAK, ratio))
    if written_out := by_case.get(_WRITTEN_OUT):
        ratio = written_out["tokens_per_s"] / ours["tokens_per_s"]
        name = "tokens/s, attention written out / cuDNN's"
        targets.append(Bar.of(name, ">=", _SHARE_WRITTEN_OUT, ratio))
    return targets


def _is_ours(case: str) -> bool:
    return case.startswith("ours")


def _adamw(rate: float) -> optax.GradientTransformation:
    """Returns AdamW with both moments in float32, also for BF16 parameters."""

    def wide(tree):
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    adam = optax.adamw(rate)

    def update(grads, state, params):
        updates, state = adam.update(wide(grads), state, wide(params))
        return jax.tree.map(lambda u, g: u.astype(g.dtype), updates, grads), state

    return optax.GradientTransformation(lambda params: adam.init(wide(params)), update)


def _path(args: argparse.Namespace) -> Path:
    split = "_gpus" if args.gpus else ""
    return default_path("bench_trainer", f"{args.trainer}_{args.hidden}{split}")


def _batch(args: argparse.Namespace, number: int) -> np.ndarray:
    shape = args.batch, args.seq
    return np.random.default_rng(number).integers(args.vocab, size=shape, dtype="int32")


class _Model(nnx.Module):
    """A language model in plain Flax, with layers wrapped by `wrap`."""

    def __init__(self, args: argparse.Namespace, wrap: Callable, rngs: nnx.Rngs):
        shape = shape_of(args)
        make = Modules(None, rngs)
        in_bf16 = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        self.embed = nnx.Embed(args.vocab, args.hidden, **in_bf16, rngs=rngs)
        layer = QwenInXla if args.case == _WRITTEN_OUT else Qwen
        self.layers = nnx.List([wrap(layer(shape, make)) for _ in range(args.layers)])
        self.norm = make.rms_norm(args.hidden)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits [batch, length, vocab]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.norm(x))


class _Checkpointed(nnx.Module):
    """A wrapper of a layer that recomputes it in the backward pass."""

    def __init__(self, layer: nnx.Module):
        self.layer = layer

    def __call__(self, x: jax.Array) -> jax.Array:
        """Computes the layer."""
        return nnx.remat(lambda layer, x: layer(x))(self.layer, x)


def _model(args: argparse.Namespace) -> nnx.Module:
    wrap = _Checkpointed if args.case == "bf16" else lambda layer: layer
    model = _Model(args, wrap, nnx.Rngs(0))
    return coat.fp8(model) if _is_ours(args.case) else model


def _mean_loss(model: nnx.Module, tokens: jax.Array) -> jax.Array:
    logits = model(tokens)[:, :-1].astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def _flax_step(args: argparse.Namespace, tx: Any) -> Callable[[int], jax.Array]:
    model = _model(args)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def step(model, optimizer, tokens):
        value, grads = nnx.value_and_grad(_mean_loss)(model, tokens)
        optimizer.update(model, grads)
        return value

    # Flax takes a model of 28 layers apart in Python at each step, which takes longer
    # than the step. `nnx.cached_partial` takes the model apart only once.
    cached = nnx.cached_partial(step, model, optimizer)
    return lambda number: cached(_batch(args, number))


def _split_step(args: argparse.Namespace, tx: Any) -> Callable[[int], jax.Array]:
    """Returns a training step with arrays sharded over `args.gpus` GPUs.

    It takes the step's number and returns the loss.
    """
    [gpus] = args.gpus
    kinds = (AxisType.Auto,)
    mesh = jax.make_mesh((gpus,), ("fsdp",), kinds, devices=jax.devices()[:gpus])
    graph, params = nnx.split(_model(args))
    places = jax.tree.map(functools.partial(_along_largest_axis, mesh), params)
    state_places = coat.opt_state_sharding(tx, params, places)
    state = jax.jit(tx.init, out_shardings=state_places)(params)
    batch_place = NamedSharding(mesh, PartitionSpec("fsdp"))
    placed = (places, state_places, NamedSharding(mesh, PartitionSpec()))

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=placed)
    def step(params, state, tokens):
        def loss(params):
            return _mean_loss(nnx.merge(graph, params), tokens)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    carry = [jax.device_put(params, places), state]

    def step_and_keep(number: int) -> jax.Array:
        batches = [_batch(args, gpus * number + i) for i in range(gpus)]
        tokens = jax.device_put(np.concatenate(batches), batch_place)
        *carry[:], value = step(*carry, tokens)
        return value

    return step_and_keep


def _along_largest_axis(mesh: Mesh, array: jax.Array) -> NamedSharding:
    """Returns a sharding along the largest axis, if the mesh size divides it.

    Other arrays are replicated.
    """
    size = max(array.shape, default=0)
    spec = [None] * array.ndim
    if size and size % mesh.size == 0:
        spec[array.shape.index(size)] = "fsdp"
    return NamedSharding(mesh, PartitionSpec(*spec))


def _tunix_step(args: argparse.Namespace, tx: Any) -> Callable[[int], jax.Array]:
    from tunix.models.qwen3 import model as qwen3  # Only this case needs tunix.
    from tunix.sft import peft_trainer, utils

    remat = qwen3.RematConfig.DECODER if args.case == "bf16" else qwen3.RematConfig.NONE
    config = qwen3.ModelConfig(
        num_layers=args.layers,
        vocab_size=args.vocab,
        embed_dim=args.hidden,
        hidden_dim=args.intermediate,
        num_heads=args.hidden // args.head_dim,
        head_dim=args.head_dim,
        num_kv_heads=args.kv_heads,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
        remat_config=remat,
        dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16,
    )
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    if args.case == "ours":
        model = coat.fp8(model)

    def inputs(batch):
        ones = jnp.ones(batch.input_tokens.shape, bool)
        return {
            "input_tokens": batch.input_tokens,
            "input_mask": batch.input_mask,
            "positions": utils.build_positions_from_mask(ones),
            "attention_mask": utils.make_causal_attn_mask(ones),
        }

    losses = []

    class Trainer(peft_trainer.PeftTrainer):
        def _post_process_train_step(self, aux):
            losses.append(aux)

    options = peft_trainer.TrainingConfig(eval_every_n_steps=10**9)
    trainer = Trainer(model, tx, options).with_gen_model_input_fn(inputs)
    default = trainer.loss_fn

    def loss(model, input_tokens, input_mask, positions, attention_mask):
        value = default(model, input_tokens, input_mask, positions, attention_mask)
        return value, value

    trainer = trainer.with_loss_fn(loss, has_aux=True)
    trainer.is_managed_externally = True

    def step(number):
        tokens = _batch(args, number)
        example = peft_trainer.TrainingInput(
            input_tokens=tokens, input_mask=np.ones_like(tokens)
        )
        trainer.train([example])
        return losses[-1]

    return step


if __name__ == "__main__":
    main()
