"""Encodes records with the tokenizer and the chat template of a Hugging Face folder."""

import re
from collections.abc import Sequence, Set
from pathlib import Path

import numpy as np

from coat_jax.models import hf
from coat_jax.models.hf.text import special_tokens
from experiments.finetune.conversations import (
    THOUGHTS,
    Conversation,
    Example,
    Passage,
    result_of,
)
from experiments.finetune.encoding import Encoder, Markup, role_error
from experiments.finetune.folder_tokens import FolderTokens, end_token, stop_tokens

_BRACKETED = re.compile(r"[<\[{]\S*\w\S*[>\]}]")
_MARK = "\ue000{}\ue001"
Message = dict[str, str]


class FolderEncoder(Encoder):
    """The encoder of a Hugging Face folder: its tokenizer and its chat template.

    The tokens of an answer are its content and the text that the template writes after
    the content, up to the token that stops generation.

    Args:
      folder: The path of the folder.
      vocab_size: The number of rows of the model's embedding. The tokenizer may have
        more tokens, which no record may contain.
      markup: The treatment of text without roles that spells special tokens.

    Raises:
      ValueError: If the folder's tokenizer or template is missing or damaged, or has no
        token that ends a text.
    """

    def __init__(
        self, folder: Path, vocab_size: int, markup: Markup = "refuse"
    ) -> None:
        self._template: hf.ChatTemplate | None = None
        self._folder, self.vocab_size, self._markup = folder, vocab_size, markup
        self._tokens = FolderTokens(folder)
        self._end = end_token(folder, self._tokens.special)
        self.stop_tokens = sorted({self._end, *stop_tokens(folder)})
        if max(self.stop_tokens) >= vocab_size:
            raise ValueError(
                f"the model of {folder} has {vocab_size} tokens, and none that is "
                f"{max(self.stop_tokens)}, which ends a text"
            )

    @property
    def template(self) -> hf.ChatTemplate:
        """The chat template, which is read when the first conversation needs it."""
        if self._template is None:
            self._template = hf.ChatTemplate(self._folder)
            self._check_template(self._template)
        return self._template

    def _check_template(self, template: hf.ChatTemplate) -> None:
        """Sets the token that ends an answer, and the words that mark roles.

        A line is printed if the template writes no token after an answer.

        Raises:
          ValueError: If the template changes the contents of messages.
        """
        turns = ("user", "assistant") * 2
        pieces = _pieces(template, turns)
        if pieces is None:
            raise ValueError(
                f"the chat template of {self._folder} changes what messages say"
            )
        if end := self._tokens.pattern.search(pieces[2]):
            number = self._tokens.special[end[0]]
            self.stop_tokens = sorted({*self.stop_tokens, number})
        else:
            print(
                f"{self._folder}: the chat template writes no special token after an "
                "answer, so that the model learns none to stop at",
                flush=True,
            )
        edges = {self._tokens.tokenizer.id_to_token(n) for n in self.stop_tokens}
        edges |= {special_tokens(self._folder)["bos_token"]}
        edges -= self._opening(pieces[: len(turns)])
        pieces += _pieces(template, ("system", *turns)) or []
        self._role_words = sorted({x for p in pieces for x in self._markers(p, edges)})
        # The text between thoughts and content, for the fields that the template reads.
        self._after_thoughts = {
            name: text
            for name in THOUGHTS
            if (text := _after_thoughts(template, name)) is not None
        }

    def _opening(self, pieces: Sequence[str]) -> set[str]:
        """Returns the special token that the role of each message follows, if any.

        In ChatML this is `<|im_start|>`, which SmolLM2 also begins documents with.
        `pieces` are the texts that the template writes before the contents of messages.
        """
        opening = set()
        for piece in pieces:
            *before, role = self._tokens.pattern.split(piece)
            opening.add(before[-1] if before and role == role.lstrip() else "")
        return opening if len(opening) == 1 else set()

    def _markers(self, piece: str, edges: Set[str]) -> set[str]:
        """Returns the words that mark roles in a text that the template writes.

        Words next to a special token are no markers, because no message can write this
        token; the tokens `edges`, which begin or end a document, do not count.
        """
        markers: set[str] = set()
        is_sealed = False
        *segments, last = self._tokens.pattern.split(piece)
        for segment, token in zip(segments[::2], segments[1::2], strict=True):
            if not is_sealed:
                attached = token not in edges and segment.rstrip() == segment
                lines = segment.splitlines()
                markers |= _words(lines[:-1] if attached else lines)
            is_sealed = token not in edges
        return markers if is_sealed else markers | _words(last.splitlines())

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, without special tokens."""
        return self._tokens.decode(tokens)

    def question(self, record: Conversation | Passage) -> list[int]:
        """Returns the tokens of a record before its last answer.

        If the template writes text before an answer, such as empty thoughts, this text
        is a part of the question. Thoughts of the record are not.
        """
        if isinstance(record, Passage):
            return self._document(record.prompt)
        messages = _named(record)
        asked, tokens, _ = self._encode_messages(messages[:-1], prompt=True)
        if messages[-1].keys() & set(THOUGHTS):
            return tokens.tolist()
        text, answered, starts = self._encode_messages(messages, prompt=False)
        span = self._span(text, messages, len(messages) - 1, prompt=False)
        begin = span[0] if span and text.startswith(asked) else len(asked)
        if not text[len(asked) : begin].strip():
            return tokens.tolist()
        return answered[: np.searchsorted(starts, _start_of(starts, begin))].tolist()

    def answer(self, record: Conversation | Passage, tokens: Sequence[int]) -> str:
        """Returns the text of generated tokens; thoughts of the record are left out."""
        thoughts = record.thoughts if isinstance(record, Conversation) else ()
        for name in thoughts[-1] if thoughts else ():
            text = self._tokens.tokenizer.decode(
                list(tokens), skip_special_tokens=False
            )
            _, end, content = text.rpartition(
                self._after_thoughts[name].strip() or "\0"
            )
            if end:
                return self._tokens.pattern.sub("", content)
        return self.decode(tokens)

    def expected(self, record: Conversation | Passage) -> str:
        """Returns the right result of a record, without special tokens."""
        if not isinstance(record, Passage) or self._markup != "read":
            return record.answer
        encode = self._tokens.tokenizer.encode
        ids = encode(record.completion, add_special_tokens=False).ids
        stops = [n for n, token in enumerate(ids) if token in self.stop_tokens]
        return result_of(self.decode(ids[: min(stops, default=None)]))

    def _passage(self, passage: Passage) -> Example:
        prompt = np.array(self._document(passage.prompt), np.int32)
        whole = passage.prompt + passage.completion
        word = self._tokens.spelled(whole) if self._markup == "refuse" else None
        if word is not None:
            raise ValueError(
                f"the text spells the special token {word!r}; --markup read reads it "
                "as this token, and --markup plain as characters"
            )
        ids = self._document(whole)
        text = np.array(ids if self._ends(whole) else [*ids, self._end], np.int32)
        # A BPE may merge letters of the prompt and the completion into one token, which
        # is learned.
        common = prompt.size
        if not np.array_equal(text[:common], prompt):
            short = min(common, text.size)
            common = int(np.argmin(text[:short] == prompt[:short]))
        learned = np.arange(text.size) >= common
        return Example(text, learned if passage.prompt else np.ones(text.size, bool))

    def _document(self, text: str) -> list[int]:
        return self._tokens.document(text, markup=self._markup == "read")

    def _ends(self, text: str) -> bool:
        """Returns whether a text ends with a token that stops generation."""
        if self._markup != "read":
            return False
        words = map(self._tokens.tokenizer.id_to_token, self.stop_tokens)
        return text.rstrip().endswith(tuple(filter(None, words)))

    def _conversation(self, conversation: Conversation) -> Example:
        messages = _named(conversation)
        text, tokens, starts = self._encode_messages(messages, prompt=False)
        learned = np.zeros(tokens.size, bool)
        for index in range(len(messages)):
            if conversation.is_learned(index):
                begin, end = self._answer_span(text, messages, index)
                learned |= (starts >= _start_of(starts, begin)) & (starts < end)
        return Example(tokens, learned)

    def _answer_span(
        self, text: str, messages: Sequence[Message], index: int
    ) -> tuple[int, int]:
        """Returns the span of the text that is learned of an answer.

        The span begins where the template asks for the answer. An earlier answer that
        the template writes in another way than it asks for it, for example without its
        thoughts, begins with its content.

        Raises:
          ValueError: If the span is not certain.
        """
        asked = self._rendered(messages[:index], prompt=True)
        answered = self._rendered(messages[: index + 1], prompt=False)
        content = messages[index]["content"].strip()
        if answered.startswith(asked) and text.startswith(answered):
            begin, last = len(asked), len(answered)
            end = max(text.find(content, begin), begin) + len(content)
            stop = self._stop(text, end, last)
            return begin, last if stop is None else stop
        span = self._span(text, messages, index, prompt=False)
        following = None
        if index + 1 < len(messages):
            following = self._span(text, messages, index + 1, prompt=False)
        if span is None or following is None:
            hint = '; "weight": 0 on this answer leaves it out' if following else ""
            raise ValueError(
                "the chat template writes this answer in another way than it asks for "
                f"it, so that no token is known to be the answer's{hint}; --loss all "
                "learns all tokens"
            )
        begin, end = span
        stop = self._stop(text, end, following[0])
        return begin, end if stop is None else stop

    def _stop(self, text: str, begin: int, end: int) -> int | None:
        """Returns the end of the first token between two positions that ends an answer.

        The result is None if there is no such token.
        """
        words = map(self._tokens.tokenizer.id_to_token, self.stop_tokens)
        ends = [
            at + len(word)
            for word in filter(None, words)
            if (at := text.find(word, begin, end)) >= 0
        ]
        return min(ends, default=None)

    def _rendered(self, messages: Sequence[Message], prompt: bool) -> str:
        return self.template.render(messages, add_generation_prompt=prompt)

    def _encode_messages(
        self, messages: Sequence[Message], prompt: bool
    ) -> tuple[str, np.ndarray, np.ndarray]:
        """Returns messages as text, their tokens, and each token's position in it."""
        text = self._rendered(messages, prompt)
        self._check_system(messages, prompt)
        hidden = []
        for index, message in enumerate(messages):
            self._check_message(message)
            if self._tokens.spelled(message["content"]) is None:
                continue
            span = self._span(text, messages, index, prompt)
            if span is None:
                fields = ", ".join(self._after_thoughts)
                hint = f"; the template reads thoughts in {fields}" if fields else ""
                raise ValueError(
                    "a message has the text of a special token, and the chat template "
                    "changes messages, so that this text cannot be kept apart from its "
                    f"tokens{hint}"
                )
            hidden.append(span)
        return text, *self._tokens.encode(text, hidden)

    def _check_system(self, messages: Sequence[Message], prompt: bool) -> None:
        """Raises ValueError if the template leaves out the system message.

        Some templates, such as Mistral's, write it only before a last question.
        """
        if messages[0]["role"] != "system":
            return
        mark = _MARK.format("s")
        marked = [messages[0] | {"content": mark}, *messages[1:]]
        if mark not in self._rendered(marked, prompt):
            raise ValueError(
                "the chat template leaves out the system message of this conversation; "
                "write it into the first question"
            )

    def _check_message(self, message: Message) -> None:
        """Raises ValueError for text that could be read as a role or is not read."""
        for name in message.keys() & set(THOUGHTS):
            if name not in self._after_thoughts:
                raise ValueError(f'the chat template reads no "{name}" of messages')
            if (word := self._tokens.spelled(message[name])) is not None:
                raise ValueError(f'"{name}" spells the special token {word!r}')
        for name in message.keys() - {"role"}:
            for word in self._role_words:
                if word in message[name]:
                    raise role_error(word, message[name])

    def _span(
        self, text: str, messages: Sequence[Message], index: int, prompt: bool
    ) -> tuple[int, int] | None:
        """Returns the span of a message's content in the rendered text.

        The result is None if the template changes the content.
        """
        marked, mark = list(messages), _MARK.format(index)
        marked[index] = messages[index] | {"content": mark}
        before, _, after = self._rendered(marked, prompt).partition(mark)
        content = messages[index]["content"]
        for written in (content, content.strip(), content.lstrip(), content.rstrip()):
            if before + written + after == text:
                return len(before), len(before) + len(written)
        return None


