"""What follows from kept arrays by layout and elementwise arithmetic alone.

Backward computes that again, from FP8 copies too: errors stay those of copies, small
beside the largest of a group. What would make them grow is not computed of copies:
logarithms, exponentials but that of the negative square, and sums of arrays that were
each rounded by itself, which may cancel.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core

from coat_jax.remat.trace import all_eqns, does_work

# What is written out where it is called.
_CALLS = frozenset(
    {"checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "jit"}
)
# Layout: values stay what they are.
_CUTS = frozenset({"slice", "split"})
_MOVES = _CUTS | {"broadcast_in_dim", "reshape", "squeeze", "transpose"}
_CONVERSIONS = frozenset(
    {"convert_element_type", "copy", "name", "reduce_precision", "stop_gradient"}
)
# Arithmetic of copies: sums where nothing cancels.
_SUMS = frozenset({"add", "add_any", "one_minus_square", "sub"})
_SATURATING = frozenset({"erf", "erfc", "logistic", "tanh"})
_GENTLE = frozenset({"abs", "clamp", "max", "min", "mul", "neg", "square"})
# Of copies some of these where other operands are exact; see `_stays_close`.
_OF_EXACT = frozenset(
    {
        *("div", "integer_pow", "pow", "rsqrt", "select_n", "sqrt"),
        *("cos", "exp", "exp2", "expm1", "log", "log1p", "sin"),
        *("and", "eq", "ge", "gt", "le", "lt", "ne", "not", "or"),
    }
)
_CHEAP = _MOVES | _CONVERSIONS | _SUMS | _SATURATING | _GENTLE | _OF_EXACT
# For one array.
_MAX_STEPS = 32


class Known(NamedTuple):
    """How an array follows from what is kept.

    Attributes:
      steps: Operations on the way, but for those that move or convert.
      constant: Whether it follows from parameters and constants alone.
      of: The copies, or what was moved of them, that it is an elementwise function of.
      copies: The FP8 copies that it depends on; none if it is exact.
    """

    steps: int = 0
    constant: bool = True
    of: frozenset[core.Var] = frozenset()
    copies: frozenset[core.Var] = frozenset()


class Derivation:
    """What follows in a program from what is kept of it.

    Attributes:
      known: How each array follows that does.
    """

    def __init__(
        self,
        program: core.Jaxpr,
        constants: Iterable[core.Var | core.Literal],
        group: int,
    ):
        """Of a program without calls, what follows from parameters and constants.

        Groups of `group` elements of copies are not cut.
        """
        self._group = group
        self._makers = {var: eqn for eqn in program.eqns for var in eqn.outvars}
        self._readers = defaultdict(list)
        order = *program.invars, *self._makers
        self._order = {var: place for place, var in enumerate(order)}
        self.known = dict.fromkeys(variables(constants), Known())
        self.known |= dict.fromkeys(program.constvars, Known())
        for eqn in program.eqns:
            operands = variables(eqn.invars)
            for var in operands:
                self._readers[var].append(eqn)
            if self.known.keys() >= operands and not _does_work(eqn):
                self.known |= dict.fromkeys(eqn.outvars, Known())

    def keep(self, var: core.Var) -> None:
        """`var` is kept as it is."""
        if var not in self.known:
            self.known |= self._following(var, Known(constant=False))

    def copy(
        self, wanted: Iterable[core.Var], may_copy: Callable[[core.Var], bool]
    ) -> list[core.Var]:
        """Which FP8 copies to keep so that all of `wanted` follows.

        Args:
          wanted: Arrays.
          may_copy: Which others there may be copies of.
        """
        copied, wanted = [], sorted(set(wanted), key=self._order.__getitem__)
        for var in wanted:
            if var in self.known:
                continue
            missing = [v for v in wanted if v not in self.known]
            sources = (
                (source, found)
                for source, found in self._sources(var)
                if source is var or may_copy(source)
            )
            # The nearest of those that are as good.
            source, found = max(sources, key=partial(self._use, missing))
            self.known |= found
            copied.append(source)
        return copied

    def _use(
        self, missing: Iterable[core.Var], candidate: tuple[core.Var, dict]
    ) -> tuple[int, int, bool]:
        """What a copy is good for: elements saved, arrays replaced, and precision."""
        source, found = candidate
        sizes = [var.aval.size for var in missing if var in found]
        maker = self._makers.get(source)
        # Rounded near its bound, as of tanh, it tells little of the slope there.
        saturates = maker is not None and maker.primitive.name in _SATURATING
        precise = len(sizes) == 1 or not saturates
        return sum(sizes) - source.aval.size, len(sizes), precise

    def _sources(self, var: core.Var) -> Iterator[tuple[core.Var, dict]]:
        """`var` and, one after the other, what it follows from; what else does."""
        source = var
        while True:
            this = frozenset({source})
            found = self._following(source, Known(0, False, this, this))
            if var not in found:
                return
            yield source, found
            eqn = self._makers.get(source)
            unknown = variables(eqn.invars if eqn else ()) - self.known.keys()
            if len(unknown) != 1:
                return
            (source,) = unknown

    def _following(self, var: core.Var, how: Known) -> dict[core.Var, Known]:
        """What follows from a variable and from what is known."""
        found, behind = {var: how}, [var]
        for source in behind:
            for eqn in self._readers[source]:
                for position, out in enumerate(eqn.outvars):
                    if out in self.known or out in found:
                        continue
                    if result := self._result(eqn, position, found):
                        found[out] = result
                        behind.append(out)
        return found

    def _result(
        self, eqn: core.JaxprEqn, position: int, found: dict[core.Var, Known]
    ) -> Known | None:
        """How a result of an operation follows, if it does."""
        name, out = eqn.primitive.name, eqn.outvars[position]
        if name not in _CHEAP:
            return None
        operands = [
            Known()
            if isinstance(v, core.Literal)
            else found.get(v) or self.known.get(v)
            for v in eqn.invars
        ]
        if None in operands:
            return None
        of, copies = (
            frozenset().union(*(getattr(k, name) for k in operands))
            for name in ("of", "copies")
        )
        if copies and not self._stays_close(eqn, position, operands):
            return None
        if copies and name in _MOVES:
            of = frozenset({out})
        steps = sum(k.steps for k in operands) + (name not in _MOVES | _CONVERSIONS)
        constant = all(k.constant for k in operands)
        return Known(steps, constant, of, copies) if steps <= _MAX_STEPS else None

    def _stays_close(
        self, eqn: core.JaxprEqn, position: int, operands: Sequence[Known]
    ) -> bool:
        """Whether a result's error is small beside the largest of a group."""
        name = eqn.primitive.name
        if name in _SUMS:
            varying = [k.of for k in operands if not k.constant]
            return len(varying) == 1 or len(varying[0]) == len({*varying}) == 1
        if name in _CUTS:
            return _keeps_groups(eqn, position, self._group)
        if name == "convert_element_type":
            dtype = jnp.dtype(eqn.params["new_dtype"])
            return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1
        if name == "integer_pow":
            return 1 <= eqn.params["y"] <= 3
        if name == "exp":
            return self._is_bell(eqn)
        if name in ("div", "select_n"):
            exact = operands[1] if name == "div" else operands[0]
            return not exact.copies
        return name not in _OF_EXACT

    def _is_bell(self, eqn: core.JaxprEqn) -> bool:
        """Whether an exponential is that of -x**2, and flat wherever x is large."""
        for name in ("neg", "square"):
            eqn = self._makers.get(eqn.invars[0])
            if eqn is None or eqn.primitive.name != name:
                return False
        return True


