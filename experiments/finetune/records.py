"""Reads records of all formats from JSON lines and Parquet files.

| format            | fields                                                        |
|-------------------|---------------------------------------------------------------|
| messages          | messages: a list of {role, content}, as in OpenAI's format    |
| question, answer  | question, answer: one turn of a conversation                  |
| Alpaca            | instruction, output, and optionally input and system          |
| prompt            | prompt, completion: text without roles, or lists of messages  |
| text              | text                                                          |
| tokens            | input_ids, and optionally labels, with -100 for no loss       |

All records of a file have one format. A record may also have a "family", and other
fields, which only a checker reads.
"""

import codecs
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.finetune.conversations import (
    ROLES,
    Conversation,
    Passage,
    Record,
    TokenRow,
    check_turns,
)
from experiments.training import files

SUFFIXES = (".jsonl", ".parquet")
_LARGEST_LINE = 2**26  # Bytes of a line; longer lines are refused.
_IGNORED = -100  # The label of a token that the loss does not count.
# Fields that are refused, because they would change what a record means.
_REFUSED = {
    "tools": "calls of tools",
    "functions": "calls of tools",
    "images": "images",
    "chosen": "preferences",
    "rejected": "preferences",
    "conversations": 'ShareGPT\'s turns; write "messages" with role and content',
}
_REFUSED_OF_MESSAGES = ("tool_calls", "function_call", "tool_call_id", "audio")


def read_records(paths: Sequence[Path]) -> list[Record]:
    """Reads the records of .jsonl and .parquet files, or of folders of them.

    Raises:
      FileNotFoundError: If there is no file at a path.
      ImportError: If a file is Parquet and pyarrow is not installed.
      ValueError: If a file is of another kind, or a line is not a record or not of the
        format of the lines before it. The error names the file and the line.
    """
    records: list[Record] = []
    for path in files.find_files(paths, SUFFIXES):
        is_parquet = path.suffix.lower() == ".parquet"
        if not is_parquet:
            files.check_texts([path])
        records += _of_file(path, _parquet_rows(path) if is_parquet else _lines(path))
    if not records:
        raise ValueError(f"there is no record in {', '.join(map(str, paths))}")
    return records


def _of_file(path: Path, rows: Iterator[tuple[str, Any]]) -> Iterator[Record]:
    """Yields the records of a file.

    Args:
      path: The path of the file.
      rows: The location and the fields of each record.

    Raises:
      ValueError: If a record is invalid, or its format is not the first record's. The
        message names the location.
    """
    first: tuple[str, str] | None = None
    for location, row in rows:
        try:
            name = _format(row)
            first = first or (name, location)
            if name != first[0]:
                raise ValueError(
                    f"the records of a file have one format, got {name} after "
                    f"{first[0]} at {first[1].rpartition(', ')[2]}"
                )
            yield _READERS[name](row, location)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{location}: {error!s:.300}") from None


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the location and the JSON value of each line that is not blank.

    Raises:
      ValueError: If a line is not JSON. The message names the line.
    """
    with files.named(path), path.open("rb") as file:
        number = 0
        while line := file.readline(_LARGEST_LINE + 1):
            number += 1
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            location = f"{path}, line {number}"
            try:
                if len(line) > _LARGEST_LINE:
                    raise ValueError(f"a line has at most {_LARGEST_LINE:,} bytes")
                if line.strip():
                    yield location, _json(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{location}: a line must be one object of JSON: {error!s:.200}"
                ) from None


def _json(line: bytes) -> Any:
    return json.loads(
        line.decode(),
        object_pairs_hook=_object,
        parse_constant=_no_number,
        parse_int=_integer,
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object from pairs of a name and a value.

    Raises:
      ValueError: If a name occurs twice.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has {twice!r:.60} more than once")
    return values


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _integer(text: str) -> int | float:
    # Python refuses integers of thousands of digits, which some files have.
    return int(text) if len(text) < 20 else float(text)


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the location and the fields of each row, without fields that are null."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ImportError(
            f"{path} is a Parquet file, and pyarrow, which reads these, is not "
            'installed; the extra "experiments" has it: pip install pyarrow'
        ) from None
    try:
        with files.named(path):
            batches = parquet.ParquetFile(path).iter_batches(batch_size=1024)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield f"{path}, row {number}", _without_nulls(row)
    except OSError as error:
        if error.errno is not None:
            raise
        raise ValueError(f"{path} is no whole Parquet file: {error!s:.200}") from None
    except importlib.import_module("pyarrow").ArrowException as error:
        raise ValueError(f"{path} is no whole Parquet file: {error!s:.200}") from None


def _without_nulls(value: Any) -> Any:
    """Returns a value without nulls, which tables contain for missing fields."""
    if isinstance(value, dict):
        return {k: _without_nulls(x) for k, x in value.items() if x is not None}
    return [_without_nulls(x) for x in value] if isinstance(value, list) else value


def _format(row: Any) -> str:
    """Returns the name of a record's format.

    Raises:
      ValueError: If the fields do not identify one format, or are not supported.
    """
    if not isinstance(row, dict):
        raise ValueError(f"a record must be an object, got {row!r:.60}")
    if refused := row.keys() & _REFUSED.keys():
        name = min(refused)
        raise ValueError(f'"{name}": fine-tuning takes no {_REFUSED[name]}')
    names = [name for name, keys in _FIELDS.items() if row.keys() >= set(keys)]
    # If a field is missing, the format's reader raises an error that names the field.
    names = names or [name for name, (key, *_) in _FIELDS.items() if key in row]
    if "text" in names[1:]:  # Alpaca's own files have the whole prompt as well.
        names.remove("text")
    if len(names) != 1:
        known = "; ".join(", ".join(keys) for keys in _FIELDS.values())
        raise ValueError(
            f"a record has the fields of one format ({known}), got {list(row)!s:.120}"
        )
    return names[0]


def _conversation(
    row: dict, location: str, messages: Any, *, prompts: int = 0
) -> Conversation:
    """Returns a record's conversation; the first `prompts` messages are not learned.

    Args:
      row: The fields of the record.
      location: The file and line of the record.
      messages: The messages, not checked yet.
      prompts: The number of messages in the prompt.

    Raises:
      ValueError: If a message is invalid, or no answer is learned.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'"messages" must be a list of some, got {messages!r:.60}')
    parts = [_message(message, number) for number, message in enumerate(messages)]
    learned = tuple(n >= prompts and weight for n, (_, _, weight) in enumerate(parts))
    roles = [role for role, _, _ in parts]
    check_turns(roles)
    if not any(w for w, r in zip(learned, roles, strict=True) if r == "assistant"):
        raise ValueError("no answer is learned: all weights are 0")
    return Conversation(
        messages=tuple((role, content) for role, content, _ in parts),
        learned=learned,
        family=_family(row),
        place=location,
        fields=row,
    )


