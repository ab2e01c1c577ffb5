"""Tests of the main job with damaged files, wrong usage and a full disk."""

import collections
import json
import os
import random
import shutil
import subprocess
import sys
import zlib

import pytest
from helpers.main_job import rows_of

from experiments.pretrain import program as pretrain
from experiments.training import checkpoints, runs, text
from experiments.training.settings import PRESETS

_RUN = ["--preset", "tiny", "--recipes", "bf16", "--steps", "6", "--save-every", "2"]
_RUN += ["--eval-every", "6", "--eval-batches", "1"]
_LOGS = ("metrics.jsonl", "moments.jsonl")

pytestmark = pytest.mark.usefixtures("shared_trainers")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "ok.txt"
    path.write_bytes(b"".join(b"hello world %d, how are you? " % i for i in range(900)))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus, shared_trainers):
    """Returns the folder of a run with checkpoints of steps 4 and 6."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert pretrain.main([*_RUN, "--data", str(corpus), "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def fp8_finished(tmp_path_factory, corpus, shared_trainers):
    """Returns the folder of a run with FP8 moments and checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("runs") / "fp8"
    flags = [*_RUN, "--recipes", "coat", "--steps", "4", "--eval-every", "2"]
    assert pretrain.main([*flags, "--data", str(corpus), "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def _losses(folder):
    return [row["loss"] for row in rows_of(folder)]


def _refusal(capsys, *argv):
    """Checks that a command is refused in one line, and returns the line."""
    try:
        code = pretrain.main(list(map(str, argv)))
    except SystemExit as stop:
        code = stop.code
    output = capsys.readouterr().err
    assert code == 2, output
    assert output.count("\n") == 1, output
    return output


def test_a_run_goes_on_from_the_older_of_two_checkpoints(finished, copied, capsys):
    steps = sorted(p.name for p in (copied / "checkpoints" / "bf16").iterdir())
    assert steps == ["4", "6"]
    largest = max(
        (copied / "checkpoints" / "bf16" / "6").rglob("d/*"),
        key=lambda path: path.stat().st_size,
    )
    os.truncate(largest, largest.stat().st_size // 2)
    assert pretrain.main(["--resume", str(copied)]) == 0
    output = capsys.readouterr().out
    assert f"{largest} is damaged; going on from step 4 instead" in output
    assert _losses(copied) == _losses(finished)
    assert len(list((copied / "checkpoints" / "damaged").iterdir())) == 1


def test_every_flipped_bit_is_noticed(copied, capsys):
    folder, rng = copied / "checkpoints" / "bf16", random.Random(0)
    shutil.rmtree(folder / "4")
    files = [path for path in (folder / "6").rglob("*") if path.is_file()]
    sizes = [path.stat().st_size for path in files]
    for _ in range(30):
        (path,) = rng.choices(files, sizes)
        complete = path.read_bytes()
        changed = bytearray(complete)
        changed[rng.randrange(len(complete))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        output = _refusal(capsys, "--resume", copied)
        assert f"no checkpoint is whole: {path} is damaged" in output
        path.write_bytes(complete)
    assert pretrain.main(["--resume", str(copied)]) == 0


@pytest.mark.parametrize("damage", ["deleted", "empty", "line lost", "line twice"])
def test_lost_and_doubled_rows_are_noticed(damage, copied, capsys):
    path = copied / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    if damage == "deleted":
        path.unlink()
    else:
        saved = {"empty": [], "line lost": lines[::2], "line twice": lines[:1] + lines}
        path.write_text("".join(saved[damage]))
    assert "metrics.jsonl is damaged: bf16 has" in _refusal(capsys, "--resume", copied)


@pytest.mark.parametrize("name", ["metrics.jsonl", "moments.jsonl"])
def test_a_changed_digit_of_a_row_is_noticed(name, fp8_finished, tmp_path, capsys):
    copied = shutil.copytree(fp8_finished, tmp_path / "run")
    path = copied / name
    line = path.read_bytes().splitlines(keepends=True)[1]
    at = path.read_bytes().index(line) + line.rindex(b".") + 2
    changed = bytearray(path.read_bytes())
    changed[at] ^= 1  # One digit becomes another.
    assert len(json.loads(bytes(changed).splitlines()[1])) == len(json.loads(line))
    path.write_bytes(changed)
    output = _refusal(capsys, "--resume", copied)
    assert f"{path} is damaged: coat's rows up to step 4 are not" in output


def test_rows_after_the_checkpoint_are_dropped_whatever_they_hold(
    fp8_finished, tmp_path, capsys
):
    copied = shutil.copytree(fp8_finished, tmp_path / "run")
    rows = {name: (copied / name).read_bytes() for name in _LOGS}
    for name in _LOGS:
        with (copied / name).open("a") as file:
            file.write('{"recipe": "coat", "step": 5, "loss": 3.0}\n{"recipe": "co')
    assert pretrain.main(["--resume", str(copied)]) == 0
    assert {name: (copied / name).read_bytes() for name in _LOGS} == rows


@pytest.mark.parametrize("name", ["metrics.jsonl", "moments.jsonl"])
def test_a_line_that_is_no_row_is_named(name, fp8_finished, tmp_path, capsys):
    copied = shutil.copytree(fp8_finished, tmp_path / "run")
    path = copied / name
    lines = path.read_bytes().splitlines(keepends=True)
    for wrong in (b"\xff\n", b"3\n", b"{}\n", b'{"recipe": 1, "step": 1}\n', b"\n"):
        path.write_bytes(b"".join([lines[0], wrong, *lines[2:]]))
        assert f"{path} is damaged: line 2 is no row" in _refusal(
            capsys, "--resume", copied
        )


def _without_checksums(folder):
    """Changes a run's folder to the form that it had before all files had checksums."""
    record = json.loads((folder / "run.json").read_text())
    del record["checksum"], record["files"]
    (folder / "run.json").write_text(json.dumps(record))
    for listed in (folder / "checkpoints" / "checksums").rglob("*.json"):
        step = listed.relative_to(folder / "checkpoints" / "checksums").with_suffix("")
        progress = folder / "checkpoints" / step / "progress" / "metadata"
        content = json.loads(progress.read_text())
        del content["rows"]
        progress.write_text(json.dumps(content))
        files = json.loads(listed.read_text())["files"]
        files["progress/metadata"] = zlib.crc32(progress.read_bytes())
        listed.write_text(json.dumps(files))


def test_folders_without_checksums_go_on(fp8_finished, tmp_path, capsys):
    copied = shutil.copytree(fp8_finished, tmp_path / "run")
    _without_checksums(copied)
    shutil.rmtree(copied / "checkpoints" / "coat" / "4")
    assert pretrain.main(["--resume", str(copied)]) == 0
    for name in _LOGS:
        assert (copied / name).read_bytes() == (fp8_finished / name).read_bytes()
    # The new checkpoint has checksums of all rows, also of those before it.
    rows = (copied / "metrics.jsonl").read_text()
    (copied / "metrics.jsonl").write_text(rows.replace('"loss": 5', '"loss": 4', 1))
    capsys.readouterr()
    assert "coat's rows up to step 4 are not" in _refusal(capsys, "--resume", copied)


def test_a_changed_record_is_refused_unless_it_is_meant(copied, capsys):
    path = copied / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record))  # Other spaces are no change.
    assert pretrain.main(["--resume", str(copied)]) == 0
    record["settings"]["lr"] *= 2
    path.write_text(json.dumps(record))
    output = _refusal(capsys, "--resume", copied)
    assert f"{path} is damaged: it does not have its checksum" in output
    del record["checksum"]
    path.write_text(json.dumps(record))
    assert pretrain.main(["--resume", str(copied)]) == 0
    record["checksun"] = 0
    path.write_text(json.dumps(record))
    assert "entries are not those of a run" in _refusal(capsys, "--resume", copied)


@pytest.mark.parametrize("record", ["", "{", "[]", '{"settings": {}}', "null"])
def test_a_damaged_record_is_named(record, copied, capsys):
    (copied / "run.json").write_text(record)
    assert "run.json is damaged" in _refusal(capsys, "--resume", copied)


@pytest.mark.slow
def test_one_of_two_processes_is_refused(tmp_path, corpus):
    command = [sys.executable, "-m", "experiments.pretrain", *_RUN]
    command += ["--data", str(corpus), "--out", str(tmp_path / "run")]
    both = [
        subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        for _ in range(2)
    ]
    output = [process.communicate()[1].decode() for process in both]
    codes = collections.Counter(process.returncode for process in both)
    assert codes == {0: 1, 2: 1}
    assert any(
        "another process writes to" in text or "new or an empty folder" in text
        for text in output
    )
    assert len(_losses(tmp_path / "run")) == 6


def test_a_run_whose_folder_is_moved_makes_no_new_one(tmp_path):
    settings = PRESETS["tiny"].settings
    run = runs.Run.create(tmp_path / "run", settings, "data")
    run.folder.rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="run/checkpoints"):
        run.checkpoints("bf16")
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


def test_a_full_disk_is_one_line(tmp_path, corpus, monkeypatch, capsys):
    usage = collections.namedtuple("usage", "free")
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: usage(free=1000))
    out = tmp_path / "run"
    assert pretrain.main([*_RUN, "--data", str(corpus), "--out", str(out)]) == 1
    output = capsys.readouterr().out
    assert "error: [Errno 28] a checkpoint takes" in output
    assert f"--resume {out}" in output
    monkeypatch.undo()
    assert pretrain.main(["--resume", str(out)]) == 0


