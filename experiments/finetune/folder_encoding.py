"""Encodes records with the tokenizer and the chat template of a Hugging Face folder."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from coat_jax.models import hf
from coat_jax.models.hf.folder import read_json
from coat_jax.models.hf.text import special_tokens
from experiments.finetune.conversations import Conversation, Example, Messages, Passage
from experiments.finetune.encoding import Encoder, role_error


class FolderEncoder(Encoder):
    """The encoder of a Hugging Face folder: its tokenizer and its chat template.

    The tokens of an answer are its content and the text that the template writes after
    the content, up to the token that stops generation.

    Args:
      folder: The path of the folder.
      vocab_size: The number of rows of the model's embedding.

    Raises:
      ValueError: If the folder's tokenizer or template is missing or damaged, or has no
        token that ends a text.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._template: hf.ChatTemplate | None = None
        self._folder, self.vocab_size = folder, vocab_size
        tokenizer = hf.load_tokenizer(folder)
        if tokenizer.get_vocab_size() > vocab_size:
            raise ValueError(
                f"the tokenizer of {folder} has {tokenizer.get_vocab_size()} tokens, "
                f"and the model {vocab_size}"
            )
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer, self._plain = tokenizer, _without_special(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token.content: number for number, token in added.items()}
        self._special_ids = set(added)
        self._end = _end_token(folder, self._special)
        self.stop_tokens = sorted({self._end, *_stop_tokens(folder)})

    @property
    def template(self) -> hf.ChatTemplate:
        """The chat template, which is read when the first conversation needs it."""
        if self._template is None:
            self._template = hf.ChatTemplate(self._folder)
            self._check_template(self._template)
        return self._template

    def _check_template(self, template: hf.ChatTemplate) -> None:
        """Sets the token that ends an answer, and the words that mark roles.

        Raises:
          ValueError: If the template changes the contents of messages.
        """
        pieces = _pieces(template, ("user", "assistant") * 2, prompt=False)
        if pieces is None:
            raise ValueError(
                f"the chat template of {self._folder} changes what messages say"
            )
        ends = [(pieces[2].find(s), s) for s in self._special if s in pieces[2]]
        if ends:
            self.stop_tokens = sorted({*self.stop_tokens, self._special[min(ends)[1]]})
        self._role_words = [
            piece.strip()
            for piece in pieces[1:]
            if piece.strip() and not any(s in piece for s in self._special)
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, without special tokens."""
        return self._tokenizer.decode(list(tokens))

    def question(self, record: Conversation | Passage) -> list[int]:
        """Returns the tokens of a record before its last answer."""
        if isinstance(record, Passage):
            return self._text(record.prompt, ends=False).tolist()
        return self._tokens(record.messages[:-1], prompt=True)[1].tolist()

    def _passage(self, passage: Passage) -> Example:
        prompt = self._text(passage.prompt, ends=False)
        text = self._text(passage.prompt + passage.completion, ends=True)
        # A BPE may merge letters of the prompt and the completion into one token, which
        # is learned.
        common = prompt.size
        if not np.array_equal(text[:common], prompt):
            short = min(common, text.size)
            common = int(np.argmin(text[:short] == prompt[:short]))
        learned = np.arange(text.size) >= common
        return Example(text, learned if passage.prompt else np.ones(text.size, bool))

    def _text(self, text: str, ends: bool) -> np.ndarray:
        """Returns a text's tokens, after any tokens that the tokenizer puts first.

        If the text `ends` a document, the end token follows.
        """
        encoding = self._plain.encode(text)
        ids = list(encoding.ids)
        while ids and ids[-1] in self.stop_tokens:
            ids.pop()  # Some tokenizers end each text by themselves.
        return np.array([*ids, self._end] if ends else ids, np.int32)

    def _conversation(self, conversation: Conversation) -> Example:
        messages = conversation.messages
        text, tokens, starts = self._tokens(messages, prompt=False)
        learned = np.zeros(tokens.size, bool)
        for index, (role, content) in enumerate(messages):
            if role != "assistant" or not conversation.is_learned(index):
                continue
            begin = self._rendered(messages[:index], prompt=True)
            end = self._rendered(messages[: index + 1], prompt=False)
            if not (end.startswith(begin) and text.startswith(end)):
                raise ValueError(
                    "the chat template writes this answer in another way than it asks "
                    "for it, so that no token is known to be the answer's; --loss all "
                    "learns all tokens"
                )
            first = max(text.find(content.strip(), len(begin)), len(begin))
            stop = self._stop(text, first + len(content.strip()), len(end))
            learned |= (starts >= len(begin)) & (starts < stop)
        return Example(tokens, learned)

    def _stop(self, text: str, begin: int, end: int) -> int:
        """Returns the end of the token that ends an answer, as a position in the text.

        The search is between `begin` and `end`; without such a token the result is
        `end`.
        """
        for number in self.stop_tokens:
            word = self._tokenizer.id_to_token(number)
            if word and (at := text.find(word, begin, end)) >= 0:
                end = at + len(word)
        return end

    def _rendered(self, messages: Messages, prompt: bool) -> str:
        named = [{"role": role, "content": content} for role, content in messages]
        return self.template.render(named, add_generation_prompt=prompt)

    def _tokens(
        self, messages: Messages, prompt: bool
    ) -> tuple[str, np.ndarray, np.ndarray]:
        """Returns messages as text, their tokens, and each token's position in it."""
        text = self._rendered(messages, prompt)
        self._check_roles(messages)
        if any(self._has_special(content) for _, content in messages):
            return text, *self._around(text, self._places(text, messages, prompt))
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        starts = [start for start, _ in encoding.offsets]
        return text, np.array(encoding.ids, np.int32), np.array(starts, int)

    def _check_roles(self, messages: Messages) -> None:
        for _, content in messages:
            for word in self._role_words:
                if word in content:
                    raise role_error(word, content)

    def _has_special(self, content: str) -> bool:
        """Returns whether the tokenizer would read a special token in `content`."""
        if any(word in content for word in self._special):
            return True
        if self._tokenizer.normalizer is None:
            return False
        # A normalizer may turn other characters into a special token.
        encoding = self._tokenizer.encode(content, add_special_tokens=False)
        return not self._special_ids.isdisjoint(encoding.ids)

    def _places(
        self, text: str, messages: Messages, prompt: bool
    ) -> list[tuple[int, int]]:
        """Returns the span of each message's content in a rendered text.

        Raises:
          ValueError: If the template changes the contents of messages.
        """
        pieces = _pieces(self.template, [role for role, _ in messages], prompt)
        raw = [content for _, content in messages]
        for contents in (raw, [content.strip() for content in raw]):
            written, spans = "", []
            for piece, content in zip(pieces or (), [*contents, ""], strict=False):
                written += piece
                spans.append((len(written), len(written) + len(content)))
                written += content
            if written == text:
                return spans[:-1]
        raise ValueError(
            "a message has the text of a special token, and the chat template changes "
            "messages, so that this text cannot be kept apart from its tokens"
        )

    def _around(
        self, text: str, hidden: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encodes a text; special tokens within the spans `hidden` become plain text.

        Returns:
          The tokens, and the position in the text at which each token begins.
        """
        ids, starts, begin = [], [], 0
        for at, word in self._special_places(text, hidden):
            piece = self._plain.encode(text[begin:at], add_special_tokens=False)
            ids += piece.ids
            starts += [begin + start for start, _ in piece.offsets]
            if word:
                ids.append(self._special[word])
                starts.append(at)
            begin = at + len(word)
        return np.array(ids, np.int32), np.array(starts, int)

    def _special_places(
        self, text: str, hidden: Sequence[tuple[int, int]]
    ) -> list[tuple[int, str]]:
        """Finds the special tokens outside the spans `hidden`.

        Returns:
          The position and the text of each special token, in order, and then the
          position of the text's end with "".
        """
        places, at = [], 0
        # The tokenizer takes the longer of two tokens that begin at the same position.
        words = sorted(self._special, key=len, reverse=True)
        while at < len(text):
            span = next((span for span in hidden if span[0] <= at < span[1]), None)
            if span is not None:
                at = span[1]
                continue
            word = next((word for word in words if text.startswith(word, at)), "")
            if word:
                places.append((at, word))
            at += max(1, len(word))
        return [*places, (len(text), "")]


def _without_special(tokenizer):
    """Returns a copy of a tokenizer that encodes special tokens as plain text."""
    values = json.loads(tokenizer.to_str())
    for token in values["added_tokens"]:
        token["special"] = True  # Other added tokens would not become plain text.
    plain = type(tokenizer).from_str(json.dumps(values))
    plain.encode_special_tokens = True
    return plain


def _pieces(
    template: hf.ChatTemplate, roles: Sequence[str], prompt: bool
) -> list[str] | None:
    """Returns the texts that a template writes around the contents of messages.

    These are the texts before each content and after the last. The result is None if
    the template changes or leaves out a content.
    """
    marks = [f"\ue000{n}\ue001" for n in range(len(roles))]
    messages = [
        {"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)
    ]
    text, pieces = template.render(messages, add_generation_prompt=prompt), []
    for mark in marks:
        piece, mark_read, text = text.partition(mark)
        if not mark_read:
            return None
        pieces.append(piece)
    return [*pieces, text]


def _end_token(folder: Path, special: dict[str, int]) -> int:
    """Returns the token that ends a document: the tokenizer's `eos_token`.

    Raises:
      ValueError: If the tokenizer lacks this token.
    """
    name = special_tokens(folder)["eos_token"]
    if name not in special:
        raise ValueError(
            f"the tokenizer of {folder} must have its eos_token, got {name!r:.60}"
        )
    return special[name]


def _stop_tokens(folder: Path) -> list[int]:
    """Returns the tokens at which the folder's config files end a generation."""
    stops: list[int] = []
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            values = read_json(folder, name).get("eos_token_id")
            stops += values if isinstance(values, list) else [values]
    return [stop for stop in stops if type(stop) is int]
