"""Tests users' records for fine-tuning: they are read, or refused with their line."""

import json
import re

import numpy as np
import pytest

from experiments.finetune.conversations import Conversation, Passage, TokenRow
from experiments.finetune.records import read_records

_GOOD = '{"messages": [{"role": "user", "content": "a"}, '
_GOOD += '{"role": "assistant", "content": "b"}]}'


def _chat(*messages) -> str:
    named = [{"role": role, "content": content} for role, content in messages]
    return json.dumps({"messages": named})


_ASKED = ("user", "q"), ("assistant", "a")
# The bytes of a second line, after a good one, and what the error says.
_REFUSED = {
    "no object": ("[1]", "must be an object, got [1]"),
    "cut off": ("{", "a line must be one object of JSON"),
    "two objects": (f"{_GOOD} {_GOOD}", "a line must be one object of JSON"),
    "single quotes": ("{'text': 'a'}", "a line must be one object of JSON"),
    "NaN": ('{"text": "a", "x": NaN}', "NaN is no number of JSON"),
    "a byte that is not UTF-8": (b'{"text": "\xff"}', "can't decode byte 0xff"),
    "UTF-16": (_GOOD.encode("utf-16-le"), "a line must be one object of JSON"),
    "a mark within a file": ("\ufeff" + _GOOD, "a line must be one object of JSON"),
    "a raw NUL": ('{"text": "a\0b"}', "a line must be one object of JSON"),
    "an escaped NUL": (_chat(("user", "a\0"), _ASKED[1]), "must have no NUL"),
    "half a letter": (
        '{"messages": [{"role": "user", "content": "\\ud800"}, '
        '{"role": "assistant", "content": "b"}]}',
        "surrogates",
    ),
    "a deep value": ("[" * 100_000, "a line must be one object of JSON"),
    "a name twice": ('{"messages": [], "messages": []}', "'messages' more than once"),
    "a role twice": (
        '{"messages": [{"role": "user", "role": "assistant", "content": "b"}]}',
        "'role' more than once",
    ),
    "another format": (
        '{"text": "a"}',
        "one format, got text after messages at line 1",
    ),
    "two formats": (
        '{"messages": [], "instruction": "a", "output": "b"}',
        "the fields of one format",
    ),
    "no format": ('{"body": "a"}', "the fields of one format"),
    "ShareGPT": ('{"conversations": [1]}', "ShareGPT's turns"),
    "tools": ('{"messages": [], "tools": [1]}', "no calls of tools"),
    "a mask of a message": (
        '{"messages": [{"role": "user", "content": "a", "loss_mask": 0}]}',
        'message 0 has "loss_mask", which is not read',
    ),
    "train of 0": (
        '{"messages": [{"role": "user", "content": "a", "train": 0}]}',
        'the "train" of a message is true or false, got 0',
    ),
    "a thinking user": (
        '{"messages": [{"role": "user", "content": "a", "thinking": "b"}]}',
        'only the assistant\'s messages have "thinking", got message 0 of the user',
    ),
    "two systems": (
        '{"system": "s", "messages": [{"role": "system", "content": "t"}]}',
        "one system message, got a field and a message",
    ),
    "two fields of systems": (
        '{"system": "s", "system_prompt": "t", ' + _GOOD[1:],
        "one system message, got ['s', 't']",
    ),
    "a record's weight of a half": (
        '{"weight": 0.5, ' + _GOOD[1:],
        'the "weight" of a record is 0 or 1, got 0.5',
    ),
    "preferences": (
        '{"prompt": "a", "chosen": "b", "rejected": "c"}',
        "no preferences",
    ),
    "no messages": ('{"messages": []}', '"messages" must be a list of some, got []'),
    "messages of text": ('{"messages": "hello"}', "must be a list of some"),
    "a message of a number": (
        '{"messages": [1]}',
        "message 0 must be an object, got 1",
    ),
    "an unknown role": (_chat(("tool", "x"), _ASKED[1]), "role of message 0 must be"),
    "a role of a list": ('{"messages": [{"role": ["user"], "content": "x"}]}', "role"),
    "no role": ('{"messages": [{"content": "x"}]}', "role of message 0"),
    "no content": ('{"messages": [{"role": "user"}]}', "not blank, got None"),
    "a content of a number": (_chat(("user", 3), _ASKED[1]), "not blank, got 3"),
    "a blank content": (_chat(("user", " \n"), _ASKED[1]), "not blank"),
    "an empty answer": (
        _chat(_ASKED[0], ("assistant", "")),
        '"content of message 1" must be',
    ),
    "an image": (
        '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        "parts of a content must be text",
    ),
    "a tool's call": (
        '{"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]}',
        'has "tool_calls"',
    ),
    "a weight of 2": (
        '{"messages": [{"role": "user", "content": "a", "weight": 2}]}',
        'the "weight" of a message is 0 or 1, got 2',
    ),
    "all weights 0": (
        '{"messages": [{"role": "user", "content": "a"}, {"role": '
        '"assistant", "content": "b", "weight": 0}]}',
        "no answer is",
    ),
    "a question alone": (_chat(_ASKED[0]), "the last message must be the assistant's"),
    "an answer first": (_chat(_ASKED[1]), "number 0 must be the user's"),
    "two users": (_chat(_ASKED[0], *_ASKED), "number 1 must be the assistant's"),
    "two answers": (_chat(*_ASKED, _ASKED[1]), "number 2 must be the user's"),
    "a late system": (_chat(*_ASKED, ("system", "s")), "number 2 must be the user's"),
    "a system alone": (_chat(("system", "s")), "must be the assistant's, got 'system'"),
}
# The content of a whole file and what the error says.
_FILES = {
    "Alpaca without output": (b'{"instruction": "a"}', 'line 1: "output" must be'),
    "Alpaca with a number": (
        b'{"instruction": "a", "input": 3, "output": "b"}',
        'line 1: "input" must be a string',
    ),
    "a prompt alone": (b'{"prompt": "a"}', 'line 1: "completion" must be'),
    "a question alone": (b'{"question": "a"}', 'line 1: "answer" must be'),
    "a text of a list": (b'{"text": ["a"]}', 'line 1: "text" must be'),
    "no tokens": (b'{"input_ids": []}', 'line 1: "input_ids" must be a list'),
    "tokens of texts": (b'{"input_ids": ["a"]}', 'line 1: "input_ids" must be integ'),
    "a token below 0": (b'{"input_ids": [1, -1]}', "from 0 to 2**31 - 1, got -1"),
    "tokens of halves": (b'{"input_ids": [1.5, 2]}', "got 1.5"),
    "tokens of truths": (b'{"input_ids": [true, 2]}', "got True"),
    "short labels": (b'{"input_ids": [1, 2], "labels": [1]}', "got 1 and 2"),
    "other labels": (b'{"input_ids": [1, 2], "labels": [1, 3]}', "got 3 for token 1"),
    "no labels": (b'{"input_ids": [1, 2], "labels": [1, -100]}', "no token is learned"),
    "a short mask": (
        b'{"input_ids": [1, 2], "completion_mask": [1]}',
        '"completion_mask" must be as many as "input_ids", got 1 and 2',
    ),
    "a mask of 2": (
        b'{"input_ids": [1, 2], "assistant_masks": [1, 2]}',
        '"assistant_masks" must be 0 and 1, got 2',
    ),
    "packed positions": (
        b'{"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}',
        '"position_ids" must grow by 1, got 0 after 1; packed sequences are',
    ),
    "packed lengths": (
        b'{"input_ids": [1, 2], "seq_lengths": [1, 1]}',
        "no packed sequences",
    ),
    "a passage": (
        b'{"instruction": "a", "context": "b", "output": "c"}',
        '"context": fine-tuning takes no passage; write it into the question',
    ),
    "a history of strings": (
        b'{"instruction": "a", "history": ["b"], "output": "c"}',
        '"history" must be a list of pairs of question and answer',
    ),
    "a system without roles": (
        b'{"system": "s", "prompt": "a", "completion": "b"}',
        '"system": fine-tuning takes no system message without roles',
    ),
    "a liked completion": (
        b'{"prompt": "a", "completion": "b", "label": false}',
        '"label": fine-tuning takes no preferences',
    ),
    "weights of 0 alone": (b'{"text": "a", "weight": 0}', "there is no record in"),
    "padding": (
        b'{"input_ids": [1, 2], "attention_mask": [1, 0]}',
        "leave padding out",
    ),
    "nothing": (b"\n \n", "there is no record in"),
    "a NUL byte": (b'{"text": "a\0b"}', "its content is binary"),
    "gzip": (b"\x1f\x8b\x08 {", "its content is gzip"),
    "an array": (b'[\n{"text": "a"}\n]', "line 1: a line must be one object of JSON"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_a_bad_line_is_named(tmp_path, case):
    line, message = _REFUSED[case]
    path = tmp_path / "data.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(_GOOD.encode() + b"\n" + line)
    if line.count(b"\0") and b"\0" in path.read_bytes()[:8192]:
        with pytest.raises(ValueError, match=f"{path} must be text"):
            read_records([path])
        # Only a file's start is searched for bytes of NUL.
        path.write_bytes(_GOOD.encode() + b" " * 9000 + b"\n" + line)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_records([path])
    assert str(error.value).startswith(f"{path}, line 2: ")
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("case", _FILES)
def test_a_bad_file_is_named(tmp_path, case):
    content, message = _FILES[case]
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_records([path])
    assert str(path) in str(error.value)


def test_a_huge_line_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.finetune.records._LARGEST_LINE", 200)
    path = tmp_path / "data.jsonl"
    path.write_text(f"{_GOOD}\n" + json.dumps({"text": "a" * 200}))
    with pytest.raises(ValueError, match=r"line 2: .* at most 200 bytes"):
        read_records([path])


def test_files_of_another_kind_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(
        ValueError, match=r"must be \.jsonl, \.parquet files, got .*a\.t"
    ):
        read_records([tmp_path / "a.txt"])
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        read_records([tmp_path / "b.jsonl"])


_MESSAGES = ("system", "s"), ("user", "q é"), ("assistant", "a")
_ROWS = {
    "messages": {
        "messages": [{"role": role, "content": text} for role, text in _MESSAGES],
        "family": "sums",
    },
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": "a", "weight": 0},
            {"role": "user", "content": "q", "name": "x"},
            {"role": "assistant", "content": "a"},
        ]
    },
    "question": {"question": "q", "answer": "a #### 7"},
    "alpaca": {"instruction": "i", "input": "x", "output": "a", "text": "all of it"},
    "alpaca without input": {"instruction": "i", "input": "", "output": "a"},
    "prompt": {"prompt": "p ", "completion": "c"},
    "prompt of messages": {
        "prompt": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "q"},
        ],
        "completion": [{"role": "assistant", "content": "b"}],
    },
    "text": {"text": "<|im_start|>assistant\nforged"},
    "tokens": {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "id": 10**30},
}


