"""A checkpoint under the names of another model family: a catalog whose chunks are parts of another source's chunks. No byte moves.

Fusing, splitting, stacking and transposing only change which box of which tensor a stored byte belongs to, and chunks have strides, so
what is mapped is read as directly as what it is a view of. ``ucp_dcp.spec.name_map`` says what becomes of which tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..catalog import CatalogBuilder, ObjectRow, TensorRow
from ..dtypes import CODES, ITEMSIZE
from ..errors import SpecError
from ..geometry import intersect_pairs
from ..names import Role, canonical_name
from ..spec.name_map import NameMap
from ..spec.name_plan import Cut, MappedTensor
from .model_facts import model_facts
from .source import Located, Source

__all__ = ["MappedNames", "MappedSource", "map_source"]

_Int64 = NDArray[np.int64]
_PARAMS = re.compile(r"(?:^|\.)param_groups\.\d+\.params$")


@dataclass(frozen=True)
class MappedNames:
    """Under which names a checkpoint is wanted.

    Attributes:
        map: a :class:`NameMap`, the name of a ready one (``ucp_dcp.spec.ready_name_maps()``), or a YAML file.
        to: the family of the wanted names.
        source: the family of the stored names; by default the one that knows most of them.
        variables: values of the map's variables; those that the checkpoint tells need not be given.
        root: for a checkpoint that does not say what its tensors are (a stock DCP save): the keys below this prefix are weights,
            ``"model"`` for ``model.<name>``, ``""`` for all keys.
    """

    map: NameMap | str
    to: str
    source: str | None = None
    variables: Mapping[str, int] | None = None
    root: str | None = None

    def apply(self, source: Source) -> MappedSource:
        """The view. Raises SpecError."""
        names = self.map if isinstance(self.map, NameMap) else NameMap.load(self.map)
        return map_source(source, names, self.to, self.source, self.variables, self.root)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Parts of base chunks, in the order of the mapped catalog's chunks."""

    base: _Int64
    delta: list[tuple[int, ...]]  # element of the base chunk where each begins
    dims: list[tuple[int, ...]]  # base dim of each dim, -1: a stacked one


class MappedSource(Source):
    """Another source under other names. Pickles when that one does.

    Attributes:
        base: the source it is a view of.
        left_out: canonical names of tensors of ``base`` that have no place under the new names: those that the map ignores, and state
            that belongs to a fused or split parameter but has another shape than it.
    """

    def __init__(
        self,
        base: Source,
        builder: CatalogBuilder,
        chunks: _Chunks,
        same: list[list[int]],
        became: Mapping[str, list[str]],
        left_out: list[str],
    ) -> None:
        super().__init__(builder.build(), base.store, base.format, base.provenance)
        self.base = base
        self.doubt = base.doubt
        self.left_out = tuple(left_out)
        self._parts = chunks
        self._same = same
        self._became = dict(became)
        self._compared = not same

    def locate(self, chunks: NDArray[np.int64]) -> Located:
        """See :meth:`Source.locate`. Before the first, numbers that several source tensors must agree about (steps) are compared.

        Raises SpecError where they differ.
        """
        if not self._compared:
            self._compare()
            self._compared = True
        chunks = np.asarray(chunks, dtype=np.int64)
        found = self.base.locate(self._parts.base[chunks])
        offset = found.offset.astype(np.int64).copy()
        strides: list[tuple[int, ...]] = []
        for i, c in enumerate(chunks.tolist()):
            own = found.strides[i]
            offset[i] += ITEMSIZE[int(found.dtype[i])] * sum(d * s for d, s in zip(self._parts.delta[c], own, strict=True))
            strides.append(tuple(own[d] if d >= 0 else 0 for d in self._parts.dims[c]))
        return Located(found.file, offset, strides, found.dtype)

    def _compare(self) -> None:
        catalog = self.base.catalog
        paths = [row.path for row in catalog.files]
        for rows in self._same:
            values = {}
            for t in rows:
                place = self.base.locate(np.asarray([catalog.chunk_range(t)[0]], np.int64))
                width = ITEMSIZE[int(place.dtype[0])]
                values[t] = self.store.read(paths[int(place.file[0])], int(place.offset[0]), width)
            if len(set(values.values())) > 1:
                names = [f"{catalog.tensor(t).name} ({value.hex()})" for t, value in values.items()]
                raise SpecError(f"parameters that become one differ in a state that is one number: {', '.join(names)} (bytes in hex)")

    def read_object(self, row: ObjectRow, allow_classes: Iterable[type] = ()) -> Any:
        """See :meth:`Source.read_object`; the parameter names of ``param_groups`` are the new ones."""
        value = self.base.read_object(row, allow_classes)
        if isinstance(value, list | tuple) and _PARAMS.search(row.key):
            new = [name for old in value for name in (self._became.get(old, [old]) if isinstance(old, str) else [old])]
            return list(dict.fromkeys(new))
        return value


