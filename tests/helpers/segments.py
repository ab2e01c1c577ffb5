"""Segments of the FP8 layer that take and return plain arrays."""

from coat_jax.layers import flow, parts


def attention_in(params, x, norm, heads, keep_copies=False):
    stream = parts.Stream.of(x)
    return flow.attention_in(params, stream, norm, heads, keep_copies)


def attention_out(params, o, x):
    return parts.leave(flow.attention_out(params, o, x))


def gated_mlp(params, x, norm, gate):
    return parts.leave(flow.gated_mlp(params, parts.Stream.of(x), norm, gate))
