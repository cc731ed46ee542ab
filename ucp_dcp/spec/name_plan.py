"""Plans of a name map: of which boxes of which source tensors each tensor of another family is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import SpecError
from .expr import Expr, Value
from .name_rows import Part, Row, find
from .names import Match, NameGlob, distance

__all__ = ["Cut", "MappedTensor", "NamePlan", "plan_names"]

_Int64: TypeAlias = NDArray[np.int64]
_Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """k boxes of one source tensor that are boxes of a target tensor.

    Attributes:
        source: fqn of the source tensor.
        source_offset, size: (k, n) in the source's dims.
        target_offset: (k, m) in the target's dims.
        dims: for each target dim the source dim that it is, or -1: a dim of a stacked target, one long here.
    """

    source: str
    source_offset: _Int64
    size: _Int64
    target_offset: _Int64
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor of the target family: its fqn, its shape, and the cuts that make it up, exactly once each element.

    ``same``: it is one source tensor whole and unchanged, so state of any shape that belongs to that one belongs to this one.
    """

    fqn: str
    shape: _Shape
    cuts: tuple[Cut, ...]
    same: bool

    @property
    def sources(self) -> tuple[str, ...]:
        """Fqns of the source tensors, in order, each once."""
        return tuple(dict.fromkeys(cut.source for cut in self.cuts))


@dataclass(frozen=True, slots=True)
class NamePlan:
    """What :meth:`NameMap.plan` returns: the target's tensors, and source names that the map says to leave out."""

    tensors: tuple[MappedTensor, ...]
    ignored: tuple[str, ...]


@dataclass(slots=True)
class _Instance:
    """One hub: the source tensor of each part, and what its names captured."""

    row: Row
    match: Match
    found: dict[int, str]


def plan_names(
    rows: Sequence[Row],
    ignore: Sequence[NameGlob],
    source: str,
    target: str,
    shapes: Mapping[str, Sequence[int]],
    lookup: Callable[[str], Value],
    where: str,
) -> NamePlan:
    """See :meth:`ucp_dcp.spec.NameMap.plan`. ``where``: the map, for messages."""
    instances, ignored = _instances(rows, ignore, source, target, {name: tuple(shape) for name, shape in shapes.items()}, where)
    out: dict[str, list[tuple[int | None, MappedTensor]]] = {}
    for instance in instances:
        for tensor, at in _convert(instance, source, target, shapes, lookup, where):
            out.setdefault(tensor.fqn, []).append((at, tensor))
    return NamePlan(tuple(_stacked(name, out[name], where) for name in sorted(out)), tuple(ignored))


def _instances(
    rows: Sequence[Row], ignore: Sequence[NameGlob], source: str, target: str, shapes: Mapping[str, _Shape], where: str
) -> tuple[list[_Instance], list[str]]:
    found: dict[tuple[Any, ...], _Instance] = {}
    ignored: list[str] = []
    lost: list[str] = []
    for name, shape in shapes.items():
        hit = find(rows, source, name)
        if hit is None:
            (ignored if any(glob.match(name) for glob in ignore) else lost).append(name)
            continue
        row, number, match = hit
        part = row.parts[source][number]
        if target not in row.parts:
            ignored.append(name)
            continue
        if part.stack and not shape:
            raise SpecError(f"{where}: {name!r} has no dimensions, but row {row.number} says that it is stacked")
        for at in range(shape[0]) if part.stack else (None,):
            captures = match.captures if at is None else {**match.captures, part.stack: at}
            key = (row.number, tuple(sorted(captures.items())), match.wildcards)
            instance = found.setdefault(key, _Instance(row, Match(captures, match.wildcards), {}))
            instance.found[number] = name
    if lost:
        globs = [part.glob.text for row in rows for part in row.parts.get(source, ())]
        near = min(globs, key=lambda glob: distance(glob, lost[0]), default="")
        raise SpecError(
            f"{where}: {len(lost)} names have no row in family {source!r}: {', '.join(lost[:5])}"
            f"{' ...' if len(lost) > 5 else ''}. The nearest to the first is {near!r}"
        )
    return list(found.values()), ignored


def _number(value: int | str, lookup: Callable[[str], Value], what: str) -> int:
    found = value if isinstance(value, int) else Expr(value).evaluate(lookup)
    if isinstance(found, bool) or not isinstance(found, int) or found <= 0:
        raise SpecError(f"{what}: {value!r} is {found!r}, expected a whole number from 1")
    return found