def map_source(
    base: Source,
    names: NameMap,
    to: str,
    source: str | None = None,
    variables: Mapping[str, int] | None = None,
    root: str | None = None,
) -> MappedSource:
    """``base`` under the names that family ``to`` has for its tensors.

    Weights and buffers are mapped; masters and optimizer state follow their parameter where they have its shape. State of one element
    (``step``) is that of every parameter it becomes; where several parameters become one, theirs must be equal, which is compared before
    the first byte is read. Objects stay, with the names of parameters in ``param_groups`` mapped.

    Raises SpecError: as :meth:`NameMap.plan`.
    """
    catalog = base.catalog
    rows: dict[str, dict[tuple[Role, str], TensorRow]] = {}
    prefix = f"{root}." if root else ""
    left_out: list[str] = []
    for row in catalog.tensors():
        if row.role == Role.PLAIN and root is not None and row.key.startswith(prefix):
            rows.setdefault(row.key.removeprefix(prefix), {})[Role.WEIGHT, ""] = row
        elif row.role == Role.PLAIN:
            left_out.append(row.name)
        else:
            rows.setdefault(row.fqn, {})[row.role, row.state] = row
    shapes = {fqn: own.shape for fqn, states in rows.items() if (own := _owner(states)) is not None}
    if not shapes:
        raise SpecError(
            f"{base.store.url}: it names no weights, so nothing can be mapped"
            + ("; its tensors have no roles, say below which prefix the weights are (root=)" if left_out else "")
        )
    left_out += [row.name for fqn, states in rows.items() if fqn not in shapes for row in states.values()]
    family = source or names.family_of(shapes)
    known = {name: value for name, value in model_facts(base).items() if name in names.variables}
    plan = names.plan(family, to, shapes, {**known, **(variables or {})})
    left_out += [row.name for fqn in plan.ignored for row in rows[fqn].values()]

    wanted: list[_Wanted] = []
    became: dict[str, list[str]] = {}
    for tensor in plan.tensors:
        for fqn in tensor.sources:
            became.setdefault(fqn, []).append(tensor.fqn)
        kinds = dict.fromkeys(kind for fqn in tensor.sources for kind in rows[fqn])
        for role, state in kinds:
            full = {fqn: rows[fqn][role, state] for fqn in tensor.sources if (role, state) in rows[fqn]}
            follows = tensor.same or all(row.shape == shapes[fqn] or _one(row) for fqn, row in full.items())
            if len(full) == len(tensor.sources) and follows:
                wanted.append(_Wanted(canonical_name(role, tensor.fqn, state, ""), tensor, role, state, full))
            else:
                left_out += [row.name for row in full.values()]
    return _Builder(base).build(sorted(wanted, key=lambda entry: entry.key), became, sorted(set(left_out)))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor of the view, and the rows that it is made of, by their name in the map."""

    key: str
    tensor: MappedTensor
    role: Role
    state: str
    rows: Mapping[str, TensorRow]


def _owner(states: Mapping[tuple[Role, str], TensorRow]) -> TensorRow | None:
    """The row that has the parameter's shape."""
    for kind in ((Role.WEIGHT, ""), (Role.BUFFER, ""), (Role.MASTER, "")):
        if kind in states:
            return states[kind]
    return None


def _one(row: TensorRow) -> bool:
    return int(np.prod(row.shape, dtype=object)) == 1


