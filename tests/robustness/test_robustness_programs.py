"""Tests short forms of the programs that try to break the main job."""

import json
import shutil
import signal
import subprocess
import sys

import pytest

from tests.robustness import crash_points, damages, faults, full_disk, kills, trials

needs_compiler = pytest.mark.skipif(
    not shutil.which("cc"), reason="faults.c is compiled with cc"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return faults.build(tmp_path_factory.mktemp("library"))


def _python(script, root, library, **arguments):
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import os\n{script}"],
        cwd=root,
        env=faults.environment(library, root, **arguments),
        capture_output=True,
        text=True,
    )


_WRITE = """
def write(name, text):
    file = os.open(name, os.O_WRONLY | os.O_CREAT)
    while text:
        text = text[os.write(file, text):]
"""


@needs_compiler
def test_a_process_dies_in_the_chosen_call_with_half_a_write(library, tmp_path):
    root, log = tmp_path / "root", tmp_path / "log"
    root.mkdir()
    script = f"{_WRITE}\nwrite('a', b'12345678')\nos.rename('a', 'b')\nos.mkdir('c')"
    script += f"\nwrite('{tmp_path}/outside', b'x')\nos.unlink('b')\nos.rmdir('c')"
    finished = _python(script, root, library, log=log)
    assert finished.returncode == 0, finished.stderr
    expected = [("open", 0), ("write", 8), ("rename", 0), ("mkdir", 0)]
    calls = faults.logged(log)
    assert list(calls) == list(range(1, len(calls) + 1))
    assert list(calls.values()) == [*expected, ("unlink", 0), ("rmdir", 0)]
    assert (tmp_path / "outside").read_text() == "x"
    left = []
    for call in range(1, 8):
        shutil.rmtree(root)
        root.mkdir()
        finished = _python(script, root, library, kill=call)
        assert finished.returncode == (-signal.SIGKILL if call < 7 else 0)
        left.append({p.name: p.stat().st_size for p in root.iterdir() if p.is_file()})
    assert left == [{}, {"a": 4}, {"a": 8}, {"b": 8}, {"b": 8}, {}, {}]


@needs_compiler
def test_a_disk_is_full_or_read_only(library, tmp_path):
    root, switch = tmp_path / "root", tmp_path / "switch"
    root.mkdir()
    script = f"{_WRITE}\nwrite('{tmp_path}/outside', b'12345')\nwrite('a', b'12345678')"
    finished = _python(script, root, library, bytes_=5)
    assert "No space left on device" in finished.stderr
    assert (root / "a").read_text() == "12345"
    assert (tmp_path / "outside").exists()
    finished = _python(f"{_WRITE}\nwrite('b', b'1')", root, library, bytes_=0)
    assert "No space left on device" in finished.stderr
    script = f"{_WRITE}\nwrite('c', b'1')\nwrite('{switch}', b'2')\nwrite('d', b'')"
    finished = _python(script, root, library, switch=switch)
    assert "Read-only file system" in finished.stderr
    assert sorted(path.name for path in root.iterdir()) == ["a", "c"]


@pytest.mark.slow
@needs_compiler
def test_killed_saves_give_the_state_before_or_after(tmp_path):
    out = tmp_path / "results.json"
    assert crash_points.main(["--count=8", "--resumes=0", f"--out={out}"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["in"] for row in rows] == ["first save"] * 8 + ["replacing save"] * 8
    assert all(row["of"] > 60 for row in rows)
    # The first call precedes the commit. The last one follows it in nearly all saves:
    # threads make the calls, in an order that is not always the same.
    assert rows[0]["loaded_step"] == 0
    assert rows[8]["loaded_step"] == 4
    assert {row["loaded_step"] for row in rows[:8]} <= {0, 2}
    assert {row["loaded_step"] for row in rows[8:]} <= {4, 6}


@pytest.mark.slow
def test_signals_change_no_bit(tmp_path):
    out = tmp_path / "results.json"
    assert kills.main(["--count=2", f"--out={out}"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["holds"] for row in rows] == [True, True]
    assert all(row["kills"] for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_trainers")
def test_damages_are_noticed(tmp_path):
    out = tmp_path / "results.json"
    assert damages.main(["--count=16", f"--out={out}"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len({row["of"] for row in rows}) == 8
    assert {row["found"] for row in rows} == {
        "refused",
        "older checkpoint",
        "no effect",
    }
    assert str(tmp_path.parent) not in out.read_text()


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    with trials.scratch() as folder:
        yield full_disk.Setup.of(folder)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("kind", ["full", "renamed"])
def test_a_run_without_its_disk_ends_in_one_line(kind, setup):
    at = {"full": setup.budgets(3)[1], "renamed": 4}[kind]
    row = full_disk.trial(setup, kind, at)
    assert row["wrong"] is None
    assert row["said"].startswith("error: [Errno ")
