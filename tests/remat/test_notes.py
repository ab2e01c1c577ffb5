"""Tests of the notes that `fp8_remat` leaves in name scopes."""

import jax
import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st

from coat_jax.remat.notes import Note

_TEXT = st.text(st.characters(exclude_characters=";", codec="ascii"))


@given(_TEXT.filter(lambda kept: " for " not in f"{kept} "), _TEXT, _TEXT, _TEXT)
def test_a_note_is_read_back_from_any_name_stack(kept, reader, before, after):
    note = Note(kept, reader)
    before = before.replace("FP8", "")
    assert Note.within(f"{before}/{note}/{after}") == note


def test_the_innermost_note_counts():
    inner, outer = Note("E4M3, groups of 16", "dot in f (a.py:3)"), Note("wide", "g")
    assert Note.within(f"jvp({outer})/{inner}/sin") == inner
    assert Note.within("jvp(f)/sin") is None


def test_the_scope_reaches_the_program():
    note = Note("E4M3", "a; b")

    def fn(x):
        with note.scope():
            return jnp.sin(x)

    (eqn,) = jax.make_jaxpr(fn)(1.0).eqns
    assert Note.within(str(eqn.source_info.name_stack)) == Note("E4M3", "a, b")