def written_out(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """A program with what it calls in it, and without effects.

    Its own variables have the same names, but for what a call only passes on.
    """
    names: dict[core.Var, Any] = {}
    eqns = list(_written_out(jaxpr, names))
    outvars = [_name(names, v) for v in jaxpr.outvars]
    return jaxpr.replace(eqns=eqns, outvars=outvars, effects=core.no_effects)


def _written_out(jaxpr: core.Jaxpr, names: dict) -> Iterator[core.JaxprEqn]:
    """The operations of a program, renamed; what is not in `names` keeps its name."""
    for eqn in jaxpr.eqns:
        invars = [_name(names, v) for v in eqn.invars]
        body = _called(eqn)
        if body is None:
            outvars = [_name(names, v) for v in eqn.outvars]
            yield eqn.replace(invars=invars, outvars=outvars, effects=core.no_effects)
            continue
        inner = dict(zip(body.invars, invars, strict=True))
        for out, var in zip(eqn.outvars, body.outvars, strict=True):
            if isinstance(var, core.Literal) or var in inner:
                names[out] = _name(inner, var)
            elif not isinstance(out, core.DropVar):
                inner[var] = _name(names, out)
        for var in (v for each in body.eqns for v in each.outvars):
            inner.setdefault(var, core.Var(var.aval))
        yield from _written_out(body, inner)


def _called(eqn: core.JaxprEqn) -> core.Jaxpr | None:
    """The program that an operation is a call of, if it is; not one with constants."""
    if eqn.primitive.name not in _CALLS:
        return None
    (body,) = core.jaxprs_in_params(eqn.params)
    return None if body.constvars else body


def _name(names: dict, var: core.Var | core.Literal) -> core.Var | core.Literal:
    return var if isinstance(var, core.Literal) else names.get(var, var)


def variables(operands: Iterable[core.Var | core.Literal]) -> set[core.Var]:
    """Operands but for literals, which have no hash."""
    return {v for v in operands if isinstance(v, core.Var)}


def _does_work(eqn: core.JaxprEqn) -> bool:
    return any(map(does_work, all_eqns([eqn])))


def _keeps_groups(eqn: core.JaxprEqn, position: int, group: int) -> bool:
    """Whether groups on the last axis stay together, and all others go."""
    (*_, whole), (*_, part) = eqn.invars[0].aval.shape, eqn.outvars[position].aval.shape
    if whole == part:
        return True
    if eqn.primitive.name == "split":
        start, stride = sum(eqn.params["sizes"][:position]), 1
    else:
        start = eqn.params["start_indices"][-1]
        stride = (eqn.params["strides"] or [1])[-1]
    return stride == 1 and start % group == part % group == whole % group == 0
