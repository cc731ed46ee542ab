"""Is a checkpoint true to itself? The fp32 master of a parameter, rounded to the dtype of the stored weight, must be that weight.

A mixed-precision trainer writes every parameter twice: the master, through the optimizer's partitions, and the low-precision weight,
through the module. The two take different ways through the writer (and through a parser of the format), so bits that agree prove both,
and bits that do not agree prove that one of them is wrong.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch

from .dtypes import is_floating
from .errors import MissingKeysError
from .names import Role, canonical_name

if TYPE_CHECKING:
    from .catalog import Catalog, TensorRow
    from .checkpoint import Checkpoint

__all__ = ["CheckReport", "Outcome", "ParameterCheck", "check"]

Outcome = Literal["consistent", "inconsistent", "unproven"]

SLAB = 1 << 22
"""Elements compared at a time."""
_SHOWN = 20


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
    """

    name: str
    outcome: Outcome
    reason: str
    master: str | None
    weight: str | None
    elements: int
    differing: int = 0
    first: tuple[int, ...] | None = None


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
            lines += [f"  {outcome}: {p.name}: {p.reason}" for p in own[:_SHOWN]]
            if len(own) > _SHOWN:
                lines.append(f"  {outcome}: and {len(own) - _SHOWN:,} more")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: ``ok``, ``counts`` and ``parameters``."""
        return {"ok": self.ok, "counts": self.counts, "parameters": [asdict(p) for p in self.parameters]}

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.to_dict(), indent=1)


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
    return CheckReport(tuple(_check_one(checkpoint, name, masters.get(name), weights.get(name)) for name in wanted))


def _check_one(checkpoint: Checkpoint, name: str, master: TensorRow | None, weight: TensorRow | None) -> ParameterCheck:
    row = master or weight
    assert row is not None
    elements = prod(row.shape)

    def found(outcome: Outcome, reason: str, differing: int = 0, first: tuple[int, ...] | None = None) -> ParameterCheck:
        dtypes = [None if row is None else row.dtype for row in (master, weight)]
        return ParameterCheck(name, outcome, reason, dtypes[0], dtypes[1], elements, differing, first)

    if master is None or weight is None:
        return found("unproven", f"no second copy: there is only the {'weight' if master is None else 'master'}")
    if master.shape != weight.shape:
        return found("inconsistent", f"the master has shape {list(master.shape)}, the weight {list(weight.shape)}", elements)
    if _same_bytes(checkpoint.catalog, master, weight):
        return found("unproven", "no second copy: master and weight are the same stored bytes")
    if not _comparable(master.dtype) or not _comparable(weight.dtype):
        return found("unproven", f"{master.dtype} is not rounded to {weight.dtype} by a cast alone")
    if not elements:
        return found("unproven", "no elements")
    return _compare(checkpoint, master, weight, found)


def _comparable(dtype: str) -> bool:
    """fp8 and fp4 weights have scales beside them."""
    return is_floating(dtype) and not dtype.startswith(("float8", "float4"))


def _compare(checkpoint: Checkpoint, master: TensorRow, weight: TensorRow, found: Any) -> ParameterCheck:
    differing = 0
    first: tuple[int, ...] | None = None
    level: torch.Tensor | None = None
    constant = True
    stored_master, stored_weight = (checkpoint[canonical_name(row.role, row.fqn, row.state, row.key)] for row in (master, weight))
    for index in _slabs(master.shape, SLAB):
        low = stored_weight[index]
        high = stored_master[index].to(low.dtype)
        wrong = (_bits(low) != _bits(high)) & ~(torch.isnan(low) & torch.isnan(high))
        count = int(wrong.sum())
        if count and first is None:
            first = _where(index, wrong, master.shape)
        differing += count
        level = low.reshape(-1)[:1].clone() if level is None else level
        constant = constant and bool((_bits(low.reshape(-1)) == _bits(level)).all())
    if differing:
        share = f"{differing:,} of {prod(master.shape):,} elements"
        reason = f"{share} of the master, rounded to {weight.dtype}, are not the weight; the first at {list(first or ())}"
        return found("inconsistent", reason, differing, first)  # type: ignore[no-any-return]
    if constant:
        return found("unproven", "constant: every element is the same, so a wrong order would not show")  # type: ignore[no-any-return]
    return found("consistent", "")  # type: ignore[no-any-return]


_INT = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits as integers."""
    return tensor.contiguous().view(_INT[tensor.element_size()])


def _slabs(shape: Sequence[int], limit: int) -> Iterator[tuple[slice, ...]]:
    """Indices that cut a tensor into boxes of at most ``limit`` elements, in C order."""
    if prod(shape) <= limit or not shape:
        yield tuple(slice(0, n) for n in shape)
        return
    inner = prod(shape[1:])
    step = max(1, limit // max(1, inner))
    for begin in range(0, shape[0], step):
        head = slice(begin, min(begin + step, shape[0]))
        if step > 1 or inner <= limit:
            yield (head, *(slice(0, n) for n in shape[1:]))
        else:
            for rest in _slabs(shape[1:], limit):
                yield (head, *rest)


def _where(index: Sequence[slice], wrong: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    place = wrong.nonzero()[0].tolist()[: len(shape)]
    return tuple(part.start + int(i) for part, i in zip(index, place, strict=True))


def _same_bytes(catalog: Catalog, a: TensorRow, b: TensorRow) -> bool:
    """True when both rows are the same chunks: an alias, not a copy."""
    (a0, a1), (b0, b1) = catalog.chunk_range(a.index), catalog.chunk_range(b.index)
    if a.dtype != b.dtype or a1 - a0 != b1 - b0:
        return False
    same = (catalog.chunk_file[a0:a1] == catalog.chunk_file[b0:b1]) & (catalog.chunk_offset[a0:a1] == catalog.chunk_offset[b0:b1])
    return bool(same.all()) and a1 > a0
