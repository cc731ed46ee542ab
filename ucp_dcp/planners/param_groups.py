"""Hyperparameters of optimizers at load, by parameter name.

``param_groups`` is a list, but a place in it means nothing: groups are re-ordered, split and merged between runs. What was stored for each
parameter is found through the ``params`` of the stored groups (nested form), or is stored by parameter (torch's flattened form), and a
wanted group takes the values that all of its known parameters agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..catalog import Catalog, ObjectRow
from ..errors import MissingKeysError, PlanError
from ..layout import GroupField, ObjectLeaf
from ..names import unwrap_all

__all__ = ["Resolved", "StoredGroups", "resolve_groups", "same_value"]

_PARAMS = "params"
_SHOWN = 4


class StoredGroups:
    """The ``param_groups`` of one optimizer in a checkpoint.

    of: parameter -> {field: value}. empty: group number -> fields of groups without parameters. rows: the objects they were read from.
    """

    def __init__(self, rows: Sequence[ObjectRow]) -> None:
        self.rows = rows
        self.of: dict[str, dict[str, Any]] = {}
        self.empty: dict[int, dict[str, Any]] = {}
        self.by_number: list[str] = []

    @property
    def known(self) -> set[str]:
        """Parameters that the optimizer had."""
        return set(self.of)

    @staticmethod
    def rows_of(catalog: Catalog, root: str) -> tuple[str, list[ObjectRow]]:
        """(prefix, objects) of the groups that belong to an optimizer root: of its own name, else the only ones there are."""
        found: dict[str, list[ObjectRow]] = {}
        for row in catalog.objects:
            head, mark, _ = row.key.partition("param_groups.")
            if mark and (not head or head.endswith(".")):
                found.setdefault(head, []).append(row)
        own = f"{root}." if root else ""
        for head in (own, "optim."):
            if head in found:
                return head, found[head]
        if len(found) == 1:
            return next(iter(found.items()))
        return own, []

    @classmethod
    def read(cls, prefix: str, rows: Sequence[ObjectRow], values: Mapping[str, Any]) -> StoredGroups:
        """``values``: key -> value of every row. Raises PlanError when groups name their parameters by number only."""
        out = cls(rows)
        nested: dict[int, dict[str, Any]] = {}
        flat: dict[str, dict[str, Any]] = {}
        rests = [row.key.removeprefix(prefix).removeprefix("param_groups.") for row in rows]
        # a parameter may begin with a number too (`0.weight` of a Sequential): groups are numbers that have `params`
        numbers = {rest.partition(".")[0] for rest in rests if rest.partition(".")[2] == _PARAMS}
        for row, rest in zip(rows, rests, strict=True):
            first, _, tail = rest.partition(".")
            if first.isdigit() and first in numbers:
                nested.setdefault(int(first), {})[tail] = values[row.key]
            else:
                name, _, last = rest.rpartition(".")
                flat.setdefault(name, {})[last] = values[row.key]
        listed: list[str] = []
        for number, fields in sorted(nested.items()):
            params = _strings(fields.pop(_PARAMS, None))
            if params is None:
                out.by_number.append(f"{prefix}param_groups.{number}.{_PARAMS}")
                continue
            if not params:
                out.empty[number] = fields
            for name in params:
                out.of.setdefault(name, fields)
                listed.append(name)
        out.of.update(flat)
        clean = unwrap_all(out.of)
        out.of = {clean[name]: fields for name, fields in out.of.items()}
        return out


def _strings(value: Any) -> list[str] | None:
    """A list of names, or None when the value is no such thing."""
    if not isinstance(value, list | tuple):
        return None
    names = [item for item in value if isinstance(item, str)]
    return names if len(names) == len(value) else None


@dataclass
class Resolved:
    """What wanted hyperparameters become. values: (leaf, value). kept: key -> why it stays as it is. problems: key -> error."""

    values: list[tuple[ObjectLeaf, Any]] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    problems: dict[str, MissingKeysError | PlanError] = field(default_factory=dict)


def same_value(a: Any, b: Any) -> bool:
    """Whether two hyperparameters are the same; a list and a tuple of the same values are."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) or isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        x, y = torch.as_tensor(a), torch.as_tensor(b)
        return x.shape == y.shape and bool((x == y).all())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def resolve_groups(leaves: Iterable[ObjectLeaf], stored: StoredGroups) -> Resolved:
    """Values for the wanted hyperparameters of one optimizer root (leaves with a ``group``).

    A group whose parameters disagree (it merges stored groups) is a PlanError that names the values; one with new parameters only is a
    MissingKeysError; a field that was not stored is one too, unless it is a switch (a bool or None), as newer versions of torch bring them.
    """
    out = Resolved()
    leaves = list(leaves)
    if stored.by_number or not stored.rows:
        why = f"{stored.by_number[0]!r} holds numbers, not names" if stored.by_number else "it holds no param_groups"
        for leaf in leaves:
            text = f"hyperparameter {leaf.key!r}: the checkpoint does not say to which parameters its values belong: {why}"
            out.problems[leaf.key] = PlanError(text) if stored.by_number else MissingKeysError(text)
        return out
    nested: dict[int, list[tuple[ObjectLeaf, GroupField]]] = {}
    flat: list[tuple[ObjectLeaf, GroupField]] = []
    for leaf in leaves:
        if leaf.group is None:
            continue
        if isinstance(leaf.group.group, int):
            nested.setdefault(leaf.group.group, []).append((leaf, leaf.group))
        else:
            flat.append((leaf, leaf.group))
    lists = [leaf.value for fields in nested.values() for leaf, f in fields if f.field == _PARAMS and isinstance(leaf.value, list | tuple)]
    every = unwrap_all(name for params in lists for name in params if isinstance(name, str))
    for number, fields in sorted(nested.items()):
        params = next((leaf.value for leaf, f in fields if f.field == _PARAMS), None)
        names = _strings(params)
        if names is None:
            for leaf, _ in fields:
                out.problems[leaf.key] = PlanError(
                    f"{leaf.key!r}: the wanted param_groups.{number} has no list of parameter names (`params`), so nothing says which "
                    "stored values are its own; use ucp_dcp.TrainState or torch's get_optimizer_state_dict"
                )
            continue
        _group(out, number, [every.get(p, p) for p in names], fields, stored)
    for leaf, f in flat:
        known = [str(f.group)] if str(f.group) in stored.of else []
        _field(out, leaf, f.field, [str(f.group)], known, lambda name: stored.of[name])
    return out


