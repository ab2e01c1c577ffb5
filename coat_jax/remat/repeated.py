"""Finds the residuals that a backward pass multiplies by again and again.

The gradient of a recurrence such as `h = a * h + u` is multiplied by `a` at every step.
Each copy in FP8 has an error of about 3%, and in a long product the errors add up: 0.99
is 1 in a copy, and after 300 steps a gradient would be 20 times too large. So arrays by
which a loop multiplies its carry are saved unquantized, and so are arrays of which many
elements are multiplied with each other, as in `jax.lax.associative_scan`. A gradient
that passes through a matmul or a sum between two steps does not count, as in a stack of
layers: errors of many elements average out there.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from jax.extend import core

from coat_jax.programs.graph import inlined, written_out
from coat_jax.programs.primitives import Operand, bodies_of, is_layout, variables
from coat_jax.remat.errors import is_cheap
from coat_jax.remat.kernels import known_inside
from coat_jax.remat.policies import CHECKPOINT
from coat_jax.remat.trace import Linearized

# The number of elements of each residual that a product has as factors.
_Factors = dict[int, int]
# The residuals that each carry of a loop is multiplied by in an array.
_Paths = dict[core.Var, dict[int, frozenset[int]]]

_MANY = 16  # The errors of fewer factors do not add up to much.
_PRODUCTS = frozenset({"cumprod", "reduce_prod"})
_SUMS = frozenset({"add", "add_any", "sub"})
_MOVES = frozenset({"concatenate", "dynamic_slice", "dynamic_update_slice", "pad"})
# Operations of which a result has as many factors as the operand with the most.
_KEEPING = _SUMS | _MOVES | {"abs", "max", "min", "neg", "select_n"}


def repeated_factors(traced: Linearized) -> set[int]:
    """Returns the indices of the residuals that gradients are multiplied by repeatedly.

    A residual counts if the factor is computed from residuals alone, by elementwise
    operations.
    """
    backward = written_out(traced.backward.jaxpr)
    residuals = backward.invars[: len(traced.residuals)]
    factors = {v: {i: 1} for i, v in enumerate(residuals)}
    return {i for repeated in _repeated(backward, factors) for i in repeated}


def _repeated(
    program: core.Jaxpr, factors: dict[core.Var, _Factors]
) -> Iterator[Iterable[int]]:
    """Yields the residuals by which a program multiplies again and again.

    `factors` has the factors of each input that follows from residuals alone. The
    factors of further variables are added to it.
    """
    factors |= {v: {} for v in program.constvars}
    for eqn in program.eqns:
        for body in bodies_of(eqn):
            body = written_out(inlined(written_out(body), _is_checkpoint))
            inside = known_inside(eqn, body, factors)
            yield from _repeated(body, inside)
            if eqn.primitive.name == "scan":
                yield _multiplying_the_carry(eqn, body, inside)
        if not variables(eqn.invars) <= factors.keys():
            continue
        operands = [_at(v, factors) for v in eqn.invars]
        if eqn.primitive.name in _PRODUCTS:
            yield operands[0]
        elif is_cheap(eqn) or eqn.primitive.name in _MOVES:
            result = _of_result(eqn, operands)
            factors |= dict.fromkeys(eqn.outvars, result)
            yield [i for i, count in result.items() if count >= _MANY]


def _of_result(eqn: core.JaxprEqn, operands: list[_Factors]) -> _Factors:
    """Returns the factors in an operation's result; `operands` has its operands'."""
    counts = {i: [x.get(i, 0) for x in operands] for x in operands for i in x}
    name = eqn.primitive.name
    if name == "mul":
        return {i: sum(each) for i, each in counts.items()}
    if name == "square":
        return {i: 2 * max(each) for i, each in counts.items()}
    keeps = is_layout(eqn) or name in _KEEPING
    return {i: max(each) if keeps else 1 for i, each in counts.items()}


def _multiplying_the_carry(
    loop: core.JaxprEqn, body: core.Jaxpr, factors: Mapping[core.Var, _Factors]
) -> set[int]:
    """Returns the residuals by which a carry is multiplied on a way back to itself.

    Args:
      loop: A loop by `scan`.
      body: The program of a step, with its calls inlined.
      factors: The factors of its variables that follow from residuals alone.
    """
    results = zip(loop.outvars, body.outvars, strict=True)
    ends = [v for stack, v in results if stack.aval.ndim == v.aval.ndim]
    operands = zip(loop.invars, body.invars, strict=True)
    unstacked = [v for x, v in operands if x.aval.ndim == v.aval.ndim]
    starts = unstacked[len(unstacked) - len(ends) :]  # Constants come before the carry.
    paths: _Paths = {v: {i: frozenset()} for i, v in enumerate(starts)}
    for eqn in body.eqns:
        if is_cheap(eqn) or eqn.primitive.name in _MOVES:
            passed = [paths[v] for v in variables(eqn.invars) if v in paths]
            if passed:
                by = _joined(eqn, passed, factors)
                paths |= dict.fromkeys(eqn.outvars, by)
    steps = [_at(v, paths) or {} for v in ends]
    return {
        factor
        for end, by_start in enumerate(steps)
        for start, by in by_start.items()
        if by and _leads(end, start, steps)
        for factor in by
    }


def _joined(
    eqn: core.JaxprEqn,
    passed: Sequence[Mapping[int, frozenset[int]]],
    factors: Mapping[core.Var, _Factors],
) -> dict[int, frozenset[int]]:
    """Returns, for each carry, the residuals it is multiplied by in a result.

    A sum with the carry itself has none: the error of `b` is small in `(1 + b) * carry`
    where `b` is. `passed` has the residuals of the operands that follow from carries.
    """
    joined: dict[int, frozenset[int]] = {}
    for carry in {carry for each in passed for carry in each}:
        ways = [each[carry] for each in passed if carry in each]
        joined[carry] = frozenset().union(*ways)
        if eqn.primitive.name in _SUMS and not all(ways):
            joined[carry] = frozenset()
        elif eqn.primitive.name == "mul":
            by = [_at(v, factors) or () for v in eqn.invars]
            joined[carry] = joined[carry].union(*by)
    return joined


def _leads(start: int, end: int, steps: Sequence[Mapping[int, object]]) -> bool:
    """Returns whether steps lead from one carry to another.

    `steps` has the carries from which each carry is computed in a step.
    """
    reached = [end]
    for carry in reached:
        reached += [source for source in steps[carry] if source not in reached]
    return start in reached


def _at(operand: Operand, entries: Mapping[core.Var, object]) -> object:
    """Returns the entry of an operand, or None; {} for a literal."""
    return entries.get(operand) if isinstance(operand, core.Var) else {}


def _is_checkpoint(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive.name == CHECKPOINT
