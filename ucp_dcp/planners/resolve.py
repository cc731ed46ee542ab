"""Which stored copy answers a wanted tensor (design decision D12), and what may be cast to what."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Literal

import numpy as np

from ..catalog import Catalog, ObjectRow, TensorRow
from ..dtypes import is_complex, is_floating, itemsize, name_of
from ..errors import DtypeMismatchError, MissingKeysError
from ..layout import Fragment
from ..names import Role, canonical_name, unwrap

__all__ = ["Found", "Lookup", "SourceChoice", "check_cast", "kind_of_number", "nearest", "resolve_tensor"]

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


class Lookup:
    """What a load asks of a catalog by name.

    twins: fqn -> fqns of weights that lie in the same memory as it in the wanted state dict (tied weights): what is stored under one name
    answers for the other. hints: how many missing names get a hint; one wrong prefix makes all keys of a model missing.
    """

    def __init__(self, catalog: Catalog, twins: Mapping[str, Sequence[str]] | None = None, hints: int = 3) -> None:
        self.catalog = catalog
        self.twins = twins or {}
        self._hints = hints

    def hint(self, name: str) -> str:
        """The closest stored key, or nothing once there were enough hints."""
        self._hints -= 1
        return nearest(name, self.catalog) if self._hints >= 0 else ""

    def names(self, fqn: str) -> tuple[str, ...]:
        """The fqn and those of its twins."""
        return (fqn, *self.twins.get(fqn, ()))

    @cached_property
    def weights_of_masters(self) -> dict[str, str]:
        """Canonical weight name -> fqn of a stored master, so that a checkpoint that holds only masters (ZeRO-3) answers for weights."""
        catalog = self.catalog
        rows = np.flatnonzero(np.asarray(catalog.tensor_role) == int(Role.MASTER)).tolist()
        return {f"model.{fqn}": fqn for fqn in (catalog.tensor(t).fqn for t in rows)}

    @cached_property
    def _unwrapped(self) -> dict[str, int | None]:
        """Keys with wrapper segments, without these -> row; None where two keys become one."""
        out: dict[str, int | None] = {}
        for row, key in enumerate(self.catalog.keys):
            clean = unwrap(key)
            if clean != key:
                out[clean] = None if clean in out else row
        return out

    def by_key(self, key: str) -> int | None:
        """The row of a key, as written or but for the segments of wrappers (compile, activation checkpointing)."""
        row = self.catalog.find(key)
        if row is None:
            clean = unwrap(key)
            row = self.catalog.find(clean)
            if row is None:
                row = self._unwrapped.get(clean)
        return row


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
    fragment: Fragment, key: str, lookup: Lookup, *, source: SourceChoice = "auto", master_from_weight: bool = False
) -> Found:
    """The stored row that answers ``fragment``, looked up as ``key`` (its own key unless renamed).

    Raises MissingKeysError; DtypeMismatchError when a master is wanted and only a narrower weight is stored.
    """
    catalog = lookup.catalog
    wanted = name_of(fragment.view.dtype)
    named = _designated(fragment, key, catalog)
    if named is None and key in lookup.weights_of_masters:
        named = (Role.WEIGHT, lookup.weights_of_masters[key], "")
    if isinstance(named, int):
        return Found(catalog.tensor(named), None, "key")
    if named is not None:
        role, fqn, state = named
        for name in lookup.names(fqn):
            found = _named(catalog, role, name, state, wanted, source, master_from_weight)
            if found is not None:
                return found
    keys = [key] if named is None else _other_keys(key, *named[:2], lookup)
    row = next((row for k in keys if (row := lookup.by_key(k)) is not None), None)
    if row is not None:
        return Found(catalog.tensor(row), None, "key")
    value = catalog.find_object(key)
    if value is None and named is not None:
        value = catalog.find_object(canonical_name(*named, key))
    value = value or catalog.find_object(fragment.key)
    if value is not None:
        return Found(None, value, "object")
    name = key if named is None else canonical_name(*named, key)
    raise MissingKeysError(f"tensor {fragment.key!r} is not in the checkpoint{lookup.hint(name)}")


def _other_keys(key: str, role: Role, fqn: str, lookup: Lookup) -> list[str]:
    """Keys under which somebody who declared no roles may have saved the same thing: as it is, in DDP or out of it, a tied twin's."""
    keys = [key]
    if role in (Role.WEIGHT, Role.BUFFER) and key.endswith(fqn):
        head = key.removesuffix(fqn)
        while head.endswith("module."):
            head = head.removesuffix("module.")
        keys += [head + fqn, f"{head}module.{fqn}"]
    if fqn in key:
        keys += [twin.join(key.rsplit(fqn, 1)) for twin in lookup.names(fqn)[1:]]
    return keys


def _named(
    catalog: Catalog, role: Role, fqn: str, state: str, wanted: str, source: SourceChoice, master_from_weight: bool
) -> Found | None:
    if role in (Role.WEIGHT, Role.BUFFER):
        return _weight(catalog, fqn, wanted, source)
    if role == Role.MASTER:
        return _master(catalog, fqn, master_from_weight)
    row = catalog.find_named(role, fqn, state)
    return Found(catalog.tensor(row), None, "state") if row is not None else None


def _weight(catalog: Catalog, fqn: str, wanted: str, source: SourceChoice) -> Found | None:
    weight = catalog.find_named(Role.WEIGHT, fqn, "")
    if weight is None:
        weight = catalog.find_named(Role.BUFFER, fqn, "")
    master = catalog.find_named(Role.MASTER, fqn, "")
    if source != "auto" and (weight is not None or master is not None):
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
