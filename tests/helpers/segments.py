"""Segments of the FP8 layer that take and return plain arrays."""

from coat_jax.layers import flow, parts, shards


def attention_in(params, x, norm, heads, keep_copies=False):
    stream = parts.Stream.of(x)
    *heads, stream = flow.attention_in(params, stream, norm, heads, keep_copies)
    return *heads, shards.leave(stream)


def attention_out(params, o, x):
    return shards.leave(flow.attention_out(params, o, parts.Stream.of(x)))


def gated_mlp(params, x, norm, gate):
    return shards.leave(flow.gated_mlp(params, parts.Stream.of(x), norm, gate))