def _named(conversation: Conversation) -> list[Message]:
    """Returns the messages for a template, with their thoughts."""
    thoughts = conversation.thoughts or ({},) * len(conversation.messages)
    return [
        {"role": role, "content": content, **of_message}
        for (role, content), of_message in zip(
            conversation.messages, thoughts, strict=True
        )
    ]


def _start_of(starts: np.ndarray, position: int) -> int:
    """Returns the start of the token that covers a position of a text."""
    return int(starts[max(np.searchsorted(starts, position, side="right") - 1, 0)])


def _words(lines: Sequence[str]) -> set[str]:
    """Returns the lines that can mark roles, and the words in brackets in them.

    Sentences are no marks: some templates write a system message of their own.
    """
    lines = [line.strip() for line in lines]
    words = {word for line in lines for word in _BRACKETED.findall(line)}
    return words | {x for x in lines if re.search(r"\w", x) and x[-1] not in ".!?"}


def _pieces(template: hf.ChatTemplate, roles: Sequence[str]) -> list[str] | None:
    """Returns the texts that a template writes around the contents of messages.

    These are the texts before each content and after the last. The result is None if
    the template changes or leaves out a content, or refuses a system message.
    """
    marks = [_MARK.format(n) for n in range(len(roles))]
    messages = [
        {"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)
    ]
    try:
        text, pieces = template.render(messages, add_generation_prompt=False), []
    except ValueError:
        if roles[0] == "system":
            return None
        raise
    for mark in marks:
        piece, mark_read, text = text.partition(mark)
        if not mark_read:
            return None
        pieces.append(piece)
    return [*pieces, text]


def _after_thoughts(template: hf.ChatTemplate, name: str) -> str | None:
    """Returns the text that a template writes between thoughts and a content.

    The result is None if the template does not read the field `name` of thoughts.
    """
    thoughts, content = _MARK.format("t"), _MARK.format("c")
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content, name: thoughts},
    ]
    text = template.render(messages, add_generation_prompt=False)
    _, is_read, after = text.partition(thoughts)
    return after.partition(content)[0] if is_read else None