@dataclass(frozen=True, slots=True)
class _Runs:
    """Where runs of rows of one tensor lie in the hub: (k,) starts in the tensor, starts in the hub, lengths; ascending in the tensor."""

    own: _Int64
    hub: _Int64
    length: _Int64


def _runs(part: Part, sizes: Sequence[int], groups: int, total: int, lookup: Callable[[str], Value], what: str) -> _Runs:
    if part.parts is None:
        own, hub, length = np.zeros(1, np.int64), np.zeros(1, np.int64), np.asarray([total], np.int64)
    else:
        begins = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.asarray(sizes, np.int64))))
        step = np.arange(groups, dtype=np.int64) * begins[-1]
        hub = np.concatenate([step + begins[j] for j in part.parts])
        length = np.concatenate([np.full(groups, sizes[j], np.int64) for j in part.parts])
        own = np.concatenate((np.zeros(1, np.int64), np.cumsum(length)[:-1]))
    if part.rotary == 0:
        return _Runs(own, hub, length)
    # Rows of a head: (pair, half) here, (half, pair) in the hub.
    heads = _number(part.rotary, lookup, what)
    rows = np.repeat(hub - own, length) + np.arange(int(length.sum()), dtype=np.int64)
    if len(rows) % (2 * heads):
        raise SpecError(f"{what}: {len(rows)} rows are not {heads} heads of an even size")
    rows = rows.reshape(heads, 2, -1).transpose(0, 2, 1).reshape(-1)
    return _Runs(np.arange(len(rows), dtype=np.int64), rows, np.ones(len(rows), np.int64))


def _convert(
    instance: _Instance,
    source: str,
    target: str,
    shapes: Mapping[str, Sequence[int]],
    lookup: Callable[[str], Value],
    where: str,
) -> Iterable[tuple[MappedTensor, int | None]]:
    """The target's tensors of one hub, each with its place in a stack."""
    row = instance.row
    ours, theirs = row.parts[source], row.parts[target]
    missing = [part for number, part in enumerate(ours) if number not in instance.found]
    if missing:
        names = [part.name(instance.match) for part in missing]
        raise SpecError(f"{where}: {', '.join(names)} is missing, of which {next(iter(instance.found.values()))!r} is another part")
    found = [instance.found[number] for number in range(len(ours))]
    what = f"{where}: row {row.number}, {found[0]!r} of shape {list(shapes[found[0]])}"

    inner = [_hub_shape(part, shapes[name], what) for part, name in zip(ours, found, strict=True)]
    dim = row.join.dim if row.join else 0
    if any(len(shape) != len(inner[0]) for shape in inner) or (row.join and not 0 <= dim < len(inner[0])):
        raise SpecError(f"{what}: its parts have shapes {[list(s) for s in inner]}, which cannot be joined along dimension {dim}")
    others = {tuple(n for d, n in enumerate(shape) if d != dim) for shape in inner}
    if len(others) > 1:
        raise SpecError(f"{what}: its parts have shapes {[list(s) for s in inner]}, which differ outside dimension {dim}")
    total = sum(shape[dim] for shape in inner) if inner[0] else 1

    def with_total(name: str) -> Value:
        return total if name == "total" else lookup(name)

    groups, sizes = 1, [total]
    if row.join:
        groups = _number(row.join.groups, with_total, what)
        sizes = [_number(size, with_total, what) for size in row.join.sizes]
        if groups * sum(sizes) != total:
            raise SpecError(f"{what}: {groups} groups of parts of {sizes} rows, but there are {total} rows; check the variables")
    have = [_runs(part, sizes, groups, total, with_total, what) for part in ours]
    for shape, runs, name in zip(inner, have, found, strict=True):
        if shape and int(runs.length.sum()) != shape[dim]:
            raise SpecError(f"{what}: {name!r} has {shape[dim]} rows along dimension {dim}, expected {int(runs.length.sum())}")

    # All runs of the sources in the order of the hub, which they cover once.
    owner = np.repeat(np.arange(len(have)), [len(runs.own) for runs in have])
    own, hub, length = (np.concatenate([getattr(runs, name) for runs in have]) for name in ("own", "hub", "length"))
    order = np.argsort(hub, kind="stable")
    owner, own, hub, length = owner[order], own[order], hub[order], length[order]

    for part in theirs:
        runs = _runs(part, sizes, groups, total, with_total, what)
        lo = np.searchsorted(hub, runs.hub, side="right") - 1
        hi = np.searchsorted(hub, runs.hub + runs.length, side="left")
        count = hi - lo
        mine = np.repeat(np.arange(len(runs.hub)), count)  # run of the target
        piece = np.repeat(lo - np.cumsum(count) + count, count) + np.arange(int(count.sum()))  # run of a source
        start = np.maximum(hub[piece], runs.hub[mine])
        size = np.minimum(hub[piece] + length[piece], runs.hub[mine] + runs.length[mine]) - start
        rows = _Pieces(owner[piece], own[piece] + start - hub[piece], runs.own[mine] + start - runs.hub[mine], size)
        hub_shape = tuple(int(runs.length.sum()) if d == dim else n for d, n in enumerate(inner[0]))
        name = part.name(instance.match)
        own_dims = part.dims(len(hub_shape))
        shape = tuple(1 if q < 0 else hub_shape[q] for q in own_dims)
        at = instance.match.captures[part.stack] if part.stack else None
        cuts = tuple(
            _cut(rows, number, found[number], ours[number], instance, hub_shape, dim, own_dims)
            for number in dict.fromkeys(rows.owner.tolist())
        )
        same = len(cuts) == 1 and len(found) == 1 and ours[0].parts == part.parts and own_dims == ours[0].dims(len(hub_shape))
        yield MappedTensor(name, shape, cuts, same and not ours[0].stack and ours[0].rotary == part.rotary), at


