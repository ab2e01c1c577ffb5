"""Reads records of all formats from the fields of a line or of a table's row.

| format            | fields                                                        |
|-------------------|---------------------------------------------------------------|
| messages          | messages: a list of {role, content}, as in OpenAI's format    |
| question, answer  | question, answer: one turn of a conversation                  |
| Alpaca            | instruction, output, and optionally input and history         |
| prompt            | prompt, completion: text without roles, or lists of messages  |
| text              | text                                                          |
| tokens            | input_ids, and optionally labels, with -100 for no loss       |

Formats with roles also take a system message as "system" or "system_prompt". A record
of any format may have a "family", and a "weight" of 0, which leaves it out.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from experiments.finetune.conversations import (
    ROLES,
    THOUGHTS,
    Conversation,
    Passage,
    Record,
    TokenRow,
    check_turns,
)

_IGNORED = -100  # The label of a token that the loss does not count.
_MASKS = ("completion_mask", "assistant_masks", "loss_mask")
_SYSTEM = ("system", "system_prompt")
# Fields of all formats, and of messages: read, without a meaning for the model, and
# refused, because they would change what a record means.
_READ = frozenset({"family", "weight"})
_HARMLESS = frozenset(("id", "index", "source", "dataset", "category", "language"))
_REFUSED = {
    "tools": "calls of tools",
    "functions": "calls of tools",
    "documents": "documents",
    "chosen": "preferences",
    "rejected": "preferences",
    "conversations": 'ShareGPT\'s turns; write "messages" with role and content',
} | dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "media")
_READ_OF_MESSAGES = frozenset({"role", "content", "weight", "train", *THOUGHTS})
_REFUSED_OF_MESSAGES = ("tool_calls", "function_call", "tool_call_id", "tool_plan")
_REFUSED_OF_MESSAGES += ("audio", "images", "prefix", "training", "train_detail")
_REFUSED_OF_MESSAGES += ("training_detail", "loss_mask", "citations")
# Refused fields may be empty.
_HARMLESS_OF_MESSAGES = frozenset({"name", "id", *_REFUSED_OF_MESSAGES})
_PASSAGE = dict.fromkeys(("context", "passage"), "passage; write it into the question")
_PACKED = dict.fromkeys(
    ("seq_lengths", "cu_seqlens", "segment_ids", "sequence_ids"),
    "packed sequences; write a record for each",
)
_NO_ROLES = dict.fromkeys(
    _SYSTEM, "system message without roles; write it into the text"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A format of records. Fields of all formats are not listed.

    Attributes:
      needs: The fields that a record must have.
      read: The function that reads a record from its fields.
      reads: The fields that a record may have and that are read.
      harmless: The fields that are not read and change nothing.
      refused: What fields hold that would change a record's meaning, by name.
    """

    needs: tuple[str, ...]
    read: Callable[[dict], Record]
    reads: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def unread(self, row: dict) -> set[str]:
        """Returns the fields of a record and its messages that nothing reads."""
        names = row.keys() - {*self.needs, *self.reads, *self.harmless, *self.refused}
        of_messages = {
            f"{name}.{key}"
            for name in ("messages", "prompt", "completion")
            if name in self.needs and isinstance(row[name], list)
            for message in row[name]
            for key in message.keys() - _READ_OF_MESSAGES - _HARMLESS_OF_MESSAGES
        }
        return (names - _READ - _HARMLESS - _REFUSED.keys()) | of_messages


def without_nulls(value: Any) -> Any:
    """Returns a value without fields that are null."""
    if isinstance(value, dict):
        return {k: without_nulls(x) for k, x in value.items() if x is not None}
    return [without_nulls(x) for x in value] if isinstance(value, list) else value


def format_of(row: Any) -> str:
    """Returns the name of a record's format.

    Raises:
      ValueError: If the fields do not identify one format, or are not supported.
    """
    if not isinstance(row, dict):
        raise ValueError(f"a record must be an object, got {row!r:.60}")
    _check_refused(row, _REFUSED)
    names = [name for name, f in FORMATS.items() if row.keys() >= set(f.needs)]
    # If a field is missing, the format's reader raises an error that names the field.
    names = names or [name for name, f in FORMATS.items() if f.needs[0] in row]
    if "text" in names[1:]:  # Alpaca's own files have the whole prompt as well.
        names.remove("text")
    if len(names) != 1:
        formats = "; ".join(", ".join(f.needs) for f in FORMATS.values())
        raise ValueError(
            f"a record has the fields of one format ({formats}), got {list(row)!s:.120}"
        )
    _check_refused(row, FORMATS[names[0]].refused)
    return names[0]


