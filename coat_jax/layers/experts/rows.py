"""Rows of tokens that are sorted by expert, one for each expert of a token."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

import pallas_kernels as kernels
from coat_jax.fp8.matmul import once
from coat_jax.fp8.rows import taken, total
from coat_jax.layers.experts.routing import group_sizes
from pallas_kernels import GroupTiles
from pallas_kernels.checks import CODES
from pallas_kernels.ops.grouped_matmul.tiles import ROWS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """An order of rows by expert, and the token of each row.

    A choice is a pair of a token and one of its experts. Token t has the choices
    `t * choices` to `(t + 1) * choices - 1`. Rows of padding have the choice
    `tokens * choices`, which no token has.

    Attributes:
      choice: The choice of each row, int32.
      sizes: The number of rows of each expert, int32.
      choices: The number of experts of a token.
      tokens: The number of tokens.
    """

    choice: Int[Array, " rows"]
    sizes: Int[Array, " experts"]
    choices: int = dataclasses.field(metadata={"static": True})
    tokens: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def sorted_by_expert(
        cls, ids: Int[Array, "tokens choices"], groups: int, *, padding: int = 0
    ) -> "Rows":
        """Sorts the choices of tokens by their experts `ids`, in a stable order.

        `padding` rows of padding follow, and as many more as are needed to make the
        number of choices a multiple of 8, as the kernels require.
        """
        choice = jnp.argsort(ids.reshape(-1), stable=True).astype(jnp.int32)
        padding += -ids.size % ROWS
        choice = jnp.pad(choice, (0, padding), constant_values=ids.size)
        return cls.of(choice, group_sizes(ids, groups), ids.shape)

    @classmethod
    def of(cls, choice: Array, sizes: Array, shape: tuple[int, int]) -> "Rows":
        """Returns rows with the attributes `choice` and `sizes`.

        `shape` is the number of tokens, and the number of choices of each token.
        """
        tokens, choices = shape
        return cls(choice=choice, sizes=sizes, choices=choices, tokens=tokens)

    @property
    def saved(self) -> tuple[Array, Array]:
        """The arrays to save as residuals; `of` returns equal rows from them."""
        return self.choice, self.sizes

    def tiles(self) -> GroupTiles:
        """Returns the kernels' tiles of these rows, which all their matmuls share."""
        return kernels.group_tiles(self.sizes, rows=len(self.choice))

    def of_tokens(self, x: Shaped[Array, "tokens *n"]) -> Shaped[Array, "rows *n"]:
        """Gathers, for each row, the row of `x` that belongs to its token.

        Rows of padding are zeros; if `x` holds FP8 codes, they are undefined.
        """
        if x.ndim == 2 and x.dtype in CODES:
            return kernels.copy_rows(x, self._places(), rows=len(self.choice))
        return taken(x, self._token)

    def transposed(self, x: Float[Array, "tokens n"]) -> Float[Array, "n padded"]:
        """Returns `of_tokens(x)` for codes `x`, transposed by `grouped_transpose`."""
        return kernels.grouped_transpose(x, self.sizes, index=self._token)

    @property
    def _token(self) -> Int[Array, " rows"]:
        return self.choice // self.choices

    def of_choices(self, x: Shaped[Array, "tokens choices"]) -> Shaped[Array, " rows"]:
        """Gathers, for each row, the element of `x` for its choice; padding is zero."""
        return taken(x.reshape(-1), self.choice)

    def to_choices(self, x: Shaped[Array, " rows"]) -> Shaped[Array, "tokens choices"]:
        """Gathers, for each choice, the element of `x` for its row.

        This is the inverse of `of_choices`.
        """
        return once(x)[self._places()]

    def sums(
        self,
        x: Float[Array, "rows n"],
        add: Float[Array, "tokens n"] | None = None,
        dtype: DTypeLike = jnp.float32,
    ) -> Float[Array, "tokens n"]:
        """Sums the rows of each token and `add` in float32, and rounds to `dtype`."""
        return total(x, self._places(), add, dtype=dtype)

    def _places(self) -> Int[Array, "tokens choices"]:
        """Returns the index of each choice's row."""
        places = jnp.zeros(self.tokens * self.choices, jnp.int32)
        rows = jnp.arange(len(self.choice), dtype=jnp.int32)
        places = places.at[self.choice].set(rows, mode="drop")
        # Without `once` XLA would repeat the scatter wherever the result is read.
        return once(places.reshape(self.tokens, self.choices))

    def common(self, scale: Float[Array, ""]) -> Float[Array, ""]:
        """Returns `scale`: all rows come from this device, and have its scale."""
        return scale


@jax.custom_vjp
def sums_of_tokens(x: Float[Array, "rows n"], rows: Rows) -> Float[Array, "tokens n"]:
    """Computes `rows.sums(x)`; the gradient of a row is its token's gradient."""
    return rows.sums(x)


def _sums_fwd(x, rows):
    return rows.sums(x), (rows, jnp.zeros(0, x.dtype))


def _sums_bwd(residuals, dy):
    rows, like = residuals
    return rows.of_tokens(dy.astype(like.dtype)), None


sums_of_tokens.defvjp(_sums_fwd, _sums_bwd)


@jax.custom_vjp
def weights_of_rows(
    weights: Float[Array, "tokens choices"], rows: Rows
) -> Float[Array, " rows"]:
    """Computes `rows.of_choices(weights)`; the vjp computes `rows.to_choices`."""
    return rows.of_choices(weights)


def _weights_fwd(weights, rows):
    return rows.of_choices(weights), rows


def _weights_bwd(rows, dy):
    return rows.to_choices(dy), None


weights_of_rows.defvjp(_weights_fwd, _weights_bwd)
