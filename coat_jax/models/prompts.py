"""Checks the inputs of a generation: prompts, temperatures and stop strings."""

from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from coat_jax.models import stop_strings as stops
from coat_jax.models.llama import Llama
from pallas_kernels.checks import positive_int

Prompts = Sequence[Sequence[int]] | Int[Array, "b p"]


def temperatures_of(
    temperature: float | Sequence[float] | Array, batch: int
) -> tuple[Float[Array, " b"], bool]:
    """Returns a temperature for each prompt, and whether one may be above 0.

    Raises:
      ValueError: If there is neither one temperature nor one for each prompt, or a
        temperature is negative or not finite.
    """
    is_traced = any(
        isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(temperature)
    )
    numbers = (jnp if is_traced else np).asarray(temperature, np.float32)
    if numbers.shape not in ((), (batch,)):
        raise ValueError(
            f"temperature must be a number, or one for each of {batch} prompts, got "
            f"shape {numbers.shape}"
        )
    if is_traced:
        return jnp.broadcast_to(numbers, batch), True
    if not np.all((numbers >= 0) & np.isfinite(numbers)):
        raise ValueError(
            f"temperature must be at least 0 and finite, got {temperature}"
        )
    return jnp.broadcast_to(numbers, batch), bool(numbers.any())


def stop_transitions(
    strings: Sequence[str], token_bytes: Sequence[bytes] | None, model: Llama
) -> Int[Array, "states vocab"] | None:
    """Returns the table of `stop_strings.transitions`; None without strings.

    Raises:
      ValueError: If `strings` is a single string, `token_bytes` is None, or the bytes
        of a token are not of the type `bytes`.
    """
    if isinstance(strings, str):
        raise ValueError(f"stop_strings must be a list of strings, got {strings!r}")
    if not strings:
        return None
    size = model.config.vocab_size
    if token_bytes is None:
        raise ValueError(
            f"stop_strings need token_bytes of the vocabulary of {size}, got none"
        )
    for token, spelling in enumerate(token_bytes):
        if not isinstance(spelling, bytes):
            raise ValueError(
                f"token_bytes must be bytes, got {spelling!r} for token {token}"
            )
    # A vocabulary may be padded with tokens that no tokenizer has, and a tokenizer may
    # have tokens that no model of text generates, such as Gemma 3's for images.
    fitting = (*token_bytes[:size], *[b""] * (size - len(token_bytes)))
    return jnp.asarray(stops.transitions(tuple(strings), fitting))


def padded_prompts(
    prompts: Prompts, length: int | None, model: Llama
) -> tuple[Int[Array, "b p"], Int[Array, " b"]]:
    """Returns the prompts, padded on the left, and their first tokens' positions."""
    if isinstance(prompts, jax.Array | np.ndarray):
        if prompts.ndim != 2 or not jnp.issubdtype(prompts.dtype, jnp.integer):
            raise ValueError(
                "an array of prompts must be integers [b, p], got "
                f"{prompts.dtype} {list(prompts.shape)}"
            )
        rows = np.asarray(prompts) if _are_known(prompts) else prompts
    else:
        rows = [_row("a prompt", prompt) for prompt in prompts]
    sizes = np.array([row.shape[0] for row in rows])
    if not sizes.size or sizes.min() < 1:
        at = "no prompt" if not sizes.size else f"prompt {int(sizes.argmin())} is empty"
        raise ValueError(f"prompts must have one token or more, but {at}")
    longest = int(sizes.max())
    length = longest if length is None else positive_int("prompt_length", length)
    if longest > length:
        raise ValueError(
            f"prompts must have at most prompt_length={length} tokens, got {longest}"
        )
    starts = jnp.asarray(length - sizes, jnp.int32)
    if isinstance(rows, jax.Array):
        gap = length - rows.shape[1]
        return jnp.pad(rows.astype(jnp.int32), ((0, 0), (gap, 0))), starts
    for row in rows:
        check_vocabulary("prompts", row, model)
    tokens = np.zeros((len(rows), length), np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[length - row.size :] = row
    return jnp.asarray(tokens), starts


def _are_known(x: jax.Array | np.ndarray) -> bool:
    """Returns whether this process can read an array's values; a tracer has none."""
    if isinstance(x, jax.core.Tracer):
        return False
    return isinstance(x, np.ndarray) or x.is_fully_addressable


def stop_tokens_of(tokens: Collection[int], model: Llama) -> tuple[int, ...]:
    """Returns the stop tokens as integers.

    Raises:
      ValueError: If they are not a sequence or a set of integers, or one is not in the
        vocabulary.
    """
    tokens = sorted(tokens) if isinstance(tokens, set | frozenset) else tokens
    row = _row("stop_tokens", tokens)
    check_vocabulary("stop_tokens", row, model)
    return tuple(row.tolist())


def _row(name: str, tokens: Sequence[int]) -> Int[np.ndarray, " p"]:
    """Returns tokens as an array.

    Raises:
      ValueError: If the tokens are not a sequence of integers.
    """
    row = np.asarray(tokens)
    integers = np.issubdtype(row.dtype, np.integer) or not row.size
    if row.ndim != 1 or not integers:
        raise ValueError(
            f"{name} must be a sequence of integers, got {row.dtype} "
            f"{list(row.shape)}: {str(tokens)[:40]}"
        )
    return row


def check_vocabulary(name: str, tokens: np.ndarray, model: Llama) -> None:
    """Raises ValueError if a token is not in the model's vocabulary."""
    size = model.config.vocab_size
    for token in tokens[(tokens < 0) | (tokens >= size)][:1]:
        raise ValueError(
            f"{name} must be tokens of the vocabulary of {size}, got {token}"
        )
