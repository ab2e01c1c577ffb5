"""Encodes text with a folder's tokenizer, where special tokens can be plain text."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from coat_jax.models import hf
from coat_jax.models.hf.folder import read_json
from coat_jax.models.hf.text import special_tokens

_BLANK = " \t\n\r▁"
_HTML = re.compile(
    "</?(table|caption|t(head|body|foot|[rhd])|h[1-6]|blockquote|strong|em|su[bp]|code|"
    "[bius])>"
)


class FolderTokens:
    """The tokenizer of a Hugging Face folder, and a copy without special tokens.

    Special tokens are here all added tokens, except text: runs of spaces or lines,
    which many tokenizers have, and tags of HTML, which Gemma's has.

    Args:
      folder: The path of the folder.

    Attributes:
      tokenizer: The tokenizer.
      special: The special tokens by their text.
      pattern: The pattern that finds the special tokens in a text, in one group.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = hf.load_tokenizer(folder)
        added = self.tokenizer.get_added_tokens_decoder().items()
        named = special_tokens(folder).values()
        self.special = {
            token.content: number
            for number, token in added
            if token.special or token.content in named or not _is_text(token.content)
        }
        # The tokenizer takes the longer of two tokens that begin at the same position.
        words = sorted(self.special, key=len, reverse=True)
        self.pattern = re.compile(f"({'|'.join(map(re.escape, words)) or '(?!)'})")
        self._plain = _without_special(self.tokenizer, self.special)
        self._of_alias = {
            self._plain.token_to_id(_alias(number)): number
            for number in self.special.values()
        }

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, without special tokens."""
        return self.tokenizer.decode(list(tokens))

    def spelled(self, text: str) -> str | None:
        """Returns the first special token that is spelled in a text, or None."""
        if match := self.pattern.search(text):
            return match[0]
        if self.tokenizer.normalizer is None:
            return None
        # A normalizer may turn other characters into a special token.
        ids, plain = (
            Counter(one.encode(text, add_special_tokens=False).ids)
            for one in (self.tokenizer, self._plain)
        )
        words = (word for word, number in self.special.items() if number in ids - plain)
        return next(words, None)

    def document(self, text: str, *, markup: bool) -> list[int]:
        """Returns a document's tokens, after any tokens that the tokenizer puts first.

        Tokens that the tokenizer puts last are left out. If `markup` is true, the
        special tokens in the text are read, and a first token that the text has already
        is not repeated. If it is false, they are plain text.
        """
        encoding = (self.tokenizer if markup else self._plain).encode(text)
        ids, added = list(encoding.ids), list(encoding.special_tokens_mask)
        while added and added[-1]:
            del ids[-1], added[-1]
        is_double = markup and added[:2] == [1, 0] and ids[0] == ids[1]
        return ids[1:] if is_double else ids

    def encode(
        self, text: str, hidden: Sequence[tuple[int, int]] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encodes a text, with special tokens as plain text in the spans `hidden`.

        Returns:
          The tokens, and the position in the text at which each token begins.
        """
        if not hidden:
            encoding = self.tokenizer.encode(text, add_special_tokens=False)
            starts = [start for start, _ in encoding.offsets]
            return np.array(encoding.ids, np.int32), np.array(starts, int)
        pieces, origins, begin = [], list[int](), 0
        for at, word in self._read(text, sorted(hidden)):
            alias = _alias(self.special[word]) if word else ""
            pieces += [text[begin:at], alias]
            origins += [*range(begin, at), *[at] * len(alias)]
            begin = at + len(word)
        origins.append(len(text))
        encoding = self._plain.encode("".join(pieces), add_special_tokens=False)
        ids = [self._of_alias.get(number, number) for number in encoding.ids]
        starts = [origins[start] for start, _ in encoding.offsets]
        return np.array(ids, np.int32), np.array(starts, int)

    def _read(
        self, text: str, hidden: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, str]]:
        """Yields the position and the text of each special token outside of `hidden`.

        The position of the text's end, with "", is the last.
        """
        ends = [0, *(end for _, end in hidden)]
        starts = [*(start for start, _ in hidden), len(text)]
        for begin, end in zip(ends, starts, strict=True):
            for match in self.pattern.finditer(text, begin, end):
                yield match.start(), match[0]
        yield len(text), ""


def end_token(folder: Path, special: dict[str, int]) -> int:
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


def stop_tokens(folder: Path) -> list[int]:
    """Returns the tokens at which the folder's config files end a generation."""
    stops: list[int] = []
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            values = read_json(folder, name).get("eos_token_id")
            stops += values if isinstance(values, list) else [values]
    return [stop for stop in stops if type(stop) is int]


def _is_text(token: str) -> bool:
    """Returns whether an added token that is not special is a piece of text."""
    return not token.strip(_BLANK) or _HTML.fullmatch(token) is not None


def _alias(number: int) -> str:
    """Returns the text that stands for a special token; records have no NUL."""
    return f"\0{number}\0"


def _without_special(tokenizer, special: dict[str, int]):
    """Returns a copy of a tokenizer that encodes special tokens as plain text.

    The copy reads the aliases of special tokens in their place, so that a text's other
    tokens are those that the tokenizer gives them next to special tokens.
    """
    import tokenizers

    values = json.loads(tokenizer.to_str())
    aliases = []
    for token in values["added_tokens"]:
        token["special"] = token["content"] in special
        if token["special"]:
            options = {name: token[name] for name in ("lstrip", "rstrip")}
            alias = _alias(special[token["content"]])
            aliases.append(tokenizers.AddedToken(alias, normalized=False, **options))
    plain = type(tokenizer).from_str(json.dumps(values))
    plain.encode_special_tokens = True
    plain.add_tokens(aliases)
    return plain