def weight_of(row: dict, name: str = "record") -> bool:
    """Returns whether a record or a message has the weight 1, the default.

    Raises:
      ValueError: If the weight is neither 0 nor 1.
    """
    weight = row.get("weight", 1)
    if type(weight) not in (int, float) or weight not in (0, 1):
        raise ValueError(f'the "weight" of a {name} is 0 or 1, got {weight!r:.60}')
    return bool(weight)


def string_of(record: dict, name: str) -> str:
    """Returns a field that is a string and not blank."""
    return _text(record.get(name), name)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f'"{name}" must be a string that is not blank, got {value!r:.60}'
        )
    if "\0" in value:
        raise ValueError(f'"{name}" must have no NUL, got {value!r:.60}')
    value.encode()  # JSON may have lone surrogates, which raise an error here.
    return value


def _check_refused(row: dict, refused: Mapping[str, str]) -> None:
    names = [name for name in row.keys() & refused.keys() if not _is_empty(row[name])]
    if names:
        name = min(names)
        raise ValueError(f'"{name}": fine-tuning takes no {refused[name]}')


def _is_empty(value: Any) -> bool:
    return isinstance(value, str | list | dict) and not value


def _conversation(row: dict, messages: Any, *, prompts: int = 0) -> Conversation:
    """Returns a record's conversation; the first `prompts` messages are not learned.

    Args:
      row: The fields of the record.
      messages: The messages, not checked yet.
      prompts: The number of messages in the prompt.

    Raises:
      ValueError: If a message is invalid, or no answer is learned.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'"messages" must be a list of some, got {messages!r:.60}')
    parts = [_message(message, number) for number, message in enumerate(messages)]
    learned = [n >= prompts and is_learned for n, (*_, is_learned) in enumerate(parts)]
    contents = [(role, content) for role, content, *_ in parts]
    thoughts = [of_message for _, _, of_message, _ in parts]
    if (system := _system(row)) and contents[0] != ("system", system):
        if contents[0][0] == "system":
            raise ValueError(
                "a record has one system message, got a field and a message"
            )
        contents.insert(0, ("system", system))
        thoughts.insert(0, {})
        learned.insert(0, False)
    roles = [role for role, _ in contents]
    check_turns(roles)
    if not any(w for w, r in zip(learned, roles, strict=True) if r == "assistant"):
        raise ValueError("no answer is learned: all weights are 0")
    return Conversation(
        messages=tuple(contents),
        learned=tuple(learned),
        thoughts=tuple(thoughts) if any(thoughts) else (),
    )


def _system(row: dict) -> str:
    """Returns the system message in the fields of a record; "" if it has none."""
    texts = {
        _content(row[name], name)
        for name in _SYSTEM
        if not _is_empty(row.get(name, ""))
    }
    if len(texts) > 1:
        raise ValueError(f"a record has one system message, got {sorted(texts)!s:.60}")
    return texts.pop() if texts else ""


def _message(message: Any, number: int) -> tuple[str, str, dict[str, str], bool]:
    """Returns the role, content and thoughts of a message, and whether it is learned.

    Raises:
      ValueError: If the message, with index `number`, is invalid.
    """
    if not isinstance(message, dict):
        raise ValueError(f"message {number} must be an object, got {message!r:.60}")
    for name in _REFUSED_OF_MESSAGES:
        if name in message and not _is_empty(message[name]):
            raise ValueError(f'message {number} has "{name}", which is not read')
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(
            f"the role of message {number} must be {', '.join(ROLES)}, got {role!r:.60}"
        )
    train = message.get("train", True)
    if not isinstance(train, bool):
        raise ValueError(
            f'the "train" of a message is true or false, got {train!r:.60}'
        )
    thoughts = {
        name: _text(message[name], f"{name} of message {number}")
        for name in THOUGHTS
        if message.get(name, "") != ""
    }
    if thoughts and role != "assistant":
        raise ValueError(
            f'only the assistant\'s messages have "{min(thoughts)}", got message '
            f"{number} of the {role}"
        )
    content = _content(message.get("content"), f"content of message {number}")
    return role, content, thoughts, weight_of(message, "message") and train


def _content(content: Any, name: str) -> str:
    """Returns a text that is a string or a list of parts; errors have its name."""
    if isinstance(content, list):
        content = "".join(_text_part(part) for part in content)
    return _text(content, name)


def _text_part(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise ValueError(f"the parts of a content must be text, got {part!r:.60}")
    return string_of(part, "text")


def _of_messages(row: dict) -> Record:
    return _conversation(row, row["messages"])


def _of_question(row: dict) -> Record:
    turn = string_of(row, "question"), string_of(row, "answer")
    return _conversation(row, _turns([turn]))


def _of_alpaca(row: dict) -> Record:
    question = string_of(row, "instruction")
    if row.get("input", "") != "":
        question += "\n\n" + string_of(row, "input")
    history = row.get("history", [])
    if not isinstance(history, list) or not all(
        isinstance(turn, list) and len(turn) == 2 for turn in history
    ):
        raise ValueError(
            f'"history" must be a list of pairs of question and answer, got '
            f"{history!r:.60}"
        )
    return _conversation(row, _turns([*history, (question, string_of(row, "output"))]))


def _turns(turns: list) -> list[dict[str, Any]]:
    """Returns the messages of pairs of a question and an answer."""
    roles = ("user", "assistant")
    return [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(roles, turn, strict=True)
    ]


def _of_prompt(row: dict) -> Record:
    prompt, completion = row["prompt"], row.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return _conversation(row, prompt + completion, prompts=len(prompt))
    _check_refused(row, _NO_ROLES)
    return Passage(
        prompt=string_of(row, "prompt"), completion=string_of(row, "completion")
    )


def _of_text(row: dict) -> Record:
    return Passage(completion=string_of(row, "text"))


def _of_tokens(row: dict) -> Record:
    tokens = _integers(row, "input_ids", least=0)
    labels = _as_many(row, "labels", tokens) if "labels" in row else tokens
    for number, (label, token) in enumerate(zip(labels, tokens, strict=True)):
        if label not in (_IGNORED, token):
            raise ValueError(
                f"labels must be {_IGNORED} or the token, got {label} for token "
                f"{number}, which is {token}"
            )
    learned = [label != _IGNORED for label in labels]
    for name in _MASKS:
        mask = _as_many(row, name, tokens) if name in row else (1,) * len(tokens)
        if not set(mask) <= {0, 1}:
            raise ValueError(f'"{name}" must be 0 and 1, got {max(mask, key=abs)}')
        learned = [a and b == 1 for a, b in zip(learned, mask, strict=True)]
    if "attention_mask" in row and set(_integers(row, "attention_mask")) != {1}:
        raise ValueError('"attention_mask" must be 1 alone; leave padding out')
    if "position_ids" in row:
        _check_positions(_as_many(row, "position_ids", tokens))
    if not any(learned[1:]):
        raise ValueError("no token is learned that another comes before")
    return TokenRow(tokens=tokens, learned=tuple(learned))


def _check_positions(positions: tuple[int, ...]) -> None:
    for first, second in itertools.pairwise(positions):
        if second != first + 1:
            raise ValueError(
                f'"position_ids" must grow by 1, got {second} after {first}; packed '
                "sequences are records of their own"
            )


def _as_many(row: dict, name: str, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a field with an integer for each of the tokens."""
    values = _integers(row, name)
    if len(values) != len(tokens):
        raise ValueError(
            f'"{name}" must be as many as "input_ids", got {len(values)} and '
            f"{len(tokens)}"
        )
    return values


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


FORMATS = {
    "messages": Format(needs=("messages",), read=_of_messages, reads=_SYSTEM),
    "question and answer": Format(
        needs=("question", "answer"),
        read=_of_question,
        reads=_SYSTEM,
        refused=_PASSAGE | {"input": "input; write it into the question"},
    ),
    "Alpaca": Format(
        needs=("instruction", "output"),
        read=_of_alpaca,
        reads=("input", "history", *_SYSTEM),
        harmless=("text",),
        refused=_PASSAGE,
    ),
    "prompt and completion": Format(
        needs=("prompt", "completion"),
        read=_of_prompt,
        reads=_SYSTEM,
        refused={"label": "preferences"},
    ),
    "tokens": Format(
        needs=("input_ids",),
        read=_of_tokens,
        reads=("labels", "attention_mask", "position_ids", *_MASKS),
        harmless=("length", "text"),
        refused=_PACKED | _NO_ROLES,
    ),
    "text": Format(needs=("text",), read=_of_text, refused=_NO_ROLES),
}
