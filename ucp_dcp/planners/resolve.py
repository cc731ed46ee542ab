"""Which stored copy answers a wanted tensor (design decision D12), and what may be cast to what."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..catalog import Catalog, ObjectRow, TensorRow
from ..dtypes import is_complex, is_floating, itemsize, name_of
from ..errors import DtypeMismatchError, MissingKeysError
from ..layout import Fragment
from ..names import Role, canonical_name

__all__ = ["Found", "SourceChoice", "check_cast", "nearest", "resolve_tensor"]

SourceChoice = Literal["auto", "weight", "master"]


@dataclass(frozen=True, slots=True)
class Found:
    """What answers a wanted tensor: a stored tensor, or (for one-element tensors) a stored number."""

    tensor: TensorRow | None
    value: ObjectRow | None
    source: str
    """``"weight"``, ``"master"``, ``"state"``, ``"key"`` or ``"object"``, for the report."""


def nearest(name: str, catalog: Catalog) -> str:
    """A hint that names the closest stored key, or nothing."""
    close = difflib.get_close_matches(name, list(catalog.keys)[:20000], n=1, cutoff=0.6)
    return f"; the closest stored key is {close[0]!r}" if close else ""


def _designated(fragment: Fragment, key: str, catalog: Catalog) -> tuple[Role, str, str] | int | None:
    """(role, fqn, state) when the wanted tensor names a global thing, a row index when only the key matches, else None."""
    if key == fragment.key and fragment.role not in (Role.PLAIN, Role.OBJECT):
        return fragment.role, fragment.fqn, fragment.state
    row = catalog.find(key)
    if row is None:
        row = catalog.find_canonical(key)
    if row is not None:
        stored = catalog.tensor(row)
        return row if stored.role in (Role.PLAIN, Role.OBJECT) else (stored.role, stored.fqn, stored.state)
    return None


def resolve_tensor(
    fragment: Fragment,
    key: str,
    catalog: Catalog,
    weights_of_masters: Mapping[str, str],
    *,
    source: SourceChoice = "auto",
    master_from_weight: bool = False,
) -> Found:
    """The stored row that answers ``fragment``, looked up as ``key`` (its own key unless renamed).

    weights_of_masters: canonical weight name -> fqn of a stored master, so that a checkpoint which holds only masters (ZeRO-3) answers
    for weights.

    Raises MissingKeysError; DtypeMismatchError when a master is wanted and only a narrower weight is stored.
    """
    wanted = name_of(fragment.view.dtype)
    named = _designated(fragment, key, catalog)
    if named is None and key in weights_of_masters:
        named = (Role.WEIGHT, weights_of_masters[key], "")
    if isinstance(named, int):
        return Found(catalog.tensor(named), None, "key")
    if named is not None:
        role, fqn, state = named
        if role in (Role.WEIGHT, Role.BUFFER):
            found = _weight(catalog, fqn, wanted, source)
        elif role == Role.MASTER:
            found = _master(catalog, fqn, master_from_weight)
        else:
            row = catalog.find_named(role, fqn, state)
            found = Found(catalog.tensor(row), None, "state") if row is not None else None
        if found is not None:
            return found
        row = catalog.find(key)
        if row is not None:
            return Found(catalog.tensor(row), None, "key")
        key = canonical_name(role, fqn, state, key)
    value = catalog.find_object(key) or catalog.find_object(fragment.key)
    if value is not None:
        return Found(None, value, "object")
    raise MissingKeysError(f"tensor {fragment.key!r} is not in the checkpoint{nearest(key, catalog)}")


def _weight(catalog: Catalog, fqn: str, wanted: str, source: SourceChoice) -> Found | None:
    weight = catalog.find_named(Role.WEIGHT, fqn, "")
    if weight is None:
        weight = catalog.find_named(Role.BUFFER, fqn, "")
    master = catalog.find_named(Role.MASTER, fqn, "")
    if source != "auto":
        row = weight if source == "weight" else master
        if row is None:
            raise MissingKeysError(f"weight {fqn!r}: source={source!r} was asked for, but the checkpoint holds no {source} of it")
        return Found(catalog.tensor(row), None, source)
    if weight is not None and (master is None or catalog.tensor(weight).dtype == wanted):
        return Found(catalog.tensor(weight), None, "weight")
    if master is not None:
        return Found(catalog.tensor(master), None, "master")
    return None


def _master(catalog: Catalog, fqn: str, from_weight: bool) -> Found | None:
    master = catalog.find_named(Role.MASTER, fqn, "")
    if master is not None:
        return Found(catalog.tensor(master), None, "master")
    weight = catalog.find_named(Role.WEIGHT, fqn, "")
    if weight is None:
        return None
    row = catalog.tensor(weight)
    if (is_floating(row.dtype) and itemsize(row.dtype) >= 4) or from_weight:
        return Found(row, None, "weight")
    raise DtypeMismatchError(
        f"master weight of {fqn!r} is wanted, but the checkpoint holds only its {row.dtype} weight; "
        "pass master_from_weight=True to start the master from it (the lost bits stay lost)"
    )


def check_cast(key: str, stored: str, wanted: str, policy: Literal["cast", "error"]) -> bool:
    """True when a cast is needed. Raises DtypeMismatchError when the policy or the kinds of the types forbid it."""
    if stored == wanted:
        return False
    if policy == "error":
        raise DtypeMismatchError(f"tensor {key!r} is stored as {stored} and wanted as {wanted}; dtype='error' forbids the cast")

    def kind(name: str) -> int:
        return 3 if is_complex(name) else 2 if is_floating(name) else 0 if name == "bool" else 1

    if kind(wanted) < kind(stored):
        raise DtypeMismatchError(
            f"tensor {key!r} is stored as {stored} and wanted as {wanted}: that would lose its kind of number; load into a {stored} tensor"
        )
    return True