def _group(
    out: Resolved, number: int, params: Sequence[str], fields: Sequence[tuple[ObjectLeaf, GroupField]], stored: StoredGroups
) -> None:
    known = [p for p in params if p in stored.of]
    for leaf, f in fields:
        if f.field == _PARAMS:
            continue  # the names of the live parameters
        if not params:
            empty = stored.empty.get(number)
            if empty is not None and f.field in empty:
                out.values.append((leaf, empty[f.field]))
            else:
                out.kept[leaf.key] = "a group without parameters, and the checkpoint has no such group at its place"
        else:
            _field(out, leaf, f.field, params, known, lambda name: stored.of[name])


def _field(
    out: Resolved, leaf: ObjectLeaf, name: str, params: Sequence[str], known: Sequence[str], fields_of: Callable[[str], Mapping[str, Any]]
) -> None:
    if not known:
        shown = ", ".join(params[:_SHOWN]) + (", ..." if len(params) > _SHOWN else "")
        out.problems[leaf.key] = MissingKeysError(
            f"{leaf.key!r}: the optimizer of the checkpoint had none of this group's parameters ({shown}); "
            "strict=False or exclude=[...] keeps the present value"
        )
        return
    holders = [p for p in known if name in fields_of(p)]
    if not holders:
        if leaf.value is None or isinstance(leaf.value, bool):
            out.kept[leaf.key] = "a switch that the checkpoint does not have"
        else:
            out.problems[leaf.key] = MissingKeysError(
                f"{leaf.key!r}: the checkpoint has no {name!r} for parameter {known[0]!r}, only "
                f"{', '.join(sorted(fields_of(known[0]))) or 'nothing'}; was it another optimizer?"
            )
        return
    first = holders[0]
    value = fields_of(first)[name]
    for other in holders[1:]:
        if fields_of(other) is not fields_of(first) and not same_value(fields_of(other)[name], value):
            out.problems[leaf.key] = PlanError(
                f"{leaf.key!r}: this group merges parameters that were stored with different values: {first!r} has {value!r}, "
                f"{other!r} has {fields_of(other)[name]!r}; keep them in separate groups, or exclude {leaf.key!r} and set it yourself"
            )
            return
    out.values.append((leaf, value))