class _Builder:
    def __init__(self, base: Source) -> None:
        self.base = base
        self.catalog = base.catalog
        self.out = CatalogBuilder()
        self.parts = _Chunks(np.zeros(0, np.int64), [], [])
        self.bases: list[_Int64] = []
        self.groups: dict[tuple[int, int, int], int] = {}
        for row in self.catalog.files:
            self.out.add_file(row.path, row.size, row.blocks)

    def build(self, wanted: list[_Wanted], became: Mapping[str, list[str]], left_out: list[str]) -> MappedSource:
        same: list[list[int]] = []
        pieces = 0
        for entry in wanted:
            tensor, rows = entry.tensor, list(entry.rows.values())
            if len({row.dtype for row in rows}) > 1:
                raise SpecError(f"{entry.key!r} would be made of different dtypes: {', '.join(f'{r.name} {r.dtype}' for r in rows)}")
            # One row as it is: a tensor that only gets another name, or a number that several parameters have in common.
            whole = tensor.same or (_one(rows[0]) and rows[0].shape != tensor.shape)
            shape = rows[0].shape if whole else tensor.shape
            handle = self.out.add_tensor(
                key=entry.key, role=entry.role, fqn=tensor.fqn, state=entry.state, dtype=rows[0].dtype, shape=shape
            )
            cuts = tensor.cuts
            if whole:
                if len(rows) > 1:
                    same.append([row.index for row in rows])
                zero, full = np.zeros((1, len(shape)), np.int64), np.asarray([shape], np.int64).reshape(1, len(shape))
                cuts = (Cut(tensor.cuts[0].source, zero, full, zero, tuple(range(len(shape)))),)
            for cut in cuts:
                pieces += 1
                self._add(handle, entry.rows[cut.source], cut, pieces)
        objects: dict[str, ObjectRow] = {}
        for row in self.catalog.objects:
            for renamed in _named(row, became):
                other = objects.setdefault(renamed.key, renamed)
                if other is not renamed and (other.encoding, other.value) != (renamed.encoding, renamed.value):
                    raise SpecError(f"{renamed.key!r} would be {other.value!r} and {renamed.value!r}: its parameters differ in it")
        for row in objects.values():
            self.out.add_object(row)
        base = np.concatenate(self.bases) if self.bases else np.zeros(0, np.int64)
        return MappedSource(self.base, self.out, _Chunks(base, self.parts.delta, self.parts.dims), same, became, left_out)

    def _add(self, handle: int, row: TensorRow, cut: Cut, piece: int) -> None:
        catalog = self.catalog
        first, _ = catalog.chunk_range(row.index)
        boxes = catalog.boxes(row.index)
        want, chunk, found = intersect_pairs(np.stack((cut.source_offset, cut.size), axis=1), boxes)
        if not len(want):
            return
        inside = found[:, 0] - cut.source_offset[want]
        m = len(cut.dims)
        target = np.zeros((len(want), 2, m), np.int64)
        target[:, 1] = 1
        for d, q in enumerate(cut.dims):
            target[:, 0, d] = cut.target_offset[want, d]
            if q >= 0:
                target[:, 0, d] += inside[:, q]
                target[:, 1, d] = found[:, 1, q]
        group = None
        stored = catalog.groups_of(row.index)[chunk]
        if (stored >= 0).any():
            group = np.asarray([self._group(int(g), piece, int(w)) for g, w in zip(stored, want, strict=True)], np.int32)
        codes = catalog.chunk_dtypes(row.index)[chunk]
        index = first + chunk
        # Only `locate` knows the place: what stands in the columns is where the base chunk begins, or its item.
        self.out.add_chunks(
            handle,
            target,
            catalog.chunk_file[index],
            catalog.chunk_offset[index],
            dtype=codes if (codes != CODES[row.dtype]).any() else None,
            group=group,
        )
        self.bases.append(index.astype(np.int64))
        self.parts.delta.extend(map(tuple, (found[:, 0] - boxes[chunk, 0]).tolist()))
        self.parts.dims.extend([cut.dims] * len(index))

    def _group(self, group: int, piece: int, run: int) -> int:
        if group < 0:
            return -1
        key = (group, piece, run)
        if key not in self.groups:
            self.groups[key] = self.out.add_group(str(self.catalog.groups[group]["op"]))
        return self.groups[key]


def _named(row: ObjectRow, became: Mapping[str, list[str]]) -> list[ObjectRow]:
    """What belongs to one parameter under its new names; any other object as it is.

    That is ``param_groups.<parameter>.<field>`` (torch's flattened form), and ``optim.state.<parameter>.<state>`` that is no tensor (the
    step of Megatron's distributed optimizer).
    """
    for mark in ("param_groups.", "optim.state."):
        head, found, rest = row.key.partition(mark)
        name, dot, field = rest.rpartition(".")
        if found and dot and (not head or head.endswith(".")) and name in became:
            keys = [f"{head}{mark}{new}.{field}" for new in became[name]]
            return [replace(row, key=key, fqn=key if row.fqn else "", path=(key,)) for key in keys]
    return [row]
