"""Cases, tried out: which can hold for the enum and bool parameters that `require` lets through.

A `when` over numbers counts as either. So does a parameter too many: past a thousand combinations, or fewer where there
are many cases, the rest stay open, which can hide a problem but never makes one up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from kvgen.expr import Expr, Literal, names
from kvgen.fold import FoldError
from kvgen.scope import Scope
from kvgen.spec import Case, Let, Parameter

COMBINATIONS_MAX = 1_024
TRIALS_MAX = 8_192  # combinations times conditions to try in each


@dataclass(frozen=True)
class Trial:
    """What trying a list of cases came to."""

    uncovered: dict[str, object] | None  # values for which no case holds
    dead: tuple[int, ...]  # positions of cases that can never be used
    certain: bool  # whether some case is sure to hold whatever the values


def try_cases(scope: Scope, cases: tuple[Case, ...], *, all_apply: bool = False) -> Trial:
    """Try every combination. With `all_apply`, as in layer sets, a case is not hidden by those before it."""
    whens = [case.when for case in cases]
    reachable: set[int] = set()
    uncovered: dict[str, object] | None = None
    certain = True
    for values in combinations(scope, [when for when in whens if when is not None]):
        states = _states(scope, cases, values)
        if True not in states:
            certain = False
        if not any(state is not False for state in states) and uncovered is None:
            uncovered = {name: literal.value for name, literal in values.items()}
        reachable |= _reached(cases, states, all_apply)
    dead = tuple(position for position in range(len(cases)) if position not in reachable)
    return Trial(uncovered, dead, certain)


def combinations(scope: Scope, exprs: list[Expr]) -> Iterator[dict[str, Literal]]:
    """Values of the enum and bool parameters that the expressions depend on, those that `require` refuses left out."""
    wanted = _depended_on(scope, exprs)
    most = min(COMBINATIONS_MAX, max(2, TRIALS_MAX // max(1, len(exprs))))
    domains: list[list[Literal]] = []
    chosen: list[str] = []
    count = 1
    for parameter in scope.spec.parameters:
        values = _values(parameter)
        if parameter.name.text not in wanted or not values or count * len(values) > most:
            continue
        count *= len(values)
        chosen.append(parameter.name.text)
        domains.append(values)
    requires = [item.that for item in scope.spec.requires if not scope.varies(item.that)]
    for values in product(*domains):
        known = dict(zip(chosen, values, strict=True))
        if all(truth(scope, that, known) is not False for that in requires):
            yield known


def reached_cases(
    scope: Scope, cases: tuple[Case, ...], known: Mapping[str, Literal | None], *, all_apply: bool
) -> set[int]:
    """Positions of the cases that can be used for these values; see `try_cases`."""
    return _reached(cases, _states(scope, cases, known), all_apply)


def _states(scope: Scope, cases: tuple[Case, ...], known: Mapping[str, Literal | None]) -> list[bool | None]:
    """Of each case, whether it holds; None where that depends on more."""
    return [True if case.when is None else truth(scope, case.when, known) for case in cases]


def _reached(cases: tuple[Case, ...], states: list[bool | None], all_apply: bool) -> set[int]:
    reached: set[int] = set()
    for position, (case, state) in enumerate(zip(cases, states, strict=True)):
        hidden = True in states[:position] and (not all_apply or case.when is None)
        if state is not False and not hidden:
            reached.add(position)
    return reached


def truth(scope: Scope, expr: Expr, known: Mapping[str, Literal | None]) -> bool | None:
    """The value of a condition for these values; None where it depends on more."""
    try:
        folded = scope.fold(expr, known)
    except FoldError:
        return None
    return bool(folded.value) if isinstance(folded, Literal) else None


def _values(parameter: Parameter) -> list[Literal]:
    if parameter.optional or parameter.equals is not None or parameter.kind == "list":
        return []
    span = parameter.name.span
    if parameter.kind == "bool":
        return [Literal(value=flag, span=span) for flag in (False, True)]
    return [Literal(value=value, span=span) for _, value in parameter.values or ()]  # type: ignore[arg-type]


def _depended_on(scope: Scope, exprs: list[Expr]) -> set[str]:
    found: set[str] = set()
    waiting = [name for expr in exprs for name in names(expr)]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        entity = scope.entities.get(name)
        if entity is not None and isinstance(entity.definition, Let):
            waiting += names(entity.definition.value)
    return found
