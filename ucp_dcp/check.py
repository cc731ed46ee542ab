"""Is a checkpoint true to itself? The fp32 master of a parameter, rounded to the dtype of the stored weight, must be that weight.

A mixed-precision trainer writes every parameter twice: the master, through the optimizer's partitions, and the low-precision weight,
through the module. The two take different ways through the writer (and through a parser of the format), so bits that agree prove both,
and bits that do not agree prove that one of them is wrong.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from .errors import MissingKeysError
from .names import Role
from .planners.consistency import SLAB, comparable, is_halved, states_of

if TYPE_CHECKING:
    from .catalog import Catalog, TensorRow
    from .checkpoint import Checkpoint

__all__ = ["CheckReport", "Outcome", "ParameterCheck", "check"]

Outcome = Literal["consistent", "inconsistent", "unproven"]

_SHOWN = 100


@dataclass(frozen=True, slots=True)
class ParameterCheck:
    """What was found for one parameter.

    Attributes:
        name: of the parameter (fqn).
        outcome: ``unproven``: there is nothing to compare, or nothing that a wrong element order would change.
        reason: why, in words.
        master, weight: dtype names, None where there is none.
        elements: of the parameter.
        differing: elements whose rounded master is not the weight.
        first: index of the first such element.
        states: what the optimizer state of the parameter consists of; they came the same way as the master, and share its fate.
    """

    name: str
    outcome: Outcome
    reason: str
    master: str | None
    weight: str | None
    elements: int
    differing: int = 0
    first: tuple[int, ...] | None = None
    states: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All parameters, in order of their names. ``str(report)`` is for people, ``to_json()`` for programs."""

    parameters: tuple[ParameterCheck, ...]

    @property
    def ok(self) -> bool:
        """True when no parameter is inconsistent."""
        return not self.names("inconsistent")

    @property
    def counts(self) -> dict[str, int]:
        """Number of parameters of each outcome."""
        found = Counter(p.outcome for p in self.parameters)
        return {outcome: found[outcome] for outcome in ("consistent", "inconsistent", "unproven")}

    def names(self, outcome: Outcome) -> list[str]:
        """Names of the parameters with an outcome."""
        return [p.name for p in self.parameters if p.outcome == outcome]

    def __str__(self) -> str:
        lines = ["check: " + ", ".join(f"{n:,} {outcome}" for outcome, n in self.counts.items())]
        if not self.parameters:
            lines.append("  the checkpoint does not say which of its tensors are weights and masters")
        for outcome in ("inconsistent", "unproven"):
            own = [p for p in self.parameters if p.outcome == outcome]
            lines += [f"  {outcome}: {p.name}{_states(p)}: {p.reason}" for p in own[:_SHOWN]]
            if len(own) > _SHOWN:
                lines.append(f"  {outcome}: and {len(own) - _SHOWN:,} more")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: ``ok``, ``counts`` and ``parameters``."""
        return {"ok": self.ok, "counts": self.counts, "parameters": [asdict(p) for p in self.parameters]}

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.to_dict(), indent=1)


def _states(parameter: ParameterCheck) -> str:
    """The states of a broken parameter, which are wrong as well."""
    return f" ({', '.join(parameter.states)})" if parameter.outcome == "inconsistent" and parameter.states else ""


def check(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> CheckReport:
    """Compare every master with the stored weight, bit for bit after rounding to nearest even; NaN equals NaN.

    Reads both copies once, ``SLAB`` elements at a time. Where master and weight have the same dtype they must be equal.

    Args:
        checkpoint: an open checkpoint.
        names: parameters (fqn) to look at; default all.

    Raises MissingKeysError for a name that is no parameter; StoreError, CorruptCheckpointError.
    """
    catalog = checkpoint.catalog
    masters: dict[str, TensorRow] = {}
    weights: dict[str, TensorRow] = {}
    for t in range(catalog.n_tensors):
        row = catalog.tensor(t)
        if row.role == Role.MASTER:
            masters[row.fqn] = row
        elif row.role == Role.WEIGHT:
            weights[row.fqn] = row
    known = sorted(masters.keys() | weights.keys())
    wanted = known if names is None else sorted(set(names))
    unknown = [name for name in wanted if name not in masters and name not in weights]
    if unknown:
        raise MissingKeysError(f"{checkpoint.url}: no parameter is named {', '.join(map(repr, unknown[:5]))}; there are {len(known)}")
    states = states_of(catalog)
    return CheckReport(
        tuple(_check_one(checkpoint, name, masters.get(name), weights.get(name), tuple(states.get(name, ()))) for name in wanted)
    )


def _check_one(
    checkpoint: Checkpoint, name: str, master: TensorRow | None, weight: TensorRow | None, states: tuple[str, ...]
) -> ParameterCheck:
    row = master or weight
    assert row is not None
    elements = prod(row.shape)

    def found(outcome: Outcome, reason: str, differing: int = 0, first: tuple[int, ...] | None = None) -> ParameterCheck:
        dtypes = [None if row is None else row.dtype for row in (master, weight)]
        return ParameterCheck(name, outcome, reason, dtypes[0], dtypes[1], elements, differing, first, states)

    if master is None or weight is None:
        return found("unproven", f"no second copy: there is only the {'weight' if master is None else 'master'}")
    if master.shape != weight.shape:
        return found("inconsistent", f"the master has shape {list(master.shape)}, the weight {list(weight.shape)}", elements)
    if _same_bytes(checkpoint.catalog, master, weight):
        return found("unproven", "no second copy: master and weight are the same stored bytes")
    if is_halved(checkpoint.catalog, master):
        return found("unproven", "no second copy: the master is stored as the weight and what rounding took from it")
    if not comparable(master.dtype) or not comparable(weight.dtype):
        return found("unproven", f"{master.dtype} is not rounded to {weight.dtype} by a cast alone")
    if not elements:
        return found("unproven", "no elements")
    return _compare(checkpoint, master, weight, found)


def _compare(checkpoint: Checkpoint, master: TensorRow, weight: TensorRow, found: Any) -> ParameterCheck:
    result = checkpoint._compare(master, weight, slab=SLAB)
    if result.differing:
        share = f"{result.differing:,} of {prod(master.shape):,} elements"
        reason = f"{share} of the master, rounded to {weight.dtype}, are not the weight; the first at {list(result.first or ())}"
        return found("inconsistent", reason, result.differing, result.first)  # type: ignore[no-any-return]
    if result.constant:
        return found("unproven", "constant: every element is the same, so a wrong order would not show")  # type: ignore[no-any-return]
    return found("consistent", "")  # type: ignore[no-any-return]


def _same_bytes(catalog: Catalog, a: TensorRow, b: TensorRow) -> bool:
    """True when both rows are the same chunks: an alias, not a copy."""
    (a0, a1), (b0, b1) = catalog.chunk_range(a.index), catalog.chunk_range(b.index)
    if a.dtype != b.dtype or a1 - a0 != b1 - b0:
        return False
    same = (catalog.chunk_file[a0:a1] == catalog.chunk_file[b0:b1]) & (catalog.chunk_offset[a0:a1] == catalog.chunk_offset[b0:b1])
    return bool(same.all()) and a1 > a0
