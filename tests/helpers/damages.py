"""Hypothesis strategies for damaged files and for altered JSON values."""

import copy
from typing import Any

from hypothesis import strategies as st

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 1, 2**31, 2**63, 10**400, float("nan"), float("inf")])
    | st.floats()
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


@st.composite
def damaged(draw: st.DrawFn, content: bytes, first: int | None = None) -> bytes:
    """Draws a file's content after one to four edits.

    Args:
      draw: Draws from strategies.
      content: The content of the undamaged file.
      first: The number of first bytes that edits prefer; None means no preference.
    """
    for _ in range(draw(st.integers(1, 4))):
        end = first if first and draw(st.booleans()) else len(content)
        at = draw(st.integers(0, min(end, len(content))))
        until = draw(st.integers(at, min(at + 64, len(content))))
        edit = draw(st.sampled_from(["flip", "cut", "lose", "repeat", "zero", "write"]))
        before, piece, after = content[:at], content[at:until], content[until:]
        if edit == "flip" and piece:
            flipped = piece[0] ^ (1 << draw(st.integers(0, 7)))
            content = before + bytes([flipped]) + piece[1:] + after
        elif edit == "cut":
            content = before
        elif edit == "lose":
            content = before + after
        elif edit == "repeat":
            content = before + piece * draw(st.integers(2, 40)) + after
        elif edit == "zero":
            content = before + bytes(len(piece)) + after
        elif edit == "write":
            content = before + draw(st.binary(max_size=16)) + after
    return content


@st.composite
def altered(draw: st.DrawFn, value: Any) -> Any:
    """Draws a copy of a JSON value in which values are replaced, deleted or added."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        node = value
        while isinstance(node, dict | list) and node:
            keys = list(node) if isinstance(node, dict) else range(len(node))
            key = draw(st.sampled_from(keys))
            inner = node[key]
            if isinstance(inner, dict | list) and inner and draw(st.booleans()):
                node = inner
                continue
            edit = draw(st.sampled_from(["replace", "delete", "add"]))
            if edit == "replace":
                node[key] = draw(json_values)
            elif edit == "delete":
                del node[key]
            elif isinstance(node, dict):
                node[draw(st.text(max_size=8))] = draw(json_values)
            else:
                node.insert(key, draw(json_values))
            break
    return value
