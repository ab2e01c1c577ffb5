"""Tests fields of records for fine-tuning that change what a record means."""

import json

import pytest

from experiments.finetune.records import read_records

_ASKED = ("user", "q"), ("assistant", "a")
_SYSTEM, _TURN = ("system", "s"), {"question": "q", "answer": "a"}
_Q, _A = ({"role": role, "content": content} for role, content in _ASKED)


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [_Q, _A], "system": "s"}, (_SYSTEM, *_ASKED)),
        (
            {"messages": [{"role": "system", "content": "s"}, _Q, _A]}
            | {"system": "s", "system_prompt": ""},
            (_SYSTEM, *_ASKED),
        ),
        (
            _TURN | {"system_prompt": [{"type": "text", "text": "s"}]},
            (_SYSTEM, *_ASKED),
        ),
        ({"prompt": [_Q], "completion": [_A]} | {"system": "s"}, (_SYSTEM, *_ASKED)),
        (
            {"instruction": "i", "output": "o", "history": [["q", "a"]]},
            (*_ASKED, ("user", "i"), ("assistant", "o")),
        ),
        (
            {"instruction": "q", "output": "a", "input": None, "history": []}
            | {"system": None, "context": None, "tools": [], "images": None},
            _ASKED,
        ),
        (
            {"messages": [_Q | {"tool_calls": [], "weight": None}, _A]}
            | {"prompt": None, "completion": None},
            _ASKED,
        ),
    ],
)
def test_systems_histories_and_nulls_are_read(tmp_path, capsys, row, messages):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(row))
    (record,) = read_records([path])
    assert record.messages == messages
    assert [record.is_learned(n) for n in range(len(record.messages))] == [
        role == "assistant" for role, _ in record.messages
    ]
    assert record.fields == row
    assert not capsys.readouterr().out


def test_exclusions_from_the_loss_are_read(tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    turns = [_Q, _A, _Q, _A]
    turns[1] = turns[1] | {"train": False, "mood": "x", "name": "y"}
    rows = [{"messages": turns, "id": 1, "note": "x"}]
    rows += [{"messages": turns, "weight": 0}, {"messages": turns, "weight": 1}]
    path.write_text("\n".join(map(json.dumps, rows)))
    records = read_records([path])
    assert [record.place for record in records] == [f"{path}, line {n}" for n in (1, 3)]
    for record in records:
        assert [record.is_learned(n) for n in range(4)] == [False, False, False, True]
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: records of weight 0, which are left out: 1",
        f"{path}: only a checker reads the fields 'messages.mood', 'note'",
    ]
    masks = {"completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 1, 0, 1]}
    row = {"input_ids": [5, 6, 7, 8], "position_ids": [3, 4, 5, 6]} | masks
    path.write_text(json.dumps(row | {"labels": [5, 6, 7, 8]}))
    assert read_records([path])[0].learned == (False, True, False, True)
