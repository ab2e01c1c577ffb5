"""Damages the files of a finished run in turns, and resumes it each time.

    uv run python -m tests.robustness.damages

A bit of a file is flipped, its end is cut off, or it is deleted. A resumed run that
notices the damage must print one line that names the file. It must then stop, or go on
from an older checkpoint and end with the undisturbed bits. A damage that the run does
not notice must have no effect on rows and states, for a reason that the results name.
"""

import collections
import dataclasses
import json
import random
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tests.robustness import trials

Row = dict[str, Any]
_GIVEN = (*trials.SMALL, "--recipes", "coat", "--tokenizer", "bpe")
_GIVEN += ("--vocab-size", "300")
_NEWEST, _OLDEST = "checkpoints/coat/12", "checkpoints/coat/9"
_LIST = "checkpoints/checksums/coat/{}.json"
# Kinds of damages, and how often they are drawn.
_KINDS = {"flip": 6, "cut": 3, "deletion": 1}
_WRITTEN_ANEW = ("summary.json", "loss.png", "moments.png")
_NOTICED = ("refused", "older checkpoint")


@dataclasses.dataclass(frozen=True)
class Damage:
    """A damage of one file.

    Attributes:
      kind: "flip", "cut" or "deletion".
      file: The path of the file in the run's folder.
      place: The number of the flipped bit, or the length that a cut leaves.
    """

    kind: str
    file: str
    place: int | None

    @classmethod
    def draw(cls, folder: Path, files: Sequence[str], rng: random.Random) -> "Damage":
        """Draws a damage of one of `files`; an empty file can only be deleted."""
        file = rng.choice(files)
        size = (folder / file).stat().st_size
        (kind,) = rng.choices(list(_KINDS), list(_KINDS.values()))
        kind = kind if size else "deletion"
        places = {"flip": 8 * size, "cut": size}
        return cls(kind, file, rng.randrange(places[kind]) if kind in places else None)

    def do(self, folder: Path) -> None:
        """Damages the file in a run's folder."""
        path = folder / self.file
        if self.kind == "deletion":
            path.unlink()
            return
        content = bytearray(path.read_bytes())
        if self.kind == "cut":
            del content[self.place :]
        else:
            content[self.place // 8] ^= 1 << self.place % 8
        path.write_bytes(content)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, this process's by default; returns an exit code."""
    top = trials.new_program("damages", __doc__)
    top.add_argument("--count", type=int, default=300, help="damages (300)")
    args = top.parse_args(argv)
    with trials.scratch() as folder:
        rows = list(damage(folder, args.count, random.Random(args.seed)))
    actual = collections.Counter(row["found"] for row in rows)
    noticed = sum(actual[name] for name in _NOTICED)
    harmless = actual["no effect"]
    counts = {
        "noticed, or without effect": (noticed + harmless, len(rows)),
        "noticed in one line that names the file": (noticed, len(rows) - harmless),
        "without a traceback": (len(rows) - actual["traceback"], len(rows)),
    }
    return trials.conclude(rows, counts, args.out, "Damages of a finished run")


def damage(scratch: Path, count: int, rng: random.Random) -> Iterator[Row]:
    """Damages copies of a finished run and yields a row for each."""
    finished, copy = scratch / "finished", scratch / "damaged"
    data = "--data", trials.write_corpus(scratch)
    if (ended := trials.call(*_GIVEN, *data, "--out", finished)).code:
        raise RuntimeError(ended.said)
    expected = trials.outcome(finished)
    groups = list(file_groups(finished).items())
    for number in tqdm(range(count), unit="damage"):
        group, files = groups[number % len(groups)]
        shutil.copytree(finished, copy)
        if group == "the only checkpoint":
            shutil.rmtree(copy / _NEWEST)
            (copy / _LIST.format(12)).unlink()
        drawn = Damage.draw(copy, files, rng)
        drawn.do(copy)
        actual, why = consequence(finished, copy, drawn, expected)
        yield {"of": group, **dataclasses.asdict(drawn), "found": actual, "why": why}
        shutil.rmtree(copy)


def file_groups(folder: Path) -> dict[str, list[str]]:
    """Returns groups of a finished run's files, by name; they are damaged in turns."""
    files = sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    )
    groups = {name: [name] for name in ("run.json", "tokenizer.json")}
    groups |= {name: [name] for name in ("metrics.jsonl", "moments.jsonl")}
    groups["the newest checkpoint"] = [f for f in files if f.startswith(_NEWEST)]
    only = [f for f in files if f.startswith(_OLDEST)]
    groups["the only checkpoint"] = [*only, _LIST.format(9)]
    groups["the newest list"] = [_LIST.format(12)]
    recorded = {file for group in groups.values() for file in group}
    groups["the rest"] = [file for file in files if file not in recorded]
    return groups


def consequence(
    complete: Path, damaged: Path, drawn: Damage, expected: trials.Outcome
) -> tuple[str, str | None]:
    """Resumes a damaged run and returns what came of the damage.

    Returns:
      One of "refused", "older checkpoint", "no effect", "silent" and "traceback", and
      the line of output, the reason, or the failure.
    """
    same_value = _same_json(complete / drawn.file, damaged / drawn.file)
    try:
        ended = trials.call("--resume", damaged)
    except Exception:
        return "traceback", traceback.format_exc(limit=-1).replace(str(damaged), "RUN")
    lines = [x for x in ended.said.splitlines() if str(damaged / drawn.file) in x]
    line = lines[0].replace(str(damaged), "RUN") if lines else None
    if ended.code == 2 and ended.in_one_line() and lines:
        return "refused", line
    if ended.code:
        return "silent", ended.said.replace(str(damaged), "RUN")
    if field := trials.outcome(damaged).difference(expected):
        return "silent", f"{field} differ; {line}"
    if lines:
        return "older checkpoint", line
    return _reason(drawn, same_value)


def _reason(drawn: Damage, same_value: bool) -> tuple[str, str | None]:
    """Judges a damage that left the results of a resumed run as they were.

    Returns:
      "no effect" and the reason, or "silent" and None if there is no known reason.
    """
    if drawn.file in _WRITTEN_ANEW:
        return "no effect", "every end of a run writes the file anew"
    if drawn.file == "lock":
        return "no effect", "the file is empty, and made anew"
    if same_value:
        return "no effect", "the file has the same JSON value"
    if drawn.kind == "deletion" and "checksums" in drawn.file:
        return "no effect", "the checkpoint is whole, and was saved so"
    return "silent", None


def _same_json(one: Path, other: Path) -> bool:
    """Returns whether two files hold one JSON value."""
    try:
        return json.loads(one.read_text()) == json.loads(other.read_text())
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    sys.exit(main())