def _message(message: Any, number: int) -> tuple[str, str, bool]:
    """Returns the role and the content of a message, and whether it is learned.

    Raises:
      ValueError: If the message, with index `number`, is invalid.
    """
    if not isinstance(message, dict):
        raise ValueError(f"message {number} must be an object, got {message!r:.60}")
    for name in _REFUSED_OF_MESSAGES:
        if message.get(name) is not None:
            raise ValueError(f'message {number} has "{name}", which is not read')
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(
            f"the role of message {number} must be {', '.join(ROLES)}, got {role!r:.60}"
        )
    weight = message.get("weight", 1)
    if type(weight) not in (int, float) or weight not in (0, 1):
        raise ValueError(f'the "weight" of a message is 0 or 1, got {weight!r:.60}')
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_part(part) for part in content)
    return role, _string({"content": content}, "content"), bool(weight)


def _text_part(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise ValueError(f"the parts of a content must be text, got {part!r:.60}")
    return _string(part, "text")


def _of_messages(row: dict, location: str) -> Record:
    return _conversation(row, location, row["messages"])


def _of_question(row: dict, location: str) -> Record:
    return _turn(row, location, _string(row, "question"), _string(row, "answer"))


def _of_alpaca(row: dict, location: str) -> Record:
    question = _string(row, "instruction")
    if row.get("input", "") != "":
        question += "\n\n" + _string(row, "input")
    return _turn(row, location, question, _string(row, "output"))


def _turn(row: dict, location: str, question: str, answer: str) -> Record:
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    if row.get("system", "") != "":
        messages = [{"role": "system", "content": _string(row, "system")}, *messages]
    return _conversation(row, location, messages)


def _of_prompt(row: dict, location: str) -> Record:
    prompt, completion = row["prompt"], row.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        messages = prompt + completion
        return _conversation(row, location, messages, prompts=len(prompt))
    return Passage(
        prompt=_string(row, "prompt"),
        completion=_string(row, "completion"),
        family=_family(row),
        place=location,
        fields=row,
    )


def _of_text(row: dict, location: str) -> Record:
    text = _string(row, "text")
    return Passage(completion=text, family=_family(row), place=location, fields=row)


def _of_tokens(row: dict, location: str) -> Record:
    tokens = _integers(row, "input_ids", least=0)
    labels = _integers(row, "labels") if "labels" in row else tokens
    if len(labels) != len(tokens):
        raise ValueError(
            f'"labels" must be as many as "input_ids", got {len(labels)} and '
            f"{len(tokens)}"
        )
    for number, (label, token) in enumerate(zip(labels, tokens, strict=True)):
        if label not in (_IGNORED, token):
            raise ValueError(
                f"labels must be {_IGNORED} or the token, got {label} for token "
                f"{number}, which is {token}"
            )
    if "attention_mask" in row and set(_integers(row, "attention_mask")) != {1}:
        raise ValueError('"attention_mask" must be 1 alone; leave padding out')
    learned = tuple(label != _IGNORED for label in labels)
    if not any(learned[1:]):
        raise ValueError("no token is learned that another comes before")
    return TokenRow(
        tokens=tokens, learned=learned, family=_family(row), place=location, fields=row
    )


def _integers(row: dict, name: str, least: int = _IGNORED) -> tuple[int, ...]:
    values = row[name]
    if not isinstance(values, list) or not values:
        raise ValueError(f'"{name}" must be a list of integers, got {values!r:.60}')
    for value in values:
        if type(value) is not int or not least <= value < 2**31:
            raise ValueError(
                f'"{name}" must be integers from {least} to 2**31 - 1, got '
                f"{value!r:.60}"
            )
    return tuple(values)


def _family(row: dict) -> str:
    return _string(row, "family") if "family" in row else "all"


def _string(record: dict, name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f'"{name}" must be a string that is not blank, got {value!r:.60}'
        )
    if "\0" in value:
        raise ValueError(f'"{name}" must have no NUL, got {value!r:.60}')
    value.encode()  # JSON may have lone surrogates, which raise an error here.
    return value


# The fields that a record of a format must have, and the function that reads it.
_FIELDS = {
    "messages": ("messages",),
    "question and answer": ("question", "answer"),
    "Alpaca": ("instruction", "output"),
    "prompt and completion": ("prompt", "completion"),
    "tokens": ("input_ids",),
    "text": ("text",),
}
_READERS: dict[str, Callable[[dict, str], Record]] = {
    "messages": _of_messages,
    "question and answer": _of_question,
    "Alpaca": _of_alpaca,
    "prompt and completion": _of_prompt,
    "tokens": _of_tokens,
    "text": _of_text,
}
