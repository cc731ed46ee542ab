"""A nested state dict as leaves with dotted keys, by the rules that DCP uses (``torch.distributed.checkpoint.flatten_state_dict``).

Mappings are always descended into, their keys as ``str``. A list is descended into if it holds a tensor, a mapping, or a list that is
itself descended into; otherwise it is one leaf. Everything else, tuples included, is a leaf.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import PlanError
from .fragment import Path

__all__ = ["PER_RANK_KEY", "Leaf", "PerRank", "dotted", "flatten"]

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


def flatten(state_dict: Mapping[str, Any]) -> list[Leaf]:
    """All leaves in order. Raises PlanError when two paths have one key, or a container holds itself."""
    out: list[Leaf] = []
    seen: dict[str, Path] = {}

    def walk(path: Path, value: Any) -> Iterator[Leaf]:
        if isinstance(value, Mapping) and len(value) == 1 and PER_RANK_KEY in value:
            yield Leaf(dotted(path), path, value[PER_RANK_KEY], True)
        elif _is_leaf(value):
            yield Leaf(dotted(path), path, value, False)
        elif isinstance(value, Mapping):
            for key, child in value.items():
                yield from walk((*path, str(key)), child)
        else:
            for index, child in enumerate(value):
                yield from walk((*path, index), child)

    for name, value in state_dict.items():
        try:
            leaves = list(walk((str(name),), value))
        except RecursionError:
            raise PlanError(f"state dict: {str(name)!r} is nested too deeply or holds itself") from None
        for leaf in leaves:
            other = seen.get(leaf.key)
            if other is not None:
                raise PlanError(
                    f"state dict: two values have the key {leaf.key!r}: at {list(other)} and at {list(leaf.path)}; rename one of them, "
                    "for keys are joined by dots"
                )
            seen[leaf.key] = leaf.path
            out.append(leaf)
    return out
