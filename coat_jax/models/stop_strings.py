"""Strings that end a generation, found in the bytes of tokens.

A string may begin and end within tokens, and different tokens may spell it. So the
automaton of Aho and Corasick (1975) follows the tokens' bytes. Its state is the longest
suffix of the text so far that is a prefix of a string. A table has the state to which a
whole token leads from each state, so that a step of generation reads one entry of the
table for each prompt.
"""

import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

FOUND = 0  # The state after a string has occurred in the text.
START = 1


@functools.lru_cache(maxsize=8)
def transitions(
    strings: tuple[str, ...], token_bytes: tuple[bytes, ...]
) -> Int[np.ndarray, "states vocab"]:
    """Returns the state to which each token leads from each state.

    Args:
      strings: The strings; none is empty.
      token_bytes: The bytes of each token in text.

    Raises:
      ValueError: If a string is empty or cannot be written in UTF-8.

    Examples:
      >>> from coat_jax.models import stop_strings
      >>> table = stop_strings.transitions(("ab",), (b"a", b"b", b"xab", b""))
      >>> table[stop_strings.START].tolist()  # "xab" ends the generation.
      [2, 1, 0, 1]
    """
    by_byte = _automaton([_utf8(string) for string in strings])
    lengths = np.array([len(spelling) for spelling in token_bytes], int)
    states = np.repeat(np.arange(len(by_byte))[:, None], len(token_bytes), axis=1)
    longest_first = np.argsort(-lengths, kind="stable")
    for index in range(lengths.max(initial=0)):
        # Only these tokens have a byte of this index.
        tokens = longest_first[: int(np.sum(lengths > index))]
        letters = np.array([token_bytes[token][index] for token in tokens])
        states[:, tokens] = by_byte[states[:, tokens], letters]
    return states.astype(np.int32)


def _utf8(string: str) -> bytes:
    if not isinstance(string, str) or not string:
        raise ValueError(f"stop_strings must be strings of text, got {string!r}")
    try:
        return string.encode()
    except UnicodeEncodeError:
        raise ValueError(f"stop_strings must be UTF-8, got {string!r}") from None


def _automaton(strings: Sequence[bytes]) -> Int[np.ndarray, "states 256"]:
    """Returns the state to which each byte leads from each state."""
    # Each state is a prefix of a string, except for `FOUND`.
    beginnings = {string[:end] for string in strings for end in range(len(string))}
    states = {b"": START}
    for number, beginning in enumerate(sorted(beginnings - {b""}), START + 1):
        states[beginning] = number
    table = np.full((len(states) + 1, 256), FOUND, np.int32)
    for beginning, state in states.items():
        for byte in range(256):
            table[state, byte] = _next(beginning + bytes([byte]), states, strings)
    return table


def _next(text: bytes, states: dict[bytes, int], strings: Sequence[bytes]) -> int:
    if any(text.endswith(string) for string in strings):
        return FOUND
    ends = (text[begin:] for begin in range(len(text) + 1))
    return next(states[end] for end in ends if end in states)
