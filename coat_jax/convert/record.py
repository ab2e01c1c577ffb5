"""Records of what a conversion did, for errors, warnings and reports."""

import contextvars
import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence

from coat_jax.convert.rules import Rules
from coat_jax.fp8.dot_general import FEWEST_ROWS
from coat_jax.remat.fingerprint import Neutral

Shapes = Mapping[str, tuple[int, ...]]

ACTIVATIONS = "both operands are activations"
PARAMETERS = "both operands are parameters"
FP8_ALREADY = "in FP8 already"
_LISTED = 6  # The most matmuls that a message lists.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matmul:
    """A matmul of a block, as `coat.fp8` found it.

    Attributes:
      block: The path of the block; "" is the whole function or model.
      parameter: The paths of the parameters among its operands, or "".
      left: The shape of its first operand.
      right: The shape of its second operand.
      rows: The number of rows of the activations in this call.
      reason: Why the matmul does not become an FP8 matmul, or "" if it does.
    """

    block: str
    parameter: str
    left: tuple[int, ...]
    right: tuple[int, ...]
    rows: int
    reason: str

    @property
    def converted(self) -> bool:
        """True if the matmul becomes an FP8 matmul."""
        return not self.reason

    @property
    def runs_in_fp8(self) -> bool:
        """True if the matmul becomes an FP8 matmul and has enough rows for FP8."""
        return self.converted and self.rows >= FEWEST_ROWS

    def __str__(self) -> str:
        name = f"{self.parameter} " if self.parameter else ""
        operands = f"{list(self.left)} x {list(self.right)}"
        return f"{name}({operands}: {self.reason or 'FP8'})"


class ModelRecord:
    """A record of a model's blocks, and of the blocks that have no FP8 matmul.

    All conversions of a model's blocks share one record. Conversions of two models are
    never equal, because records are compared by identity.

    Attributes:
      called: Whether a block of a Linen model has been called.
    """

    def __init__(
        self, rules: str, blocks: Iterable[Shapes] = (), *, keep_matmuls: bool = False
    ):
        """Makes a record in which no block has been converted yet.

        Args:
          rules: The rules of the conversion, for messages.
          blocks: The shapes of the parameters of each block; empty for a function.
          keep_matmuls: Whether the rules keep all matmuls as they are.
        """
        self.called = False
        self._rules = rules
        self._keep_matmuls = keep_matmuls
        unique = {frozenset(shapes.items()) for shapes in blocks}
        self._blocks = [dict(shapes) for shapes in unique]
        self._left: set[int] = set()
        self._converts = False
        self._warned: set[str] = set()

    @classmethod
    def of(cls, rules: Rules, blocks: Iterable[Shapes] = ()) -> "ModelRecord":
        """Returns a new record of a conversion by `rules`."""
        return cls(str(rules), blocks, keep_matmuls=rules.keep_matmuls)

    def finish(self, block: str, shapes: Shapes, matmuls: Sequence[Matmul]) -> bool:
        """Records the matmuls of a block, and warns if none of them is or becomes FP8.

        There is no warning if the rules keep all matmuls as they are.

        Args:
          block: The path of the block.
          shapes: The shapes of the block's parameters.
          matmuls: All matmuls of the block.

        Returns:
          Whether a matmul of the block becomes an FP8 matmul, or is one already.

        Raises:
          ValueError: If no block of the model has an FP8 matmul, against the rules.
        """
        if any(m.converted or m.reason == FP8_ALREADY for m in matmuls):
            self._converts = True
            return True
        if self._keep_matmuls:
            return False
        reasons = {m.reason for m in matmuls}
        if not self._blocks and reasons and reasons <= {ACTIVATIONS, PARAMETERS}:
            return False  # A function of such matmuls alone has nothing to convert.
        equal = (i for i, b in enumerate(self._blocks) if _is_slice(shapes, b))
        self._left.update(equal)
        listed = "; ".join(map(str, matmuls[:_LISTED])) or "it has no matmul"
        more = f"; and {len(matmuls) - _LISTED} more" if matmuls[_LISTED:] else ""
        name = f"the block {block}" if block else "the function"
        if not self._converts and len(self._left) == len(self._blocks):
            raise ValueError(
                f"coat.fp8 with {self._rules} converts no matmul; matmuls of {name}: "
                f"{listed}{more}"
            )
        self.warn(
            f"no matmul of {name} becomes an FP8 matmul with {self._rules}: "
            f"{listed}{more}"
        )
        return False

    def warn(self, message: str) -> None:
        """Gives the warning `message`, unless this record has given it before."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=2)


def _is_slice(shapes: Shapes, stacked: Shapes) -> bool:
    """Returns whether `stacked` equals `shapes`, apart from further leading axes."""
    return shapes.keys() == stacked.keys() and all(
        stacked[path][len(stacked[path]) - len(shape) :] == tuple(shape)
        for path, shape in shapes.items()
    )


class Label(Neutral):
    """The path of a block and the record of its model, as an attribute of the block.

    All labels are equal to each other, so that blocks which differ in nothing else are
    traced once.
    """

    def __init__(self, path: str, model: ModelRecord):
        self.path, self.model = path, model


class Log:
    """A log of the matmuls of one call of a block, which `fp8_report` reads."""

    def __init__(self, block: str):
        self.block = block
        self.matmuls: tuple[Matmul, ...] = ()


@dataclasses.dataclass
class Records:
    """The blocks and calls of a converted model, which `fp8_report` reads.

    Attributes:
      blocks: The paths of all blocks, as keys.
      logs: A log for each call of a block.
    """

    blocks: dict[str, None] = dataclasses.field(default_factory=dict)
    logs: list[Log] = dataclasses.field(default_factory=list)


current: contextvars.ContextVar[Records | None] = contextvars.ContextVar(
    "records", default=None
)


def new_log(block: str) -> Log | None:
    """Returns a log for a call of a block, or None unless a report is being made."""
    records = current.get()
    if records is None:
        return None
    records.blocks.setdefault(block)
    records.logs.append(Log(block))
    return records.logs[-1]
