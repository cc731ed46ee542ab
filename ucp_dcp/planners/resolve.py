"""Which stored copy answers a wanted tensor (design decision D12), and what may be cast to what."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from ..catalog import Catalog, ObjectRow, TensorRow
from ..dtypes import is_complex, is_floating, itemsize, name_of
from ..errors import DtypeMismatchError, MissingKeysError
from ..layout import Fragment
from ..names import Role, canonical_name

__all__ = ["Found", "Hints", "SourceChoice", "check_cast", "kind_of_number", "nearest", "resolve_tensor"]

SourceChoice = Literal["auto", "weight", "master"]


@dataclass(frozen=True, slots=True)
class Found:
    """What answers a wanted tensor: a stored tensor, or (for one-element tensors) a stored number."""

    tensor: TensorRow | None
    value: ObjectRow | None
    source: str
    """``"weight"``, ``"master"``, ``"state"``, ``"key"`` or ``"object"``, for the report."""


def nearest(name: str, catalog: Catalog) -> str:
    """A hint that names the closest stored key, or nothing. Costs milliseconds for each 1,000 keys: not for every key of a model."""
    close = difflib.get_close_matches(name, list(islice(catalog.keys, 20000)), n=1, cutoff=0.6)
    return f"; the closest stored key is {close[0]!r}" if close else ""


class Hints:
    """``nearest`` for the first few missing keys; one wrong prefix makes all keys of a model missing."""

    def __init__(self, catalog: Catalog, budget: int = 3) -> None:
        self._catalog = catalog
        self._budget = budget

    def __call__(self, name: str) -> str:
        """The hint, or nothing once there were enough of them."""
        self._budget -= 1
        return nearest(name, self._catalog) if self._budget >= 0 else ""


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
    hint: Callable[[str], str],
    *,
    source: SourceChoice = "auto",
    master_from_weight: bool = False,
) -> Found:
    """The stored row that answers ``fragment``, looked up as ``key`` (its own key unless renamed).

    weights_of_masters: canonical weight name -> fqn of a stored master, so that a checkpoint which holds only masters (ZeRO-3) answers
    for weights. hint: what to add to the message about a missing name.

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
    raise MissingKeysError(f"tensor {fragment.key!r} is not in the checkpoint{hint(key)}")


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


def kind_of_number(dtype: str) -> int:
    """0 bool, 1 integer, 2 floating, 3 complex: a cast to a higher kind keeps what the number is."""
    return 3 if is_complex(dtype) else 2 if is_floating(dtype) else 0 if dtype == "bool" else 1


def check_cast(key: str, stored: str, wanted: str, policy: Literal["cast", "error"]) -> bool:
    """True when a cast is needed. Raises DtypeMismatchError when the policy or the kinds of the types forbid it."""
    if stored == wanted:
        return False
    if policy == "error":
        raise DtypeMismatchError(f"tensor {key!r} is stored as {stored} and wanted as {wanted}; dtype='error' forbids the cast")

    if "x2" in (stored[-2:], wanted[-2:]):
        raise DtypeMismatchError(
            f"tensor {key!r} is stored as {stored} and wanted as {wanted}: a type that packs two numbers into a byte cannot be cast"
        )

    if kind_of_number(wanted) < kind_of_number(stored):
        raise DtypeMismatchError(
            f"tensor {key!r} is stored as {stored} and wanted as {wanted}: that would lose its kind of number; load into a {stored} tensor"
        )
    return True
