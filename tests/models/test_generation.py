"""Tests generation against forward passes over whole sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import small_models
from helpers.gradients import compiled
from helpers.marks import slow

import coat_jax as coat
from coat_jax.models import generation, llama, prompts, stop_strings
from coat_jax.models.sampling import Sampling

PROMPTS = [[5, 9, 2, 7, 1, 8, 3], [4], [11, 12, 13, 120]]


@functools.cache
def model(recipe: str = "bf16", **options) -> llama.Llama:
    """Returns a model with parameters so large that its logits differ."""
    config = small_models.config(recipe=recipe, **options)
    trained = small_models.trained(config, batches=1)
    graph, _ = nnx.split(nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graph, trained.params)


@functools.partial(jax.jit, static_argnums=0)
def _forward(graph, state, tokens):
    return nnx.merge(graph, state)(tokens)


def last_logits(net: llama.Llama, tokens: list[int], length: int = 16) -> np.ndarray:
    """Computes the logits after `tokens` by one forward pass without a cache.

    Zeros after the tokens, which change nothing, make all calls one program.
    """
    padded = jnp.array([tokens + [0] * (length - len(tokens))])
    return np.asarray(_forward(*nnx.split(net), padded)[0, len(tokens) - 1])


def naive(net: llama.Llama, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(last_logits(net, tokens).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("dtype", "options", "tolerance"),
    [
        (jnp.float32, {}, 1e-4),
        slow(jnp.float32, {"norm": "layer", "tie_embeddings": False}, 1e-4),
        slow(jnp.bfloat16, {}, 0.05),
    ],
)
def test_logits_of_the_cache_are_those_of_a_whole_pass(dtype, options, tolerance):
    net = model(dtype=dtype, **options)
    further = [[17, 3], [90, 6], [40, 41]]
    tokens, starts = prompts.padded_prompts(PROMPTS, 9, net)
    graph, state = nnx.split(net)

    def logits(state, tokens, starts):
        net = nnx.merge(graph, state)
        step_logits, cache = generation._prefill(net, tokens, starts, 3)
        logits = [step_logits]
        for position, new in enumerate(jnp.array(further).T):
            step_logits, cache = generation._decode(
                net, new, 9 + position, starts, cache
            )
            logits.append(step_logits)
        return jnp.stack(logits, 1)

    actual = compiled(logits, state, tokens, starts)
    for row, prompt, new in zip(actual, PROMPTS, further, strict=True):
        for count, step_logits in enumerate(np.asarray(row)):
            expected = last_logits(net, prompt + new[:count])
            scale = np.abs(expected).max()
            np.testing.assert_allclose(
                step_logits / scale, expected / scale, atol=tolerance
            )


def test_greedy_tokens_are_those_of_a_loop_that_computes_all_again():
    net = model(dtype=jnp.float32)
    actual = coat.generate(net, PROMPTS, max_new_tokens=6, prompt_length=8)
    for prompt, tokens, length in zip(PROMPTS, *actual, strict=True):
        assert tokens.tolist() == naive(net, prompt, 6)
        assert length == 6


@pytest.mark.parametrize("recipe", [slow("te"), "coat", slow("coat_max")])
def test_every_recipe_generates_as_bf16_does(recipe):
    net = model(recipe, dtype=jnp.float32)
    expected = coat.generate(model(dtype=jnp.float32), PROMPTS, max_new_tokens=4)
    actual = coat.generate(net, PROMPTS, max_new_tokens=4)
    np.testing.assert_array_equal(actual.tokens, expected.tokens)


def test_weights_quantized_beforehand_are_not_used():
    net = model("coat", dtype=jnp.float32)
    expected = coat.generate(net, PROMPTS, max_new_tokens=4)
    net = nnx.merge(*nnx.split(net))
    nnx.jit(llama.Llama.quantize_weights)(net)
    actual = coat.generate(net, PROMPTS, max_new_tokens=4)
    np.testing.assert_array_equal(actual.tokens, expected.tokens)


def test_a_stop_token_ends_its_prompt_alone():
    net = model(dtype=jnp.float32)
    free = coat.generate(net, PROMPTS, max_new_tokens=6).tokens.tolist()
    stop = free[0][2]
    actual = coat.generate(net, PROMPTS, max_new_tokens=6, stop_tokens=[stop])
    for tokens, length, all_tokens in zip(*actual, free, strict=True):
        end = all_tokens.index(stop) if stop in all_tokens else 6
        assert length == end
        assert tokens.tolist() == (all_tokens[: end + 1] + 6 * [0])[:6]


def test_arrays_of_prompts_in_a_compiled_function():
    net = model(dtype=jnp.float32)
    graph, state = nnx.split(net)
    prompts = jnp.array([[3, 1, 4], [1, 5, 9]])

    def tokens(state, prompts):
        net = nnx.merge(graph, state)
        return coat.generate(net, prompts, max_new_tokens=3, prompt_length=5).tokens

    actual = compiled(tokens, state, prompts)
    assert actual.tolist() == [naive(net, row, 3) for row in prompts.tolist()]


def test_sampling_keeps_the_most_likely_tokens():
    shares = np.array([[0.1, 0.4, 0.05, 0.25, 0.2], [0.2, 0.2, 0.2, 0.2, 0.2]])
    scores = jnp.log(jnp.array(shares, jnp.float32))

    def kept(**options):
        masked = Sampling(**options).masked(scores)
        actual = np.isfinite(masked)
        np.testing.assert_array_equal(np.asarray(masked)[actual], scores[actual])
        return [np.flatnonzero(row).tolist() for row in actual]

    assert kept() == [[0, 1, 2, 3, 4]] * 2
    assert kept(top_k=2) == [[1, 3], [0, 1]]
    assert kept(top_k=9) == [[0, 1, 2, 3, 4]] * 2
    assert kept(top_p=0.5) == [[1, 3], [0, 1, 2]]
    assert kept(top_p=1e-9) == [[1], [0]]
    # After top_k the shares 0.4, 0.25 and 0.2 are 0.47, 0.29 and 0.24.
    assert kept(top_k=3, top_p=0.7) == [[1, 3], [0, 1, 2]]


def test_sampled_tokens_have_the_probabilities_of_the_logits():
    shares = np.array([0.1, 0.6, 0.3])
    scores = jnp.broadcast_to(jnp.log(jnp.array(shares)), (20_000, 3))
    for options, power in (({}, 1.0), ({"top_k": 2}, 1.0), ({"top_p": 0.8}, 2.0)):
        temperatures = jnp.full(20_000, 1 / power)
        chosen = Sampling(**options).choose(scores, temperatures, jax.random.key(1))
        actual = np.bincount(chosen, minlength=3)
        expected = shares**power * ([1, 1, 1] if not options else [0, 1, 1])
        np.testing.assert_allclose(
            actual / 20_000, expected / expected.sum(), atol=0.02
        )


def test_a_key_decides_the_sampled_tokens():
    net = model(dtype=jnp.float32)
    options = {"max_new_tokens": 8, "temperature": 3.0}
    actual = [
        coat.generate(net, PROMPTS, key=jax.random.key(seed), **options).tokens.tolist()
        for seed in (0, 0, 1)
    ]
    assert actual[0] == actual[1] != actual[2]


def test_prompts_have_temperatures_of_their_own():
    net = model(dtype=jnp.float32)
    options = {"max_new_tokens": 8, "key": jax.random.key(0)}
    greedy, warm, mixed = (
        coat.generate(net, PROMPTS, temperature=temperature, **options).tokens.tolist()
        for temperature in (0.0, 3.0, [0.0, 3.0, 0.0])
    )
    assert mixed == [greedy[0], warm[1], greedy[2]]
    assert greedy[1] != warm[1]


def spelling(token: int) -> bytes:
    """Returns the two letters of a token, which other tokens have, too."""
    return bytes([97 + token % 5, 97 + token % 3])


# A tokenizer may have more tokens than the model.
@pytest.mark.parametrize("more", [slow([]), [b"<image>"]])
def test_a_stop_string_ends_its_prompt_alone(more):
    net = model(dtype=jnp.float32)
    free = coat.generate(net, PROMPTS, max_new_tokens=6).tokens.tolist()
    texts = [b"".join(map(spelling, tokens)).decode() for tokens in free]
    string = texts[0][3:6]  # It begins within the second token.
    actual = coat.generate(
        net,
        PROMPTS,
        max_new_tokens=6,
        stop_strings=["zz", string],
        token_bytes=[spelling(token) for token in range(128)] + more,
    )
    assert string in texts[0]
    for tokens, length, all_tokens, text in zip(*actual, free, texts, strict=True):
        place = text.find(string)
        end = 6 if place < 0 else (place + len(string) + 1) // 2
        assert length == end
        assert tokens.tolist() == all_tokens[:end] + (6 - end) * [0]


def test_strings_may_be_found_in_a_compiled_function_first():
    net = model(dtype=jnp.float32)
    graph, state = nnx.split(net)
    options = {"stop_strings": ["ba"], "max_new_tokens": 6}
    options["token_bytes"] = [spelling(token) for token in range(127)]

    def tokens(state, prompts):
        return coat.generate(nnx.merge(graph, state), prompts, **options).tokens

    prompts = jnp.array([[3, 1, 4]])
    expected = compiled(tokens, state, prompts).tolist()
    assert coat.generate(net, prompts, **options).tokens.tolist() == expected


def test_tiny_temperatures_take_the_most_likely_token():
    scores = jnp.array([[1.0, 5.0, 9.0, 2.0]])
    for temperature in (1e-3, 1e-37, 1e-40):
        for options in ({}, {"top_k": 2}, {"top_p": 0.9}):
            arguments = jnp.float32([temperature]), jax.random.key(0)
            assert Sampling(**options).choose(scores, *arguments) == 2


@pytest.mark.parametrize(
    "strings", [["ab"], ["aab", "b"], ["abab", "ba"], ["aaa", "\u00e9\U0001f600"]]
)
def test_strings_are_found_wherever_tokens_begin_and_end(strings):
    rng = np.random.default_rng(0)
    letters = "".join(strings).encode() + b"ab"
    spellings = [b"", *(bytes([x]) for x in letters)]
    spellings += [bytes(rng.choice([*letters], rng.integers(1, 6))) for _ in range(40)]
    table = np.asarray(stop_strings.transitions(tuple(strings), tuple(spellings)))
    for _ in range(100):
        text, state = b"", stop_strings.START
        for token in rng.integers(0, len(spellings), 12):
            text, state = text + spellings[token], table[state, token]
            is_there = any(string.encode() in text for string in strings)
            assert (state == stop_strings.FOUND) == is_there
            if is_there:
                break


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be a positive int, got 0"),
        ({"max_new_tokens": 4.0}, "max_new_tokens must be a positive int, got 4.0"),
        ({"temperature": -1.0}, "temperature must be at least 0 and finite, got -1.0"),
        ({"temperature": 1.0}, "a temperature above 0 needs a key, got 1.0"),
        ({"temperature": [0.0, float("nan"), 1.0]}, "temperature must be at least 0"),
        ({"temperature": [0.0, 1.0]}, r"for each of 3 prompts, got shape \(2,\)"),
        ({"stop_strings": ["a"]}, "token_bytes of the vocabulary of 128, got none"),
        ({"stop_strings": ["a"], "token_bytes": ["a"]}, "bytes, got 'a' for token 0"),
        ({"stop_strings": "a"}, "stop_strings must be a list of strings, got 'a'"),
        ({"stop_strings": [""], "token_bytes": [b"a"]}, "strings of text, got ''"),
        ({"stop_strings": ["\ud800"], "token_bytes": [b"a"]}, "must be UTF-8"),
        ({"top_k": 0}, "top_k must be a positive int, got 0"),
        ({"top_k": 1.5}, "top_k must be a positive int, got 1.5"),
        ({"top_k": True}, "top_k must be a positive int, got True"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"top_p": "a"}, "top_p must be above 0 and at most 1, got .a."),
        ({"prompt_length": 6}, "at most prompt_length=6 tokens, got 7"),
        ({"prompt_length": 7.5}, "prompt_length must be a positive int, got 7.5"),
        ({"stop_tokens": 3}, "stop_tokens must be a sequence of integers, .*: 3"),
        ({"stop_tokens": None}, "stop_tokens must be a sequence of .*: None"),
        ({"stop_tokens": [1.5]}, r"stop_tokens must be a sequence .*: \[1.5\]"),
        ({"stop_tokens": [128]}, "stop_tokens must be .* vocabulary of 128, got 128"),
        ({"prompts": []}, "one token or more, but no prompt"),
        ({"prompts": [[1], []]}, "one token or more, but prompt 1 is empty"),
        ({"prompts": [[1, -3]]}, "prompts must be tokens .* of 128, got -3"),
        ({"prompts": np.ones(3, int)}, r"integers \[b, p\], got int64 \[3\]"),
        ({"prompts": np.ones((1, 3))}, r"got float64 \[1, 3\]"),
    ],
)
def test_bad_input_is_named(options, message):
    arguments = {"prompts": PROMPTS, "max_new_tokens": 1} | options
    with pytest.raises(ValueError, match=message):
        coat.generate(model(), **arguments)


def test_what_is_no_llama_is_named():
    with pytest.raises(TypeError, match="model must be a Llama, got State"):
        coat.generate(nnx.state(model()), PROMPTS, max_new_tokens=1)


@pytest.mark.parametrize("kind", [list, np.array, jnp.array])
@pytest.mark.parametrize("prompt", [[[1, 128]], [[-100, 5]]])
def test_prompts_outside_the_vocabulary_are_refused_in_any_array(kind, prompt):
    with pytest.raises(ValueError, match="vocabulary of 128"):
        coat.generate(model(), kind(prompt), max_new_tokens=1)


@pytest.mark.parametrize(
    "prompts", [[[1.5, 2.0]], [1, 2, 3], [[[1, 2], [3, 4]]], [["one"]], [[True, False]]]
)
def test_prompts_that_are_no_sequences_of_integers_are_refused(prompts):
    with pytest.raises(ValueError, match="a prompt must be a sequence of integers"):
        coat.generate(model(), prompts, max_new_tokens=1)
