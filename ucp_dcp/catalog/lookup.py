"""Finding tensors and objects of a catalog by what they are. Names need not be unique; asking for an ambiguous one is an error."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import PlanError
from ..names import Role, canonical_name
from .rows import ObjectRow

__all__ = ["canonical_index", "find_object", "named_index", "only"]


def named_index(roles: Sequence[int], fqns: Sequence[str], states: Sequence[str]) -> dict[tuple[int, str, str], tuple[int, ...]]:
    """(role, fqn, state) -> indices of tensors; plain tensors have no name but their key."""
    found: dict[tuple[int, str, str], tuple[int, ...]] = {}
    for t, name in enumerate(zip(roles, fqns, states, strict=True)):
        if name[0] != Role.PLAIN:
            found[name] = (*found.get(name, ()), t)
    return found


def canonical_index(keys: Sequence[str], roles: Sequence[int], fqns: Sequence[str], states: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Canonical name -> indices of tensors."""
    found: dict[str, tuple[int, ...]] = {}
    for t, (key, role, fqn, state) in enumerate(zip(keys, roles, fqns, states, strict=True)):
        name = canonical_name(Role(role), fqn, state, key)
        found[name] = (*found.get(name, ()), t)
    return found


def only(found: Sequence[int], what: str, keys: Sequence[str]) -> int | None:
    """The one index, None for none. Raises PlanError for several."""
    if len(found) > 1:
        named = ", ".join(repr(keys[t]) for t in found[:4])
        raise PlanError(f"{len(found)} tensors have {what}: keys {named}; ask by key")
    return found[0] if found else None


def find_object(rows: Sequence[ObjectRow], by_key: dict[str, int], by_fqn: dict[str, tuple[int, ...]], key: str) -> ObjectRow | None:
    """The object with this key, else the only one with this fqn. Raises PlanError when several have it."""
    if key in by_key:
        return rows[by_key[key]]
    found = by_fqn.get(key, ())
    if len(found) > 1:
        named = ", ".join(repr(rows[i].key) for i in found[:4])
        raise PlanError(f"{len(found)} objects have the fqn {key!r}: keys {named}; ask by key")
    return rows[found[0]] if found else None
