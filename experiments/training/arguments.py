"""The command line of `experiments.pretrain`, and options that other programs share."""

import argparse
import dataclasses
import datetime
import os
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.common import meshes
from experiments.common.programs import new_parser
from experiments.training.data import TokenDtype, Tokenizer
from experiments.training.processes import Cluster
from experiments.training.runs import latest
from experiments.training.settings import (
    PRESETS,
    RECIPES,
    BadStep,
    ParamDtype,
    Release,
    Rounding,
    Scaling,
    Settings,
)

_RUNS = Path("runs")
_EXAMPLES = """\
examples:
  uv run python -m experiments.pretrain
  uv run python -m experiments.pretrain --recipes bf16,te,coat,coat_max --steps 200
  uv run python -m experiments.pretrain --preset 124m --minutes 10 --data corpus.jsonl
  uv run python -m experiments.pretrain --preset 124m --layers 6 --hidden 512
  uv run python -m experiments.pretrain --preset llama2-7b --mesh data=2,fsdp=4
  uv run python -m experiments.pretrain --resume
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """A parsed command line.

    Attributes:
      folder: The run's folder.
      resume: Whether to continue the run that is already in `folder`.
      given: The settings that the command line gives, by name.
      mesh: The sizes of the mesh's axes; None if the command line names no mesh.
      cluster: The processes that train together; None means this process alone.
      profile: Whether a few steps of each recipe are profiled.
      tensorboard: Whether the rows of logs are also written for TensorBoard.
    """

    folder: Path
    resume: bool
    given: dict[str, Any]
    mesh: dict[str, int] | None = None
    cluster: Cluster | None = None
    profile: bool = False
    tensorboard: bool = False

    def settings(self) -> Settings:
        """Returns the preset's settings, overridden by the command line's settings."""
        return settings(self.given)


def settings(overrides: dict[str, Any]) -> Settings:
    """Returns the settings of a preset with `overrides`, which can name the preset."""
    preset = PRESETS[overrides.get("preset", "cpu")].settings
    return dataclasses.replace(preset, **overrides)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of `experiments.pretrain`.

    Options for settings have no defaults here: the preset or a resumed run has them.
    """
    top = training_parser(
        "experiments.pretrain",
        "Trains one Llama with several recipes, from one initialization "
        "and on one order of the data, and compares them.",
        epilog=_EXAMPLES,
    )
    _add_sizes(top)
    add_comparison(top)
    add_devices(top)
    add_folder(top, "runs/PRESET-TIME")
    return top


def _add_sizes(top: argparse.ArgumentParser) -> None:
    """Adds the options for the model's sizes to a parser."""
    add = top.add_argument_group("sizes in place of the preset's").add_argument
    add("--layers", type=int, metavar="N")
    add("--hidden", type=int, metavar="N", help="size of the residual stream")
    add("--intermediate", type=int, metavar="N", help="of the MLP (same ratio)")
    add("--heads", type=int, metavar="N", help="query heads (heads of the same size)")
    add("--kv-heads", type=int, metavar="N", help="of keys and values (same ratio)")


def add_comparison(
    top: argparse.ArgumentParser,
    *,
    recipes: str = "bf16,coat",
    rounding: str = "of BF16 parameters by recipes with FP8 moments (nearest)",
) -> None:
    """Adds the options for recipes, precision, checkpoints, bad steps and health.

    Args:
      top: The parser.
      recipes: The default of the recipes, as the help names it.
      rounding: The help of the rounding.
    """
    add = top.add_argument_group("what is compared, and how it is kept").add_argument
    names = ",".join(RECIPES)
    add("--recipes", type=_names, help=f"some of {names} ({recipes})", metavar="A,B")
    add("--param-dtype", choices=typing.get_args(ParamDtype))
    add("--rounding", choices=typing.get_args(Rounding), help=rounding)
    add(
        "--scaling",
        choices=typing.get_args(Scaling),
        help="when coat and coat_max take the scales of tensors (just_in_time)",
    )
    add(
        "--bf16-last",
        type=float,
        metavar="PART",
        help="the part of the steps at the end, such as 0.1, in which recipes with FP8 "
        "matmuls have BF16 matmuls, so that they end nearer to bf16 (0)",
    )
    add("--seed", type=int, help="of initialization, data's order and rounding (0)")
    add("--minutes", type=float, help="for the first recipe; may lower --steps for all")
    add("--save-every", type=int, help="steps between checkpoints")
    add("--keep", type=int, help="checkpoints that are kept (2)")
    add(
        "--bad-step",
        choices=typing.get_args(BadStep),
        help="what follows a NaN or a spike: the end, a step without an update, or the "
        "latest checkpoint with the next batches (stop)",
    )
    add(
        "--spike",
        type=float,
        metavar="FACTOR",
        help="a loss above FACTOR times the median of the last 50 is a spike (none is)",
    )
    add(
        "--health-every",
        type=int,
        metavar="N",
        help="steps between reports of amax, saturation and underflow by path and "
        "layer, in health.jsonl and health.png (none)",
    )


def add_folder(top: argparse.ArgumentParser, default: str) -> None:
    """Adds the options `--out`, `--tensorboard` and `--resume` to a parser.

    The help of `--out` names the default folder, `default`.
    """
    add = top.add_argument_group("where").add_argument
    add("--out", type=Path, help=f"the run's folder ({default})", metavar="DIR")
    add(
        "--tensorboard",
        action="store_true",
        help="write rows for TensorBoard, too, in the folder (needs tensorboardX)",
    )
    add(
        "--resume",
        nargs="?",
        type=Path,
        const=None,
        metavar="DIR",
        help="continue the run in DIR, by default the latest one; --steps N gives "
        "it more steps, at the last learning rate of the schedule that it began with; "
        "--keep, --save-every, --bad-step, --spike, --health-every and --accumulate "
        "may change too, --bf16-last until its steps begin, and the devices; --data "
        "names the same data where it has moved",
    )


