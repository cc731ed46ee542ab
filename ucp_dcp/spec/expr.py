"""Expressions of a spec: integer arithmetic over declared names, and nothing else.

An expression is parsed with ``ast`` and *walked* against a short list of node types; it is never compiled or evaluated by Python. A spec
may come from anywhere, so text length, nesting, integer size and list length are bounded.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import SpecError

__all__ = ["Expr", "Value", "names_of"]

Value: TypeAlias = int | bool | str | Sequence["Value"]
"""What an expression may yield; lists are Python lists or tuples."""

MAX_TEXT = 2000
MAX_DEPTH = 40
MAX_INT = 2**62
MAX_LIST = 1_000_000


@dataclass(frozen=True, slots=True)
class Expr:
    """One parsed expression; plain data (its text), so it pickles. Raises SpecError when the text is not in the language."""

    text: str

    def __post_init__(self) -> None:
        _tree(self.text)

    @property
    def names(self) -> frozenset[str]:
        """Names that it reads; a size is ``axis.size``."""
        return names_of(self.text)

    def evaluate(self, lookup: Callable[[str], Value]) -> Value:
        """Its value, names resolved by ``lookup`` (which raises for an unknown one).

        Raises SpecError for a type error, a division by zero, an index outside its list, or a number or list beyond bounds.
        """
        try:
            return _walk(_tree(self.text), lookup)
        except _Bad as bad:
            raise SpecError(f"expression {self.text!r}: {bad}") from None


class _Bad(Exception):
    pass


@functools.lru_cache(maxsize=4096)
def _tree(text: str) -> ast.expr:
    if len(text) > MAX_TEXT:
        raise SpecError(f"expression of {len(text)} characters, expected at most {MAX_TEXT}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpecError(f"expression {text!r} cannot be parsed: {getattr(error, 'msg', error)}") from None
    try:
        _check(tree, 0)
    except _Bad as bad:
        raise SpecError(f"expression {text!r}: {bad}") from None
    return tree


@functools.lru_cache(maxsize=4096)
def names_of(text: str) -> frozenset[str]:
    """Names that an expression reads, ``axis.size`` included as one name."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Attribute):
            found.add(_dotted(node))
            return
        if isinstance(node, ast.Name):
            found.add(node.id)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(_tree(text))
    return frozenset(found)


_BINARY = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_UNARY = (ast.USub, ast.UAdd, ast.Not)
_COMPARE = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn)


def _dotted(node: ast.Attribute) -> str:
    if not isinstance(node.value, ast.Name) or node.attr != "size":
        raise _Bad("the only attribute is `.size` of an axis")
    return f"{node.value.id}.size"


def _check(node: ast.expr, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _Bad(f"nested deeper than {MAX_DEPTH}")
    below: Sequence[ast.expr]
    match node:
        case ast.Constant(value=value):
            if type(value) not in (int, bool, str):
                raise _Bad(f"{value!r} is not an integer, truth value or string")
            if type(value) is int and abs(value) > MAX_INT:
                raise _Bad("an integer is too large")
            return
        case ast.Name():
            return
        case ast.Attribute():
            _dotted(node)
            return
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _BINARY):
            below = (left, right)
        case ast.UnaryOp(op=unary, operand=operand) if isinstance(unary, _UNARY):
            below = (operand,)
        case ast.BoolOp(values=values):
            below = values
        case ast.Compare(left=left, ops=ops, comparators=others) if all(isinstance(o, _COMPARE) for o in ops):
            below = (left, *others)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            below = elements
        case ast.Subscript(value=sequence, slice=index) if not isinstance(index, ast.Slice):
            below = (sequence, index)
        case _:
            raise _Bad(
                f"{ast.unparse(node)!r} is not allowed; allowed are integers, names, axis.size, + - * // %, comparisons, in, "
                "and/or/not, [..]"
            )
    for child in below:
        _check(child, depth + 1)


def _integer(value: Value, what: str) -> int:
    if isinstance(value, (int, bool)):
        return int(value)
    raise _Bad(f"{what} of {value!r}, expected an integer")


def _bounded(value: int) -> int:
    if abs(value) > MAX_INT:
        raise _Bad("a number is too large")
    return value


def _walk(node: ast.expr, lookup: Callable[[str], Value]) -> Value:
    match node:
        case ast.Constant(value=constant):
            return constant  # type: ignore[return-value]  # _check left int, bool, str
        case ast.Name(id=name):
            return lookup(name)
        case ast.Attribute():
            return lookup(_dotted(node))
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(op, _walk(left, lookup), _walk(right, lookup))
        case ast.UnaryOp(op=op, operand=operand):
            value = _walk(operand, lookup)
            if isinstance(op, ast.Not):
                return not value
            number = _integer(value, "sign")
            return -number if isinstance(op, ast.USub) else number
        case ast.BoolOp(op=op, values=values):
            stop = isinstance(op, ast.Or)
            result: Value = not stop
            for part in values:
                result = _walk(part, lookup)
                if bool(result) == stop:
                    return result
            return result
        case ast.Compare(left=left, ops=ops, comparators=others):
            first = _walk(left, lookup)
            for relation, other in zip(ops, others, strict=True):
                second = _walk(other, lookup)
                if not _compare(relation, first, second):
                    return False
                first = second
            return True
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_walk(e, lookup) for e in elements]
        case ast.Subscript(value=sequence, slice=index):
            items = _walk(sequence, lookup)
            at = _integer(_walk(index, lookup), "index")
            if isinstance(items, (str, int, bool)):
                raise _Bad(f"{items!r} has no elements")
            if not 0 <= at < len(items):
                raise _Bad(f"index {at} of a list of {len(items)}")
            return items[at]
    raise _Bad(f"{ast.unparse(node)!r} is not allowed")


def _binary(op: ast.operator, a: Value, b: Value) -> Value:
    if isinstance(op, (ast.Add, ast.Mult)) and (isinstance(a, (list, tuple)) or isinstance(b, (list, tuple))):
        if isinstance(op, ast.Add):
            if not (isinstance(a, (list, tuple)) and isinstance(b, (list, tuple))):
                raise _Bad("a list can be added to a list only")
            if len(a) + len(b) > MAX_LIST:
                raise _Bad("a list is too long")
            return [*a, *b]
        items, times = (a, b) if isinstance(a, (list, tuple)) else (b, a)
        count = _integer(times, "repetition")
        if not isinstance(items, (list, tuple)) or max(count, 0) * len(items) > MAX_LIST:
            raise _Bad("a list is too long")
        return list(items) * count
    x, y = _integer(a, "arithmetic"), _integer(b, "arithmetic")
    match op:
        case ast.Add():
            return _bounded(x + y)
        case ast.Sub():
            return _bounded(x - y)
        case ast.Mult():
            return _bounded(x * y)
    if y == 0:
        raise _Bad("division by zero")
    return x // y if isinstance(op, ast.FloorDiv) else x % y


def _compare(op: ast.cmpop, a: Value, b: Value) -> bool:
    match op:
        case ast.Eq():
            return a == b
        case ast.NotEq():
            return a != b
        case ast.In() | ast.NotIn():
            if isinstance(b, (str, int, bool)):
                raise _Bad(f"`in` needs a list, found {b!r}")
            return (a in b) == isinstance(op, ast.In)
    x, y = _integer(a, "comparison"), _integer(b, "comparison")
    match op:
        case ast.Lt():
            return x < y
        case ast.LtE():
            return x <= y
        case ast.Gt():
            return x > y
    return x >= y
