"""Questions about a tree that came out of a pickle: it may share parts, nest deeply, or contain itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, TypeVar

from .builders import Reference
from .stubs import Stub

__all__ = ["find_stub", "is_plain", "iter_leaves"]

T = TypeVar("T")

_SCALARS = (str, int, float, bool, type(None))


def find_stub(tree: Any) -> Stub | Reference | None:
    """The first inert object or bare name in a tree, None if there is none. Every shared part is visited once."""
    seen: set[int] = set()
    todo: list[Any] = [tree]
    while todo:
        x = todo.pop()
        if isinstance(x, (Stub, Reference)):
            return x
        if not isinstance(x, (dict, list, tuple, set, frozenset, deque)) or id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, dict):
            todo.extend(x.keys())
            todo.extend(x.values())
        else:
            todo.extend(x)
    return None


def iter_leaves(tree: Any, kind: type[T]) -> Iterator[T]:
    """All objects of a type in the containers of a tree and in what stand-ins recorded. Every shared part is visited once."""
    seen: set[int] = set()
    todo: list[Any] = [tree]
    while todo:
        x = todo.pop()
        if isinstance(x, kind):
            yield x
            continue
        if not isinstance(x, (dict, list, tuple, set, frozenset, deque, Stub)) or id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, dict):
            todo.extend(x.keys())
            todo.extend(x.values())
        elif isinstance(x, Stub):
            todo.extend((x.args, x.kwargs, x.state, x.items))
        else:
            todo.extend(x)


def is_plain(tree: Any, *, max_nodes: int = 100_000, max_depth: int = 64) -> bool:
    """True when a tree holds only dicts with string or integer keys, lists and scalars, within the bounds. Tuples are not plain.

    Shared parts count as often as they appear, because writing the tree out would repeat them; so a tree that contains itself is not plain.
    """
    count = 0
    todo: list[tuple[Any, int]] = [(tree, 0)]
    while todo:
        x, depth = todo.pop()
        count += 1
        if depth > max_depth or count + len(todo) + (len(x) if isinstance(x, (dict, list)) else 0) > max_nodes:
            return False
        if type(x) is int:
            if not -(2**63) <= x < 2**64:
                return False
        elif type(x) is dict:
            if not all(type(k) in (str, int) for k in x):
                return False
            todo.extend((v, depth + 1) for v in x.values())
        elif type(x) is list:
            todo.extend((v, depth + 1) for v in x)
        elif type(x) not in _SCALARS:
            return False
    return True
