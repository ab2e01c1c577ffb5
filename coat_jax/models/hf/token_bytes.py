"""The bytes that tokens stand for in a text."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: "Tokenizer") -> tuple[bytes, ...]:
    """Returns the bytes of each token in text, in the order of token ids.

    The joined bytes of several tokens are their text, except for a space at the
    beginning, which some tokenizers remove. `coat.generate` needs the bytes of tokens
    for `stop_strings`.

    Args:
      tokenizer: The tokenizer: byte-level, as in Llama 3, Qwen or SmolLM2, or in the
        style of SentencePiece, as in Llama 2, Mistral or Gemma.

    Raises:
      ValueError: If the tokenizer's decoder is of another kind.

    Examples:
      >>> import tokenizers
      >>> from coat_jax.models import hf
      >>> vocabulary = {"a": 0, "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}b": 1}
      >>> bpe = tokenizers.models.BPE(vocabulary, [])
      >>> tokenizer = tokenizers.Tokenizer(bpe)
      >>> tokenizer.decoder = tokenizers.decoders.ByteLevel()
      >>> hf.token_bytes(tokenizer)
      (b'a', b' b')
    """
    description = json.loads(tokenizer.to_str())
    spell = _spelling(description.get("decoder") or {})
    # The contents of added tokens are text, which no decoder changes.
    contents = {token["id"]: token["content"] for token in description["added_tokens"]}
    pieces = {index: piece for piece, index in tokenizer.get_vocab().items()}
    return tuple(
        contents[index].encode() if index in contents else spell(pieces.get(index, ""))
        for index in range(max(pieces, default=-1) + 1)
    )


def _spelling(decoder: Mapping[str, Any]) -> Callable[[str], bytes]:
    """Returns the function from a token's string in the vocabulary to its bytes."""
    steps = {step["type"]: step for step in _steps(decoder)}
    if "ByteLevel" in steps:
        bytes_of = {letter: byte for byte, letter in enumerate(_letters())}
        return lambda piece: b"".join(
            bytes([bytes_of[letter]]) if letter in bytes_of else letter.encode()
            for letter in piece
        )
    space = _space(steps)
    if space is None:
        names = ", ".join(steps) or "none"
        raise ValueError(
            "the tokenizer's decoder must be ByteLevel, Metaspace or Replace with "
            f"ByteFallback, got {names}"
        )

    def spell(piece: str) -> bytes:
        if match := _BYTE.fullmatch(piece):
            return bytes.fromhex(match[1])
        return piece.replace(space, " ").encode()

    return spell


def _steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder.get("type") == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    elif decoder:
        yield decoder


def _space(steps: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Returns the string that stands for a space in tokens, or None."""
    if "Metaspace" in steps:
        return steps["Metaspace"]["replacement"]
    replace = steps.get("Replace", {})
    pattern = replace.get("pattern", {}).get("String")
    return pattern if replace.get("content") == " " else None


def _letters() -> list[str]:
    """Returns the characters by which byte-level tokenizers write the 256 bytes.

    Printable bytes are written as the characters of Latin-1, and the others, in their
    order, as the code points from 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