def _checked(case, record):
    if case == "messages":
        assert record.messages == _MESSAGES
        assert record.family == "sums"
    elif case == "parts":
        assert record.messages == _ASKED * 2
        assert [record.is_learned(n) for n in range(4)] == [False, False, False, True]
    elif case == "question":
        assert (record.question, record.answer) == ("q", "7")
    elif case.startswith("alpaca"):
        question = "i" if "without" in case else "i\n\nx"
        assert record.messages == (("user", question), ("assistant", "a"))
    elif case == "prompt":
        assert isinstance(record, Passage)
        assert (record.prompt, record.completion) == ("p ", "c")
    elif case == "prompt of messages":
        assert [record.is_learned(n) for n in range(4)] == [False, False, False, True]
    elif case == "text":
        assert (record.prompt, record.completion) == ("", _ROWS["text"]["text"])
    else:
        assert isinstance(record, TokenRow)
        assert record.tokens == (5, 6, 7)
        assert record.learned == (False, True, True)


@pytest.mark.parametrize("case", _ROWS)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_lines_are_read(tmp_path, case, mark):
    path = tmp_path / "data.jsonl"
    line = json.dumps(_ROWS[case]).encode()
    path.write_bytes(mark + line + b"\r\n\n" + line)
    first, second = read_records([tmp_path])
    for record, number in ((first, 1), (second, 3)):
        _checked(case, record)
        assert record.place == f"{path}, line {number}"
        assert isinstance(record, Conversation | Passage | TokenRow)


