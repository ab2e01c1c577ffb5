"""Tests sequences of several documents, and weights of tokens in the loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import small_models
from helpers.gradients import assert_close, compiled, cosine
from helpers.marks import slow

import coat_jax as coat
from coat_jax.models import llama

_SIZES = (5, 2, 9)  # The tokens of the documents of a sequence.
_LENGTH = 20  # The rest is padding.
_SEGMENTS = np.repeat([1, 2, 3, 0], [*_SIZES, _LENGTH - sum(_SIZES)])[None]


def split(recipe: str, dtype=jnp.float32):
    config = small_models.config(recipe=recipe, dtype=dtype, head_dim=16)
    graph, _ = nnx.split(nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0))))
    return graph, small_models.trained(config, batches=1).params


def tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 128, (1, _LENGTH), np.int32)


def log_likelihoods(graph, params, inputs, targets, *segments):
    logits = nnx.merge(graph, params)(inputs, *segments)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)


def packed_loss(graph, params, inputs, targets, weights):
    return llama.cross_entropy(
        nnx.merge(graph, params),
        inputs,
        targets,
        weights=weights,
        segment_ids=jnp.array(_SEGMENTS),
    )


@functools.cache
def packed_loss_and_gradients():
    """Returns a jitted function that computes the packed loss and its gradients."""
    graph, _ = split("bf16")
    return jax.jit(jax.value_and_grad(functools.partial(packed_loss, graph)))


def test_each_document_has_the_logits_that_it_has_alone():
    graph, params = split("bf16")
    inputs = tokens()
    packed = compiled(
        lambda p, t, s: nnx.merge(graph, p)(t, s), params, inputs, jnp.array(_SEGMENTS)
    )
    alone = jax.jit(lambda p, t: nnx.merge(graph, p)(t))
    ends = np.cumsum(_SIZES)
    for start, end in zip(ends - _SIZES, ends, strict=True):
        # Tokens that come later change nothing, and all calls are one program.
        one = np.zeros_like(inputs)
        one[:, : end - start] = inputs[:, start:end]
        expected = alone(params, one)[:, : end - start]
        np.testing.assert_allclose(packed[:, start:end], expected, atol=2e-4)
    assert np.isfinite(packed).all()


def test_loss_is_the_weighted_mean_of_the_documents():
    graph, params = split("bf16")
    inputs, targets = tokens(), tokens(1)
    weights = np.random.default_rng(2).integers(0, 3, inputs.shape)
    weights[_SEGMENTS == 0] = 0
    # Each document is a sequence of its own, in which padding has no weight.
    alone = [
        np.concatenate([np.where(n == _SEGMENTS, x, 0)[:, at:], x[:, :at] * 0], axis=1)
        for x in (inputs, targets, weights)
        for n, at in zip((1, 2, 3), np.cumsum(_SIZES) - _SIZES, strict=True)
    ]
    own_read, own_targets, own_weights = np.split(np.concatenate(alone), 3)

    def documents(params):
        likely = log_likelihoods(graph, params, own_read, own_targets)[..., 0]
        return -jnp.sum(own_weights * likely) / weights.sum()

    expected = compiled(jax.value_and_grad(documents), params)
    for shares in (jnp.array(weights), jnp.array(weights, jnp.bfloat16)):
        actual = packed_loss_and_gradients()(params, inputs, targets, shares)
        assert_close(actual, expected, 1e-4)


@functools.cache
def gradients(recipe: str):
    """Returns the loss of packed sequences in bfloat16, and its gradients."""
    graph, params = split(recipe, jnp.bfloat16)
    inputs, targets, weights = tokens(), tokens(1), jnp.array(_SEGMENTS > 0)
    return compiled(
        jax.value_and_grad(lambda p: packed_loss(graph, p, inputs, targets, weights)),
        params,
    )


@pytest.mark.parametrize("recipe", [*map(slow, ("te", "coat", "coat_max"))])
def test_gradients_of_packed_sequences_by_recipe(recipe):
    loss, grads = gradients(recipe)
    expected_loss, expected = gradients("bf16")
    np.testing.assert_allclose(loss, expected_loss, rtol=0.02)
    assert cosine(grads, expected) > 0.98


def test_segments_are_saved_once_for_all_layers():
    def saved(*segments):
        graph, params = split("coat", jnp.bfloat16)
        inputs = jnp.array(tokens())
        return coat.residual_report(
            lambda p, t, *s: nnx.merge(graph, p).hidden(t, *s).sum(),
            params,
            inputs,
            *segments,
        ).nbytes

    extra = saved(jnp.array(_SEGMENTS, jnp.int32)) - saved()
    assert extra <= 4 * _LENGTH


def test_no_weight_is_no_loss():
    _, params = split("bf16")
    zeros = jnp.zeros((1, _LENGTH), jnp.bfloat16)
    loss, grads = packed_loss_and_gradients()(params, tokens(), tokens(), zeros)
    assert loss == 0
    assert not any(np.any(g) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("target", [-100, 128])
def test_targets_outside_the_vocabulary_need_the_weight_zero(target):
    _, params = split("bf16")
    targets = tokens(1)
    targets[0, 3] = target
    weights = np.ones((1, _LENGTH), np.float32)
    assert np.isnan(packed_loss_and_gradients()(params, tokens(), targets, weights)[0])
    weights[0, 3] = 0
    actual = packed_loss_and_gradients()(params, tokens(), targets, weights)
    expected = packed_loss_and_gradients()(params, tokens(), tokens(1), weights)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize(("dtype", "size"), [(np.uint8, 256), (np.int8, 128)])
def test_tokens_of_any_integers_have_one_loss(dtype, size):
    config = small_models.config(recipe="bf16", vocab_size=size)
    model, ids = llama.Llama(config, rngs=nnx.Rngs(0)), tokens()
    actual = llama.cross_entropy(model, ids.astype(dtype), ids.astype(dtype))
    assert actual == llama.cross_entropy(model, ids, ids)


def test_targets_that_are_no_integers_are_named():
    model = nnx.merge(*split("bf16"))
    with pytest.raises(ValueError, match=r"targets must be .* integers .* got float32"):
        llama.cross_entropy(model, tokens(), tokens().astype(np.float32))


@pytest.mark.parametrize("shape", [(4,), (1, 1, 4), (0, 4), (1, 0)])
def test_tokens_that_are_no_sequences_are_named(shape):
    model, zeros = nnx.merge(*split("bf16")), jnp.zeros(shape, jnp.int32)
    with pytest.raises(ValueError, match=r"tokens must have the shape \[b, s\]"):
        llama.cross_entropy(model, zeros, zeros)


@pytest.mark.parametrize("name", ["weights", "segment_ids"])
def test_shapes_that_do_not_fit_are_named(name):
    model = nnx.merge(*split("bf16"))
    with pytest.raises(ValueError, match=rf"{name} must have the shape \(1, 20\)"):
        llama.cross_entropy(
            model, tokens(), tokens(), **{name: jnp.ones((1, 19), jnp.int32)}
        )