def test_a_refused_start_leaves_the_folder_as_it_was(tmp_path, corpus, capsys):
    out = tmp_path / "run"
    bpe = [*_RUN, "--data", str(corpus), "--tokenizer", "bpe", "--vocab-size", "300"]
    bpe += ["--out", str(out)]
    _refusal(capsys, *bpe, "--seq-len", 10**6)
    assert not out.exists()
    # A start that was killed may leave these.
    out.mkdir()
    (out / "lock").touch()
    (out / "tokenizer.json").write_text("{")
    (out / "run.json.partial").write_text("{")
    assert pretrain.main(bpe) == 0
    assert pretrain.main(["--resume", str(out)]) == 0
    tokenizer = out / "tokenizer.json"
    complete = tokenizer.read_text()
    tokenizer.write_text(complete.replace("e", "f", 1))
    capsys.readouterr()
    assert f"{tokenizer} is damaged" in _refusal(capsys, "--resume", out)
    # A folder of before there were checksums has none of the tokenizer.
    record = json.loads((out / "run.json").read_text())
    del record["checksum"], record["files"]
    (out / "run.json").write_text(json.dumps(record))
    tokenizer.write_text(complete[:-9])
    assert f"{tokenizer} is no tokenizer" in _refusal(capsys, "--resume", out)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seed", 2**31], "seed must be below 2**31, got 2147483648"),
        (["--lr", "inf"], "lr must be finite, got inf"),
        (["--lr", "nan"], "lr must be positive, got nan"),
        (["--vocab-size", 5], "bytes have a vocabulary of 257, got 5"),
        (
            ["--tokenizer", "bpe", "--vocab-size", 256],
            "a BPE has 257 tokens or more, for all bytes and the separator, got a",
        ),
        (
            ["--recipes", "bf16,coat", "--b2", "0.1"],
            "coat's optimizer: b2 must be at least 0.2 with normalize_mu=True, got 0.1",
        ),
        (
            ["--token-dtype", "uint32"],
            "token_dtype='uint32' takes token files, got text",
        ),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (
            ["--recipe", "bf16,fp8"],
            "recipes are bf16, te, coat, coat_max, coat_block, coat_bf16; got 'fp8'",
        ),
        (["--preset", "huge"], "invalid choice: 'huge'"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_usage_errors_are_one_line(flags, message, tmp_path, corpus, capsys):
    out = tmp_path / "run"
    output = _refusal(capsys, *_RUN, "--data", corpus, "--out", out, *flags)
    assert message in output
    assert not out.exists()


def test_text_does_not_forge_the_separator(tmp_path):
    documents = [b"hello world, how are you? " * 50] * 20
    encode = text.bpe_encoder(documents, 300, tmp_path / "tokenizer.json")
    separator = encode([b""])[-1]
    actual = encode([b"evil <|document|> text <|document|>"])
    assert (actual == separator).sum() == 1
