"""Rows of tokens that are sorted by expert, one for each expert of a token."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

import pallas_kernels as kernels
from coat_jax.layers.experts.routing import group_sizes
from pallas_kernels import GroupTiles
from pallas_kernels.ops.grouped_matmul.tiles import BLOCK, ROWS
from pallas_kernels.ops.grouped_matmul.transposed import pad_groups


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """An order of rows by expert, and the token of each row.

    A token t has the choices `t * choices` to `(t + 1) * choices - 1`, one for each of
    its experts. Rows of padding have the choice `tokens * choices`, which no token has.

    Attributes:
      choice: The choice of each row, int32.
      sizes: The number of rows of each expert, int32, with padding between experts.
      real_sizes: The number of rows of each expert without padding.
      choices: The number of experts of a token.
      tokens: The number of tokens.
      origin: The index of each padded row among rows without padding, and for padding
        their number; None for rows without padding.
    """

    choice: Int[Array, " rows"]
    sizes: Int[Array, " experts"]
    real_sizes: Int[Array, " experts"]
    choices: int = dataclasses.field(metadata={"static": True})
    tokens: int = dataclasses.field(metadata={"static": True})
    origin: Int[Array, " rows"] | None = None

    @classmethod
    def sorted_by_expert(cls, ids: Int[Array, "tokens choices"], groups: int) -> "Rows":
        """Sorts the choices of tokens by their experts `ids`; equal ones keep order.

        Rows of padding follow, up to a multiple of 8, as the kernels need it.
        """
        choice = jnp.argsort(ids.reshape(-1), stable=True).astype(jnp.int32)
        return cls.of(choice, group_sizes(ids, groups), ids.shape)

    @classmethod
    def of(cls, choice: Array, sizes: Array, shape: tuple[int, int]) -> "Rows":
        """Returns rows without padding between experts.

        Args:
          choice: The choices, sorted by expert.
          sizes: The number of choices of each expert.
          shape: The numbers of tokens and of their choices.
        """
        tokens, choices = shape
        padding = -len(choice) % ROWS
        choice = jnp.pad(choice, (0, padding), constant_values=tokens * choices)
        counts = {"choices": choices, "tokens": tokens}
        return cls(choice=choice, sizes=sizes, real_sizes=sizes, **counts)

    def padded(self) -> "Rows":
        """Returns rows in which every expert begins at a multiple of 128.

        Weight gradients read their transposes.
        """
        origin = padded_origin(self.sizes, len(self.choice))
        nothing = self.tokens * self.choices
        return dataclasses.replace(
            self,
            choice=taken(self.choice, origin, nothing),
            sizes=-(-self.sizes // BLOCK) * BLOCK,
            origin=origin,
        )

    @property
    def saved(self) -> tuple[Array, Array]:
        """The arrays that `of` takes."""
        return self.choice, self.sizes

    def tiles(self) -> GroupTiles:
        """Lists the tiles of rows, for all matmuls of them."""
        return kernels.group_tiles(self.sizes, rows=len(self.choice))

    def of_tokens(self, x: Shaped[Array, "tokens *n"]) -> Shaped[Array, "rows *n"]:
        """Returns the row of each row's token, and zeros for padding."""
        return taken(x, self.choice // self.choices)

    def of_unpadded(self, x: Shaped[Array, "unpadded *n"]) -> Shaped[Array, "rows *n"]:
        """Returns padded rows of an array of rows without padding."""
        return taken(x, self.origin)

    def of_choices(self, x: Shaped[Array, "tokens choices"]) -> Shaped[Array, " rows"]:
        """Returns the element of each row's choice, and zero for padding."""
        return taken(x.reshape(-1), self.choice)

    def to_choices(self, x: Shaped[Array, " rows"]) -> Shaped[Array, "tokens choices"]:
        """Returns each choice's element of `x`, the inverse of `of_choices`."""
        flat = jnp.zeros(self.tokens * self.choices, x.dtype)
        flat = flat.at[self.choice].set(x, mode="drop")
        return flat.reshape(self.tokens, self.choices)

    def sums(self, x: Float[Array, "rows n"]) -> Float[Array, "tokens n"]:
        """Adds up the rows of each token, in float32."""
        places = self.to_choices(jnp.arange(len(self.choice), dtype=jnp.int32))
        return jnp.sum(x[places].astype(jnp.float32), axis=1)

    def common(self, scale: Float[Array, ""]) -> Float[Array, ""]:
        """Returns `scale`: all rows are of one device's tokens."""
        return scale


def padded_origin(sizes: Int[Array, " experts"], rows: int) -> Int[Array, " padded"]:
    """Returns the row at each place if every expert begins at a multiple of 128.

    Places of padding have the number of `rows`.
    """
    numbers = jnp.arange(1, rows + 1, dtype=jnp.int32)[:, None]
    origin = pad_groups(numbers, sizes)[:, 0] - 1
    return jnp.where(origin < 0, rows, origin)


def taken(
    x: Shaped[Array, "n *m"], index: Int[Array, " k"], fill: int = 0
) -> Shaped[Array, "k *m"]:
    """Returns rows of `x`, and `fill` for an index of n."""
    return x.at[index].get(mode="fill", fill_value=fill)


@jax.custom_vjp
def sums_of_tokens(x: Float[Array, "rows n"], rows: Rows) -> Float[Array, "tokens n"]:
    """Computes `rows.sums`. The gradient of a row is the gradient of its token."""
    return rows.sums(x)


def _sums_fwd(x, rows):
    return rows.sums(x), (rows, jnp.zeros(0, x.dtype))


def _sums_bwd(residuals, dy):
    rows, like = residuals
    return rows.of_tokens(dy.astype(like.dtype)), None


sums_of_tokens.defvjp(_sums_fwd, _sums_bwd)


@jax.custom_vjp
def of_choices(x: Float[Array, "tokens choices"], rows: Rows) -> Float[Array, " rows"]:
    """Computes `rows.of_choices`. The gradient of a choice is its row's."""
    return rows.of_choices(x)


def _of_choices_fwd(x, rows):
    return rows.of_choices(x), rows


def _of_choices_bwd(rows, dy):
    return rows.to_choices(dy), None


of_choices.defvjp(_of_choices_fwd, _of_choices_bwd)