@dataclass(frozen=True, slots=True)
class _Pieces:
    owner: NDArray[np.intp]
    source: _Int64
    target: _Int64
    size: _Int64


def _hub_shape(part: Part, shape: Sequence[int], what: str) -> _Shape:
    inner = tuple(shape[1:] if part.stack else shape)
    if part.permute and len(part.permute) != len(inner):
        raise SpecError(f"{what}: {len(inner)} dimensions, but the row permutes {len(part.permute)}")
    return tuple(inner[part.permute.index(q)] for q in range(len(inner))) if part.permute else inner


def _cut(
    rows: _Pieces, number: int, name: str, part: Part, instance: _Instance, hub: _Shape, dim: int, target_dims: tuple[int, ...]
) -> Cut:
    pick = rows.owner == number
    source, target, size = rows.source[pick], rows.target[pick], rows.size[pick]
    # Runs that lie end to end on both sides are one.
    apart = np.ones(len(source), bool)
    apart[1:] = (source[1:] != source[:-1] + size[:-1]) | (target[1:] != target[:-1] + size[:-1])
    first = np.flatnonzero(apart)
    size = np.add.reduceat(size, first) if len(first) else size
    source, target = source[first], target[first]
    source_dims = part.dims(len(hub))
    k = len(source)

    def column(q: int, joined: _Int64, other: int) -> _Int64:
        return joined if q == dim else np.full(k, other, np.int64)

    stack = instance.match.captures[part.stack] if part.stack else 0
    offset = [np.full(k, stack, np.int64) if q < 0 else column(q, source, 0) for q in source_dims]
    extent = [np.ones(k, np.int64) if q < 0 else column(q, size, hub[q]) for q in source_dims]
    place = [np.zeros(k, np.int64) if q < 0 else column(q, target, 0) for q in target_dims]
    back = tuple(-1 if q < 0 else source_dims.index(q) for q in target_dims)

    def table(columns: list[_Int64]) -> _Int64:
        return np.stack(columns, axis=1) if columns else np.zeros((k, 0), np.int64)

    return Cut(name, table(offset), table(extent), table(place), back)


def _stacked(name: str, found: list[tuple[int | None, MappedTensor]], where: str) -> MappedTensor:
    if found[0][0] is None:
        if len(found) > 1:
            raise SpecError(f"{where}: {len(found)} source tensors would all become {name!r}")
        return found[0][1]
    elements = [(at, tensor) for at, tensor in found if at is not None]
    places = sorted(at for at, _ in elements)
    if places != list(range(len(found))):
        raise SpecError(f"{where}: {name!r} is stacked of the elements {places}, expected each of 0 to {len(found) - 1} once")
    shapes = {tensor.shape for _, tensor in found}
    if len(shapes) > 1:
        raise SpecError(f"{where}: {name!r} is stacked of elements of different shapes {sorted(shapes)}")
    cuts = []
    for at, tensor in elements:
        for cut in tensor.cuts:
            place = cut.target_offset.copy()
            place[:, 0] = at
            cuts.append(Cut(cut.source, cut.source_offset, cut.size, place, cut.dims))
    return MappedTensor(name, (len(found), *found[0][1].shape[1:]), tuple(cuts), False)
