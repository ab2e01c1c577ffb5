"""Generates the tokens that follow prompts, with a cache of keys and values.

The prompts are computed in one pass, which stores the keys and values of every layer in
a cache. Each further token takes a pass over this token alone, in which attention reads
the cache. Matmuls run as in the recipe "bf16", in the model's dtype, for models of any
recipe.

Prompts of different lengths are padded on the left, so that all of them end at one
position. Padding is masked. RoPE depends on distances between positions only, so it
does not matter at which position a prompt begins.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from coat_jax.models import stop_strings as stops
from coat_jax.models.llama import Llama
from coat_jax.models.prompts import (
    Prompts,
    padded_prompts,
    stop_tokens_of,
    stop_transitions,
    temperatures_of,
)
from coat_jax.models.sampling import Sampling
from pallas_kernels.checks import positive_int, typed_key


class Generated(NamedTuple):
    """The tokens that follow prompts.

    Attributes:
      tokens: The tokens, with zeros after a stop token or string.
      lengths: The number of tokens that follow each prompt. A stop token is not
        counted. The token in which a stop string ends is counted, as the last one.
    """

    tokens: Int[Array, "b n"]
    lengths: Int[Array, " b"]


def generate(
    model: Llama,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    stop_tokens: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
    token_bytes: Sequence[bytes] | None = None,
    temperature: float | Sequence[float] | Float[Array, " b"] = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Key[Array, ""] | None = None,
    prompt_length: int | None = None,
) -> Generated:
    """Generates tokens after each prompt: at most `max_new_tokens`, or until a stop.

    The function compiles once for each number and length of prompts, and for each set
    of options. It can be called within `jax.jit` if the prompts are an array.

    The cache takes `2 * num_layers * num_kv_heads * head_dim` numbers in the model's
    dtype for each token of the prompts and each new one, also in layers that attend
    only to a window.

    Args:
      model: The model, of any recipe.
      prompts: The prompts' tokens: sequences of any lengths, or an array without
        padding.
      max_new_tokens: The largest number of tokens to generate for a prompt.
      stop_tokens: Tokens that end a prompt's generation. The call returns early when
        the generation of all prompts has ended.
      stop_strings: Strings that end a prompt's generation when they occur in the text
        after the prompt, whatever tokens spell them. The last token may have further
        text after the string.
      token_bytes: The bytes of each token in text, which `stop_strings` need; see
        `coat_jax.models.hf.token_bytes`. Bytes of tokens beyond the vocabulary are not
        read: some tokenizers have more tokens than the model.
      temperature: The number that divides logits, or one for each prompt; 0 always
        takes the most likely token, whatever `top_k` and `top_p` are.
      top_k: The number of the most likely tokens to choose from; None means all.
      top_p: The total probability that the tokens to choose from must reach. They are
        the fewest most likely tokens that reach it. None means all tokens.
      key: The key of the random choices, which a temperature above 0 needs.
      prompt_length: The length to which prompts are padded; None means the length of
        the longest prompt. Calls with the same length share a compiled program.

    Raises:
      TypeError: If `model` is not a `Llama`.
      ValueError: If an option is invalid, if a prompt is not a sequence of integers,
        is empty or is longer than `prompt_length`, if a token is not in the vocabulary
        (unless its value is unknown, within `jax.jit`), if a temperature above 0 comes
        without a key, or stop strings without the bytes of all tokens.

    Examples:
      >>> import coat_jax as coat
      >>> from coat_jax.models import llama
      >>> from flax import nnx
      >>> config = llama.LlamaConfig(
      ...     vocab_size=256, hidden_size=64, intermediate_size=128, num_layers=2,
      ...     num_heads=4, num_kv_heads=2)
      >>> model = llama.Llama(config, rngs=nnx.Rngs(0))
      >>> coat.generate(model, [[1, 2, 3], [4]], max_new_tokens=5).tokens.shape
      (2, 5)
    """
    if not isinstance(model, Llama):
        raise TypeError(f"model must be a Llama, got {type(model).__name__}")
    max_new_tokens = positive_int("max_new_tokens", max_new_tokens)
    sampling = Sampling(top_k=top_k, top_p=top_p)
    stop_tokens = stop_tokens_of(stop_tokens, model)
    table = stop_transitions(stop_strings, token_bytes, model)
    tokens, starts = padded_prompts(prompts, prompt_length, model)
    temperatures, is_drawn = temperatures_of(temperature, len(tokens))
    if is_drawn and key is None:
        raise ValueError(f"a temperature above 0 needs a key, got {temperature}")
    graph, state = nnx.split(model)
    return _generate(
        graph,
        state,
        tokens,
        starts,
        temperatures,
        typed_key(key) if is_drawn else None,
        table,
        max_new_tokens,
        stop_tokens,
        sampling,
    )


class _Cache(NamedTuple):
    """Keys and values of all layers and positions.

    Attributes:
      keys: The keys, after RoPE.
      values: The values, of the same positions.
    """

    keys: Float[Array, "layers b length heads d"]
    values: Float[Array, "layers b length heads d"]


class _Loop(NamedTuple):
    """The state of a generation between two tokens.

    Attributes:
      count: The number of tokens that were chosen for each prompt.
      tokens: The chosen tokens, with zeros in place of later ones.
      lengths: The number of tokens that follow each prompt, without a stop token.
      ended: Whether a prompt's generation has ended, by a stop token or string.
      stop_states: The state of `stop_strings` after the tokens of each prompt.
      scores: The logits of the next token.
      cache: The keys and values of the prompts and of the chosen tokens.
    """

    count: Int[Array, ""]
    tokens: Int[Array, "b n"]
    lengths: Int[Array, " b"]
    ended: Bool[Array, " b"]
    stop_states: Int[Array, " b"]
    scores: Float[Array, "b vocab"]
    cache: _Cache


@functools.partial(jax.jit, static_argnums=(0, 7, 8, 9))
def _generate(
    graph: Any,
    state: nnx.State,
    tokens: Int[Array, "b p"],
    starts: Int[Array, " b"],
    temperatures: Float[Array, " b"],
    key: Key[Array, ""] | None,
    stop_table: Int[Array, "states vocab"] | None,
    max_new_tokens: int,
    stop_tokens: tuple[int, ...],
    sampling: Sampling,
) -> Generated:
    model = nnx.merge(graph, state)
    batch, first = tokens.shape
    scores, cache = _prefill(model, tokens, starts, max_new_tokens)

    def go_on(loop: _Loop) -> Bool[Array, ""]:
        return (loop.count < max_new_tokens) & ~jnp.all(loop.ended)

    def step(loop: _Loop) -> _Loop:
        own = None if key is None else jax.random.fold_in(key, loop.count)
        chosen = sampling.choose(loop.scores, temperatures, own).astype(tokens.dtype)
        chosen = jnp.where(loop.ended, 0, chosen)
        is_stop = jnp.isin(chosen, jnp.array(stop_tokens, tokens.dtype))
        counts = ~(loop.ended | is_stop)
        stop_states = loop.stop_states
        if stop_table is not None:
            stop_states = jnp.where(
                counts, stop_table[stop_states, chosen], stop_states
            )
        ended = ~counts | (stop_states == stops.FOUND)
        scores, cache = _decode(model, chosen, first + loop.count, starts, loop.cache)
        return _Loop(
            count=loop.count + 1,
            tokens=loop.tokens.at[:, loop.count].set(chosen),
            lengths=loop.lengths + counts,
            ended=ended,
            stop_states=stop_states,
            scores=scores,
            cache=cache,
        )

    zeros = jnp.zeros(batch, tokens.dtype)
    none = jnp.zeros((batch, max_new_tokens), tokens.dtype)
    start = jnp.full_like(zeros, stops.START)
    loop = _Loop(jnp.int32(0), none, zeros, zeros > 0, start, scores, cache)
    loop = lax.while_loop(go_on, step, loop)
    return Generated(loop.tokens, loop.lengths)


def _prefill(
    model: Llama, tokens: Int[Array, "b p"], starts: Int[Array, " b"], room: int
) -> tuple[Float[Array, "b vocab"], _Cache]:
    """Computes the logits after the prompts, and a cache with `room` for more tokens.

    Args:
      model: The model.
      tokens: The prompts, padded on the left.
      starts: The position of each prompt's first token.
      room: The number of further tokens.
    """
    # Padding is a document of its own, which no token of the prompt attends to.
    places = jnp.arange(tokens.shape[1])[None]
    segments = (places >= starts[:, None]).astype(jnp.int32)
    graph, stacked = nnx.split(model.layers)

    def apply(x, state):
        layer = nnx.merge(graph, state)

        def attention(q, k, v):
            return layer.attend(q, k, v, segments), _Cache(k, v)

        return layer.unquantized(x, attention)

    x, cache = lax.scan(apply, model.embed(tokens), stacked)
    pad = (0, 0), (0, 0), (0, room), (0, 0), (0, 0)
    return _scores(model, x), jax.tree.map(lambda a: jnp.pad(a, pad), cache)


def _decode(
    model: Llama,
    tokens: Int[Array, " b"],
    position: Int[Array, ""],
    starts: Int[Array, " b"],
    cache: _Cache,
) -> tuple[Float[Array, "b vocab"], _Cache]:
    """Computes the logits after one more token, and the cache with this token.

    Args:
      model: The model.
      tokens: The token of each prompt.
      position: The position of these tokens.
      starts: The position of each prompt's first token.
      cache: The cache of all earlier positions.
    """
    places = jnp.arange(cache.keys.shape[2])[None]
    seen = (places >= starts[:, None]) & (places <= position)
    graph, stacked = nnx.split(model.layers)

    def apply(carry, state):
        x, cache, index = carry
        layer = nnx.merge(graph, state)

        def attention(q, k, v):
            place = index, 0, position, 0, 0
            # The whole cache is carried, so that XLA writes a token in place.
            now = _Cache(
                *(
                    lax.dynamic_update_slice(old, new[None], place)
                    for old, new in zip(cache, (k, v), strict=True)
                )
            )
            keys, values = (lax.dynamic_index_in_dim(a, index, 0, False) for a in now)
            return layer.attend_to_cache(q, keys, values, position, seen), now

        x, cache = layer.unquantized(x, attention, start=position)
        return (x, cache, index + 1), None

    carry = model.embed(tokens[:, None]), cache, jnp.int32(0)
    (x, cache, _), _ = lax.scan(apply, carry, stacked)
    return _scores(model, x), cache


def _scores(model: Llama, x: Float[Array, "b s h"]) -> Float[Array, "b vocab"]:
    """Returns the logits after the last position."""
    return model.logits(model.final_norm(x[:, -1:])[:, 0])