def add_devices(top: argparse.ArgumentParser) -> None:
    """Adds the options for devices, processes, microbatches, release and profiles."""
    add = top.add_argument_group("devices").add_argument
    add(
        "--mesh",
        metavar="AXIS=N,...",
        help=f"sizes of {', '.join(meshes.AXES)}, such as fsdp=8 or data=2,fsdp=4; "
        "all devices as fsdp if not given, and one on a CPU",
    )
    add(
        "--processes",
        metavar="N",
        help="processes that run this command; auto takes them from the environment, "
        "as jax.distributed.initialize does",
    )
    add("--process-id", type=int, metavar="I", help="of this one, 0 to N - 1")
    add("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    add("--accumulate", type=int, metavar="N", help="steps of N microbatches (1)")
    add(
        "--release",
        nargs="?",
        const="clip",
        choices=typing.get_args(Release),
        help="steps the optimizer inside the backward pass, layer by layer, so that "
        "gradients take little memory; a second backward pass finds the norm for "
        "--clip-norm (clip), or nothing is clipped (once)",
    )
    add("--profile", action="store_true", help="a few steps, into the run's folder")


def training_parser(module: str, doc: str, **options: Any) -> argparse.ArgumentParser:
    """Returns a parser with the options for the model, its training and its data.

    An option that is not given is not in the parsed namespace.
    """
    top = new_parser(module, doc, argument_default=argparse.SUPPRESS, **options)
    add_training(top)
    add = top.add_argument_group("the data").add_argument
    add(
        "--data",
        type=path_name,
        nargs="+",
        action="extend",
        metavar="PATH",
        help=".txt, .py, .jsonl, .npy or .bin files, or folders of them; Python's "
        "standard library if not given",
    )
    add("--tokenizer", choices=typing.get_args(Tokenizer), help="of text (bytes)")
    add("--vocab-size", type=int, help="of the BPE (16384), or of token files")
    add("--token-dtype", choices=typing.get_args(TokenDtype), help="(uint16)")
    add_batches(add)
    return top


def add_training(top: argparse.ArgumentParser) -> None:
    """Adds the options for the model and its training to a parser."""
    add = top.add_argument_group("the model and how it is trained").add_argument
    add("--preset", choices=PRESETS, help="shape and settings (cpu)")
    add("--lr", type=float, help="peak learning rate")
    add("--end-lr", type=float, help="last one, as a part of the peak (0.1)")
    add("--warmup-steps", type=int, help="steps to the peak, a tenth of all at most")
    add("--weight-decay", type=float)
    add("--b1", type=float)
    add("--b2", type=float)
    add("--clip-norm", type=float)
    add("--steps", type=int, help="optimizer steps of each training")
    add("--eval-every", type=int, help="steps between validations")
    add("--eval-batches", type=int, help="batches a validation")


def add_batches(add: Callable[..., Any]) -> None:
    """Adds the options for the sizes of a batch.

    `add` is the method `add_argument` of a group of options.
    """
    add("--batch-size", type=int, help="sequences a step")
    add("--seq-len", type=int, help="tokens a sequence")


def parse(argv: Sequence[str] | None = None) -> Arguments:
    """Parses a command line; exits with a message if it is invalid."""
    return parse_as(Arguments, parser(), argv, _RUNS)


def parse_as[A: Arguments](
    kind: type[A], top: argparse.ArgumentParser, argv: Sequence[str] | None, runs: Path
) -> A:
    """Parses a command line that starts or resumes a run.

    Args:
      kind: The class of the result.
      top: The parser.
      argv: The command line; None means this process's.
      runs: The folder of runs: of a new run by default, and of the latest run to
        resume.
    """
    flags = read(top, argv)
    resume = "resume" in flags
    out, resumed = flags.pop("out", None), flags.pop("resume", None)
    where = [
        flags.pop(name, None) for name in ("processes", "process_id", "coordinator")
    ]
    mesh, profile = flags.pop("mesh", None), flags.pop("profile", False)
    on_board = flags.pop("tensorboard", False)
    try:
        if resume:
            folder = _only(out, resumed) or latest(runs)
        else:
            time = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
            folder = out or runs / f"{flags.get('preset', 'cpu')}-{time}"
        return kind(
            folder=folder,
            resume=resume,
            given=flags,
            mesh=None if mesh is None else meshes.parse(mesh),
            cluster=Cluster.of(*where),
            profile=profile,
            tensorboard=on_board,
        )
    except ValueError as error:
        top.error(str(error))


def read(top: argparse.ArgumentParser, argv: Sequence[str] | None) -> dict[str, Any]:
    """Returns the options that a command line gives, by name.

    Lists become tuples, as in `Settings`.
    """
    flags = vars(top.parse_args(argv))
    return {k: tuple(v) if isinstance(v, list) else v for k, v in flags.items()}


def _only(out: Path | None, resumed: Path | None) -> Path | None:
    if out and resumed and os.path.realpath(out) != os.path.realpath(resumed):
        raise ValueError(f"--resume {resumed} writes there, not to --out {out}")
    return resumed or out


def _names(value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(","))


def path_name(value: str) -> str:
    """Returns the absolute path of a path, as a string; links are not resolved."""
    # A link keeps its name: the file that it leads to may have another suffix.
    return os.path.abspath(value)
