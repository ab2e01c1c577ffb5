"""Tests that hostile data are refused with the file's name, or read exactly."""

import contextlib
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from helpers.marks import slow

from experiments.training import data
from tests.robustness import hostile_data
from tests.robustness.hostile_inputs import INPUTS, Input

_PARTS = 8  # Inputs of a kind are neighbours, so a part has most kinds.


@pytest.mark.parametrize("part", [0, *map(slow, range(1, _PARTS))])
def test_inputs_are_refused_or_read(part, tmp_path):
    faults = {}
    for number, (label, flags) in enumerate([*INPUTS.items()][part::_PARTS]):
        folder = tmp_path / str(number)
        folder.mkdir()
        if fault := hostile_data.find_fault(flags, folder):
            faults[label] = fault
    assert not faults


def test_there_are_inputs_of_both_kinds():
    refused = [i for i in INPUTS.values() if isinstance(i.expected, str)]
    assert len(refused) >= 100
    assert len(INPUTS) - len(refused) >= 50


TOKENS = np.arange(400, dtype=np.uint16) % 251
TEXT = b"text " * 99


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (Input("a.txt", bytes(99), "another rule"), "must have the rule 'another"),
        (Input("a.txt", bytes(99), "binary", named="b.txt"), "the file's name 'b"),
        (Input("a.txt", bytes(99), bytes(99)), "must be read, got ValueError"),
        (Input("a.txt", TEXT, TEXT[::-1]), "must be read as b' txet"),
        (Input("a.txt", TEXT, TEXT[:-1]), "must be read as b'text"),
        (Input("a.txt", TEXT, TOKENS), "read as text if it is text"),
        (Input("a.bin", TOKENS.tobytes(), TOKENS[::-1]), "must be read as array"),
    ],
)
def test_a_wrong_outcome_is_found(given, fault, tmp_path):
    assert fault in hostile_data.find_fault(given, tmp_path)


def test_training_on_what_must_be_refused_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(hostile_data.pretrain, "main", lambda _: 0)
    fault = hostile_data.find_fault(Input("a.txt", TEXT, "some rule"), tmp_path)
    assert fault.startswith("it must have the exit code 2, got 0")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.bin", "a.npy", "folder"])
def test_what_may_not_be_read_is_named(name):
    with tempfile.TemporaryDirectory() as parent, contextlib.ExitStack() as stack:
        path = Path(parent, name)
        path.mkdir() if name == "folder" else path.write_bytes(TEXT)
        path.chmod(0)
        if not os.geteuid():  # The superuser may read everything.
            path.parent.chmod(0o755)
            os.seteuid(65534)
            stack.callback(os.seteuid, 0)
        with pytest.raises(PermissionError, match=name):
            data.load_corpus([path])