@pytest.mark.parametrize("case", [case for case in _ROWS if case != "parts"])
def test_rows_of_parquet_are_read(tmp_path, case):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    row = {k: v for k, v in _ROWS[case].items() if k != "id"}
    parquet.write_table(pyarrow.Table.from_pylist([row, row]), path)
    records = read_records([path])
    assert [record.place for record in records] == [f"{path}, row {n}" for n in (1, 2)]
    for record in records:
        _checked(case, record)


def test_bad_rows_of_parquet_are_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    table = pyarrow.Table.from_pylist([{"text": "a"}, {"text": None}])
    parquet.write_table(table, path)
    with pytest.raises(
        ValueError, match=r"data.parquet, row 2: a record has the fields"
    ):
        read_records([path])
    whole = path.read_bytes()
    for damaged in (b"PAR1PAR1", whole[:-20], whole[:40] + whole[60:], b"text"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"data.parquet is no whole Parquet file"):
            read_records([path])


def test_parquet_without_pyarrow_names_it(tmp_path, monkeypatch):
    path = tmp_path / "data.parquet"
    path.write_bytes(b"PAR1PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(
        ImportError, match="pyarrow, which reads these, is not installed"
    ):
        read_records([path])


def test_splits_have_equal_records_on_one_side():
    from experiments.finetune.splits import split

    records = [
        Passage(completion=f"text {n % 150}", place=f"line {n}") for n in range(300)
    ]
    train, test = split(records)
    assert len(train) + len(test) == 300
    assert 0 < len(test) < 60
    said = [{record.completion for record in part} for part in (train, test)]
    assert said[0].isdisjoint(said[1])
    with pytest.raises(ValueError, match="all 2 records are alike"):
        split([Passage(completion="a"), Passage(completion="a", place="other")])
    assert np.array_equal(
        [r.completion for r in split(records)[1]], [r.completion for r in test]
    )
