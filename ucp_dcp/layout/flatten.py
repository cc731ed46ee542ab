"""A nested state dict as leaves with dotted keys, by the rules that DCP uses (``torch.distributed.checkpoint.flatten_state_dict``).

Mappings are always descended into, their keys as ``str``. A list is descended into if it holds a tensor, a mapping, or a list that is
itself descended into; otherwise it is one leaf. Everything else, tuples included, is a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import PlanError
from .fragment import Path

__all__ = ["PER_RANK_KEY", "Leaf", "PerRank", "dotted", "flatten", "visit"]

PER_RANK_KEY = "__ucp_per_rank__"


class PerRank(dict[str, Any]):
    """``PerRank(value)`` in a state dict: a value (no tensor) that every rank keeps for itself, such as a random generator's state.

    It is a dict with one reserved key, because stagers rebuild dicts; a plain dict with that one key means the same. Values of a plain key
    must agree on all ranks instead.
    """

    def __init__(self, value: Any) -> None:
        super().__init__({PER_RANK_KEY: value})

    @property
    def value(self) -> Any:
        """The wrapped value."""
        return self[PER_RANK_KEY]

    def __reduce__(self) -> tuple[Any, ...]:
        return PerRank, (self[PER_RANK_KEY],)


class Leaf:
    """One leaf: dotted key, path, value, and whether it is a per-rank value."""

    __slots__ = ("key", "path", "per_rank", "value")

    def __init__(self, key: str, path: Path, value: Any, per_rank: bool) -> None:
        self.key = key
        self.path = path
        self.value = value
        self.per_rank = per_rank


def dotted(path: Path) -> str:
    """The key of a path."""
    return ".".join(map(str, path))


def _is_leaf(value: Any) -> bool:
    if isinstance(value, Mapping):
        return False
    if not isinstance(value, list):
        return True
    for entry in value:
        if isinstance(entry, torch.Tensor):
            return False
        if isinstance(entry, (Mapping, list)) and not _is_leaf(entry):
            return False
    return True


def _walk(out: list[Leaf], path: Path, key: str, value: Any) -> None:
    """Append the leaves of a value. No closure: one that calls itself would keep the tensors until the garbage collector comes."""
    if isinstance(value, torch.Tensor):  # most leaves, and never a container
        out.append(Leaf(key, path, value, False))
    elif isinstance(value, Mapping):
        if len(value) == 1 and PER_RANK_KEY in value:
            out.append(Leaf(key, path, value[PER_RANK_KEY], True))
            return
        for name, child in value.items():
            name = str(name)
            _walk(out, (*path, name), f"{key}.{name}", child)
    elif _is_leaf(value):
        out.append(Leaf(key, path, value, False))
    else:
        for index, child in enumerate(value):
            _walk(out, (*path, index), f"{key}.{index}", child)


def visit(state_dict: Mapping[str, Any], emit: Callable[[str, Path, Any, bool], None]) -> None:
    """Call ``emit(key, path, value, per_rank)`` for all leaves in order. Raises PlanError when a container holds itself."""

    def walk(path: Path, key: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):  # most leaves, and never a container
            emit(key, path, value, False)
        elif isinstance(value, Mapping):
            if len(value) == 1 and PER_RANK_KEY in value:
                emit(key, path, value[PER_RANK_KEY], True)
                return
            for name, child in value.items():
                name = str(name)
                walk((*path, name), f"{key}.{name}", child)
        elif _is_leaf(value):
            emit(key, path, value, False)
        else:
            for index, child in enumerate(value):
                walk((*path, index), f"{key}.{index}", child)

    for name, value in state_dict.items():
        name = str(name)
        try:
            walk((name,), name, value)
        except RecursionError:
            raise PlanError(f"state dict: {name!r} is nested too deeply or holds itself") from None


def flatten(state_dict: Mapping[str, Any]) -> list[Leaf]:
    """All leaves in order. Raises PlanError when two paths have one key, or a container holds itself."""
    out: list[Leaf] = []
    visit(state_dict, lambda key, path, value, per_rank: out.append(Leaf(key, path, value, per_rank)))
    seen: dict[str, Path] = {}
    for leaf in out:
        other = seen.setdefault(leaf.key, leaf.path)
        if other is not leaf.path:
            raise PlanError(
                f"state dict: two values have the key {leaf.key!r}: at {list(other)} and at {list(leaf.path)}; rename one of them, "
                "for keys are joined by dots"
            )
    return out
