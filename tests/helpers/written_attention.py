"""Programs that write out softmax attention in many ways, and near misses.

Each is a function of queries [B, T, N, D], keys, values, and a mask [B, T, T].
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

BF16, F32 = jnp.bfloat16, jnp.float32
B, T, N, K, D = 3, 16, 4, 2, 8
SCALE = D**-0.5


def arguments(heads=N):
    """Returns queries, keys, values, and a mask that shows each query its own key."""
    rng = np.random.default_rng(0)
    shapes = [(B, T, n, D) for n in (N, heads, heads)]
    arrays = [jnp.asarray(rng.normal(size=shape), BF16) for shape in shapes]
    return *arrays, jnp.asarray(rng.random((B, T, T)) > 0.3) | jnp.eye(T, dtype=bool)


def scores(q, k, dtype=None):
    return jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=dtype)


def mixed(p, v):
    return jnp.einsum("bhts,bshd->bthd", p.astype(v.dtype), v)


def softmax(s):
    return jax.nn.softmax(s, axis=-1)


def usual(q, k, v, mask):
    return mixed(softmax(jnp.where(mask[:, None], scores(q, k) * SCALE, -1e9)), v)


def tril(size=T, offset=0):
    return jnp.tril(jnp.ones((size, size), bool), offset)


def in_float32(q, k, v, mask):
    s = scores(q, k, F32) / math.sqrt(D)
    return mixed(softmax(jnp.where(mask[:, None], s, jnp.finfo(F32).min)), v)


def of_wide_operands(q, k, v, mask):
    q, k, v = (x.astype(F32) for x in (q, k, v))
    return usual(q, k, v, mask).astype(BF16)


def with_wide_result(q, k, v, mask):
    p = softmax(jnp.where(mask[:, None], scores(q, k) * SCALE, -1e9))
    y = jnp.einsum("bhts,bshd->bhtd", p, v, preferred_element_type=F32)
    return y.transpose(0, 2, 1, 3).astype(BF16)


def heads_first(q, k, v, mask):
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    s = (q @ k.swapaxes(-1, -2)).astype(F32) / jnp.sqrt(D)
    p = softmax(jnp.where(mask[:, None], s, -jnp.inf)).astype(BF16)
    return (p @ v).transpose(0, 2, 1, 3)


def sequence_first(q, k, v, mask):
    q, k, v = (x.transpose(1, 0, 2, 3) for x in (q, k, v))
    s = jnp.einsum("tbhd,sbhd->bhts", q, k) * SCALE
    p = softmax(jnp.where(mask[:, None], s, -1e9))
    return jnp.einsum("bhts,sbhd->tbhd", p, v).transpose(1, 0, 2, 3)


def keys_first(q, k, v, mask):
    s = jnp.einsum("bshd,bthd->bhst", k, q) * SCALE
    s = jnp.where(mask.swapaxes(1, 2)[:, None], s, -1e9)
    return jnp.einsum("bhst,bshd->bthd", jax.nn.softmax(s, axis=-2), v)


def mapped(q, k, v, mask):
    def of_head(q, k, v, mask):
        return softmax(jnp.where(mask, q @ k.T * SCALE, -1e9)) @ v

    return jax.vmap(jax.vmap(of_head, (1, 1, 1, None), 1))(q, k, v, mask)


def by_hand(q, k, v, mask):
    s = jnp.where(mask[:, None], scores(q, k).astype(F32) * SCALE, -1e9)
    e = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
    return mixed(e / e.sum(-1, keepdims=True), v)


def added_mask(q, k, v, mask):
    bias = jnp.where(tril(), 0.0, -1e9).astype(BF16)
    return mixed(softmax((scores(q, k) * SCALE + bias).astype(F32)), v)


def added_number(q, k, v, mask):
    bias = jnp.where(mask[:, None], 0.0, -1e9).astype(BF16)
    return mixed(softmax(scores(q, k) * SCALE + bias), v)


def added_minimum(q, k, v, mask):
    causal = jnp.logical_and(mask.astype(jnp.int32), tril()).astype(F32)
    bias = jax.lax.select(
        causal > 0, jnp.full(mask.shape, 0, BF16), jnp.full_like(mask, -3e38, BF16)
    )
    q, k = (x.astype(F32) for x in (q / math.sqrt(D), k))
    return mixed(softmax(scores(q, k) + bias[:, None]), v)


def added_minimum_in_groups(q, k, v, mask):
    groups = q.reshape(B, T, K, N // K, D)
    s = jnp.einsum("btkgd,bskd->bkgts", groups, k).astype(F32) * SCALE
    p = softmax(s + jnp.where(mask[:, None, None], 0, jnp.finfo(F32).min))
    p = p.astype(BF16)
    return jnp.einsum("bkgts,bskd->btkgd", p, v).reshape(B, T, N, D)


def added_bias_of_jax(q, k, v, mask):
    bias = jnp.where(mask[:, None], 0, jnp.finfo(BF16).min).astype(BF16)
    return jax.nn.dot_product_attention(q, k, v, bias=bias)


def added_bias_of_linen(q, k, v, mask):
    bias = jnp.where(mask[:, None], 0, jnp.finfo(BF16).min).astype(BF16)
    return nn.dot_product_attention(q, k, v, bias=bias)


def inverted_mask(q, k, v, mask):
    return mixed(softmax(jnp.where(~mask[:, None], -1e10, scores(q, k, F32))), v)


def two_masks(q, k, v, mask):
    s = jnp.where(tril(), scores(q, k) * SCALE, -1e9)
    return mixed(softmax(jnp.where(mask[:, None], s, -1e9)), v)


def union_of_masks(q, k, v, mask):
    return usual(q, k, v, ~(~mask & ~tril()))


def own_heads_mask(q, k, v, mask):
    heads = jnp.arange(N)[:, None, None] < jnp.arange(T) + 1
    s = jnp.where(heads, scores(q, k) * SCALE, -1e9)
    return mixed(softmax(s), v)


def unmasked(q, k, v, mask):
    return mixed(softmax(scores(q * SCALE, k)), v)


def causal(q, k, v, mask):
    return usual(q, k, v, tril()[None])


def causal_by_positions(q, k, v, mask):
    at = jnp.arange(T)
    return in_float32(q, k, v, (at[:, None] >= at)[None])


def upper(q, k, v, mask):
    return usual(q, k, v, tril().T[None])


def window(q, k, v, mask):
    return usual(q, k, v, (tril() & ~tril(offset=-4))[None])


def of_linen(q, k, v, mask):
    return nn.dot_product_attention(q, k, v, mask=mask[:, None])


def of_linen_causal(q, k, v, mask):
    return nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(q[..., 0, 0]))


def of_nnx(q, k, v, mask):
    return nnx.dot_product_attention(q, k, v, mask=mask[:, None])


def of_jax(q, k, v, mask):
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])


def of_jax_causal(q, k, v, mask):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def of_jax_unmasked(q, k, v, mask):
    return jax.nn.dot_product_attention(q, k, v)


def in_groups(q, k, v, mask):
    groups = q.reshape(B, T, K, N // K, D)
    s = jnp.einsum("btkgd,bskd->bkgts", groups, k) * SCALE
    p = softmax(jnp.where(mask[:, None, None], s, -1e9))
    return jnp.einsum("bkgts,bskd->btkgd", p, v).reshape(B, T, N, D)


def in_merged_groups(q, k, v, mask):
    groups = q.reshape(B, T, K, N // K, D)
    s = jnp.einsum("btkgd,bskd->bkgts", groups, k).reshape(B, N, T, T) * SCALE
    p = softmax(jnp.where(mask[:, None], s, -1e9).astype(F32)).astype(BF16)
    p = p.reshape(B, K, N // K, T, T)
    return jnp.einsum("bkgts,bskd->btkgd", p, v).reshape(B, T, N, D)


def of_one_key_head(q, k, v, mask):
    s = jnp.einsum("bthd,bsd->bhts", q, k[:, :, 0]) * SCALE
    p = softmax(jnp.where(mask[:, None], s, -1e9))
    return jnp.einsum("bhts,bsd->bthd", p, v[:, :, 0])


def rotated(x):
    """Returns x with each half of a head rotated into the other, in float32."""
    steps = jnp.arange(x.shape[1], dtype=F32)[:, None, None]
    angles = steps / 10 ** jnp.linspace(0, 2, x.shape[-1] // 2)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    cos, sin = (jnp.concatenate([a, a], axis=-1) for a in (cos, sin))
    left, right = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-right, left], axis=-1) * sin


def of_rotated_halves(q, k, v, mask):
    s = jnp.where(mask[:, None], scores(rotated(q), rotated(k)) * SCALE, -1e9)
    return mixed(softmax(s), v)


def of_rotated_norms(q, k, v, mask):
    q, k = (x.astype(F32) for x in (q, k))
    q, k = (x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) for x in (q, k))
    p = softmax(jnp.where(tril(), scores(rotated(q), rotated(k)), -1e9))
    return jnp.einsum("bhts,bshd->bthd", p, v).astype(BF16)


def of_complex_heads(q, k, v, mask):
    turns = jnp.exp(1j * jnp.arange(T, dtype=F32)[:, None, None] / jnp.arange(1, 5))

    def turned(x):
        pairs = x.astype(F32).reshape(*x.shape[:-1], -1, 2)
        z = jax.lax.complex(pairs[..., 0], pairs[..., 1]) * turns
        return jnp.stack([z.real, z.imag], axis=-1).reshape(x.shape)

    return usual(turned(q), turned(k), v, mask)


# The mask that flash attention reads, and whether it is causal.
MASKED, CAUSAL, BARE = ((B, 1, T, T), False), (False, True), (False, False)
SHARED = ((1, 1, T, T), False)
HITS = {
    **dict.fromkeys(
        (
            usual, in_float32, of_wide_operands, with_wide_result, heads_first,
            sequence_first, keys_first, mapped, by_hand, inverted_mask,
            two_masks, union_of_masks, of_linen, of_nnx, of_jax, added_number,
            added_minimum, added_bias_of_jax, added_bias_of_linen, of_rotated_halves,
            of_complex_heads,
        ),
        MASKED,
    ),
    **dict.fromkeys(
        (
            causal, causal_by_positions, of_linen_causal, of_jax_causal, added_mask,
            of_rotated_norms,
        ),
        CAUSAL,
    ),
    **dict.fromkeys((unmasked, of_jax_unmasked), BARE),
    **dict.fromkeys((upper, window), SHARED),
    own_heads_mask: ((N, 1, T, T), False),  # Heads are sequences there.
}  # fmt: skip
GROUPED = dict.fromkeys(
    (
        in_groups, in_merged_groups, of_one_key_head, of_jax, added_minimum_in_groups,
        added_bias_of_jax,
    ),
    MASKED,
)  # fmt: skip
GROUPED[of_jax_causal] = CAUSAL


def dropout(q, k, v, mask):
    p = softmax(scores(q, k))
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, p.shape)
    return mixed(jnp.where(kept, p / 0.9, 0), v)


def soft_cap(q, k, v, mask):
    return mixed(softmax(5 * jnp.tanh(scores(q, k) / 5)), v)


def bias(q, k, v, mask):
    return mixed(softmax(scores(q, k) + jnp.arange(T, dtype=BF16)), v)


def bias_with_gradient(q, k, v, mask):
    return mixed(softmax(scores(q, k) - 1e9 * (1 - mask[:, None] * q[0, 0, 0, 0])), v)


def added_number_that_rounds_scores(q, k, v, mask):
    return mixed(softmax(scores(q, k, F32) + jnp.where(mask[:, None], 0, -1e9)), v)


def replaced_and_added(q, k, v, mask):
    s = jnp.where(tril(), scores(q, k), -1e9)
    return mixed(softmax(s + jnp.where(mask[:, None], 0, -1e9).astype(BF16)), v)


def masks_of_two_sums(q, k, v, mask):
    bias = jnp.where(tril(), 0, -1e9).astype(BF16)
    hidden = jnp.where(mask[:, None], 0, -1e9).astype(BF16)
    return mixed(softmax(scores(q, k) + bias + hidden), v)


def masks_of_two_numbers(q, k, v, mask):
    s = jnp.where(tril(), scores(q, k), -1e10)
    return mixed(softmax(jnp.where(mask[:, None], s, -1e9)), v)


def denominator_without_gradient(q, k, v, mask):
    s = scores(q, k)
    e = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
    return mixed(e / jax.lax.stop_gradient(e.sum(-1, keepdims=True)), v)


def probabilities_of_probabilities(q, k, v, mask):
    p = softmax(scores(q, k))
    return jnp.einsum("bhts,bhsr->bhtr", p, p)


def values_that_are_scores(q, k, v, mask):
    s = scores(q[:, :D], k[:, :D])
    return jnp.einsum("bhts,bhsr->bhtr", softmax(s), s)


def scale_with_gradient(q, k, v, mask):
    return mixed(softmax(scores(q, k) * q[0, 0, 0, 0]), v)


def negative_scale(q, k, v, mask):
    return mixed(softmax(scores(q, k) * -SCALE), v)


def scale_of_masked(q, k, v, mask):
    return mixed(softmax(jnp.where(mask[:, None], scores(q, k), -1e9) * SCALE), v)


def small_mask(q, k, v, mask):
    return mixed(softmax(jnp.where(mask[:, None], scores(q, k), -5.0)), v)


def returned_probabilities(q, k, v, mask):
    p = softmax(scores(q, k))
    return mixed(p, v), p


def read_scores(q, k, v, mask):
    s = scores(q, k)
    return mixed(softmax(s), v) + s.mean()


def masked_probabilities(q, k, v, mask):
    return mixed(softmax(scores(q, k)) * mask[:, None], v)


def over_queries(q, k, v, mask):
    return mixed(jax.nn.softmax(scores(q, k), axis=-2), v)


def over_heads(q, k, v, mask):
    return mixed(jax.nn.softmax(scores(q, k), axis=1), v)


def sum_of_columns(q, k, v, mask):
    s = scores(q, k)
    e = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
    return mixed(e / e.sum(-1)[:, :, None], v)


def maximum_of_columns(q, k, v, mask):
    s = scores(q, k)
    e = jnp.exp(s - jax.lax.stop_gradient(s.max(-2, keepdims=True)))
    return mixed(e / e.sum(-1, keepdims=True), v)


def constant_scores(q, k, v, mask):
    return mixed(softmax(jax.lax.stop_gradient(scores(q, k))), v)


def rounded_scores(q, k, v, mask):
    s = scores(q, k).astype(jnp.float8_e4m3fn).astype(BF16)
    return mixed(softmax(s), v)


def whole_scores(q, k, v, mask):
    return mixed(softmax(scores(q, k).astype(jnp.int32).astype(F32)), v)


def transposed_probabilities(q, k, v, mask):
    return jnp.einsum("bhst,bshd->bthd", softmax(scores(q, k)), v)


def other_heads(q, k, v, mask):
    return jnp.einsum("bhts,bsgd->bthd", softmax(scores(q, k)), v)


def narrow_values(q, k, v, mask):
    return mixed(softmax(scores(q, k)), v[..., :4])


def wide(q, k, v, mask):
    return usual(*(x.astype(F32) for x in (q, k, v)), mask)


def wide_products(q, k, v, mask):
    p = softmax(scores(q, k))
    return jnp.einsum("bhts,bshd->bthd", p, v, preferred_element_type=F32)


def exact_queries(q, k, v, mask):
    return usual(q.astype(F32) + jnp.arange(D) / 3, k, v, mask).astype(BF16)


def rotated_wide(q, k, v, mask):
    return usual(rotated(q), rotated(k), v.astype(F32) + 1e-3, mask).astype(BF16)


def queries_times_weight(q, k, v, mask):
    q = jnp.exp(q.astype(F32)) * jnp.linspace(0.5, 1, D, dtype=BF16)
    return usual(q, k, v, mask).astype(BF16)


def keys_times_mask(q, k, v, mask):
    shown = mask.any(-1)[..., None, None].astype(BF16)
    return usual(q, jnp.sin(k.astype(F32)) * shown, v, mask).astype(BF16)


def functions_of_queries(q, k, v, mask):
    return usual(jnp.exp(q.astype(F32)), k, v, mask).astype(BF16)


def mask_as_large_as_scores(q, k, v, mask):
    heads = jnp.arange(N)[:, None, None] < mask.sum()
    return mixed(softmax(jnp.where(mask[:, None] & heads, scores(q, k), -1e9)), v)


def nothing_visible(q, k, v, mask):
    return mixed(softmax(jnp.where(False, scores(q, k), -1e9)), v)


def named_probabilities(q, k, v, mask):
    p = checkpoint_name(softmax(scores(q, k)), "p")
    return mixed(p, v)


MISSES = [
    dropout, soft_cap, bias, bias_with_gradient, added_number_that_rounds_scores,
    replaced_and_added, masks_of_two_sums, masks_of_two_numbers,
    denominator_without_gradient, probabilities_of_probabilities,
    values_that_are_scores, scale_with_gradient, negative_scale,
    scale_of_masked, small_mask, returned_probabilities, read_scores,
    masked_probabilities, over_queries, over_heads, sum_of_columns, maximum_of_columns,
    constant_scores, rounded_scores, whole_scores, transposed_probabilities,
    other_heads, narrow_values, wide, wide_products, exact_queries, rotated_wide,
    queries_times_weight, keys_times_mask,
    functions_of_queries, mask_as_large_as_scores,
    nothing_visible, named_probabilities,
]  # fmt: skip
