"""Name maps: the same model under the names of several families (Megatron, Hugging Face, torchtitan), as data.

A row of a map says under which names one logical tensor, the *hub*, stands in each family: whole (one name), in parts (a list of names;
``join`` says how they lie in the hub), stacked with others of its kind, transposed, or with the rows of each head in another order.
:meth:`NameMap.plan` turns the tensors of one family into those of another: for each of them, which boxes of which source tensors it is
made of. Pure: nothing is read, and bytes never move; ``ucp_dcp.formats.mapped`` makes a catalog of the result. ``docs/language.md``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import SpecError
from .expr import Expr, Value
from .names import Match, NameGlob, Template, distance
from .text import load_yaml

__all__ = ["Cut", "MappedTensor", "NameMap", "NamePlan", "ready_name_maps"]

VERSION = 1
_MAX_FILE = 4 << 20
_Int64: TypeAlias = NDArray[np.int64]
_Shape: TypeAlias = tuple[int, ...]


class _PartData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    stack: str = ""
    permute: list[int] = []
    rotary: int | str = 0
    concat: bool = False
    also: list[str] = []
    offset: dict[str, int] = {}


class _JoinData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sizes: list[int | str]
    groups: int | str = 1
    dim: int = 0


class _RowData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    names: dict[str, str | _PartData | list[str | _PartData]]
    join: _JoinData | None = None
    doc: str = ""


class _VariableData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    doc: str = ""
    default: int | str | None = None


class _MapData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ucp_name_map: int
    name: str
    families: list[str]
    rows: list[_RowData]
    doc: str = ""
    variables: dict[str, _VariableData] = {}
    ignore: dict[str, list[str]] = {}
    inherit: dict[str, str] = {}
    extends: str = ""


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


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor of one family in a row."""

    glob: NameGlob
    also: tuple[NameGlob, ...]
    parts: tuple[int, ...] | None  # which parts of the join it holds, one behind the other; None: the hub as it is
    stack: str
    permute: tuple[int, ...]
    rotary: int | str
    offset: tuple[tuple[str, int], ...]

    def match(self, name: str) -> Match | None:
        """What the name captures, as the hub counts."""
        for glob in (self.glob, *self.also):
            found = glob.match(name)
            if found is not None:
                captures = dict(found.captures)
                for key, by in self.offset:
                    captures[key] -= by
                if min(captures.values(), default=0) >= 0:
                    return Match(captures, found.wildcards)
        return None

    def name(self, match: Match) -> str:
        """The name of the tensor of this hub."""
        by = dict(self.offset)
        return Template(self.glob.text).fill(match.wildcards, lambda key: match.captures[key] + by.get(key, 0))

    def dims(self, hub_ndim: int) -> tuple[int, ...]:
        """For each dim of the tensor its hub dim, -1 for the stacked one."""
        inner = self.permute or tuple(range(hub_ndim))
        return (-1, *inner) if self.stack else inner


@dataclass(frozen=True, slots=True)
class _Row:
    parts: Mapping[str, tuple[_Part, ...]]
    join: _JoinData | None
    number: int


@dataclass(slots=True)
class _Instance:
    """One hub: the source tensor of each part, and what its names captured."""

    row: _Row
    match: Match
    found: dict[int, str]


def ready_name_maps() -> tuple[str, ...]:
    """Names of the maps that come with the package."""
    folder = resources.files("ucp_dcp") / "name_maps"
    return tuple(sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml")))


@dataclass(frozen=True, slots=True)
class NameMap:
    """A parsed and checked name map. Plain data; pickles."""

    name: str
    families: tuple[str, ...]
    rows: tuple[_Row, ...]
    variables: Mapping[str, int | str | None]
    ignore: Mapping[str, tuple[NameGlob, ...]]
    inherit: Mapping[str, str]
    doc: str = ""
    source: str = "<name map>"

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> NameMap:
        """A ready map by its name (:func:`ready_name_maps`), or a YAML file. Raises SpecError when there is none or it is wrong."""
        name = os.fspath(name_or_path)
        if name in ready_name_maps():
            return cls.parse((resources.files("ucp_dcp") / "name_maps" / f"{name}.yaml").read_text("utf-8"), f"{name}.yaml")
        try:
            if Path(name).stat().st_size > _MAX_FILE:
                raise SpecError(f"{name}: {Path(name).stat().st_size} bytes, expected at most {_MAX_FILE}")
            text = Path(name).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"{name}: neither a ready name map ({', '.join(ready_name_maps())}) nor a readable file: {error}") from None
        return cls.parse(text, name)

    @classmethod
    def parse(cls, text: str, source: str = "<text>") -> NameMap:
        """A map from YAML text. Raises SpecError naming the source and the key."""
        data, _ = load_yaml(text, source)
        return cls.from_dict(data, source)

    @classmethod
    def from_dict(cls, data: Any, source: str = "<dict>") -> NameMap:
        """A map from plain data of the same shape as the YAML. Raises SpecError."""
        try:
            read = msgspec.convert(_extended(data, source), _MapData)
        except msgspec.ValidationError as error:
            raise SpecError(f"{source}: {error}") from None
        if read.ucp_name_map != VERSION:
            raise SpecError(f"{source}: ucp_name_map is {read.ucp_name_map}, expected {VERSION}: the version of the language")
        rows = tuple(_row(row, number, read, source) for number, row in enumerate(read.rows, 1))
        unknown = (set(read.ignore) | set(read.inherit) | set(read.inherit.values())) - set(read.families)
        if unknown:
            raise SpecError(f"{source}: ignore or inherit name the families {sorted(unknown)}, expected of {read.families}")
        for row in rows:
            _check_row(row, set(read.variables), source)
        for family in read.families:
            globs = [(glob, row.number) for row in rows for part in row.parts.get(family, ()) for glob in (part.glob, *part.also)]
            _check_disjoint(globs, family, source)
        return cls(
            read.name,
            tuple(read.families),
            rows,
            {name: variable.default for name, variable in read.variables.items()},
            {family: tuple(NameGlob(glob) for glob in globs) for family, globs in read.ignore.items()},
            dict(read.inherit),
            read.doc,
            source,
        )

    def family_of(self, names: Iterable[str]) -> str:
        """The family that knows most of these names; of one that inherits from another and knows as many, the other.

        Raises SpecError when none knows any, or two know as many.
        """
        names = list(names)
        counts = {family: sum(self._find(family, name) is not None for name in names) for family in self.families}
        best = max(counts.values(), default=0)
        winners = [family for family, count in counts.items() if count == best]
        winners = [family for family in winners if self.inherit.get(family) not in winners]
        if best == 0 or len(winners) > 1:
            raise SpecError(
                f"{self.source}: of {len(names)} names, such as {names[:2]}, "
                + ", ".join(f"{family} knows {count}" for family, count in counts.items())
                + "; say which family they are of"
            )
        return winners[0]

    def _find(self, family: str, name: str) -> tuple[_Row, int, Match] | None:
        for row in self.rows:
            for number, part in enumerate(row.parts.get(family, ())):
                match = part.match(name)
                if match is not None:
                    return row, number, match
        return None

    def plan(
        self, source: str, target: str, shapes: Mapping[str, Sequence[int]], variables: Mapping[str, int] | None = None
    ) -> NamePlan:
        """The tensors of family ``target`` that ``shapes`` (fqn -> global shape) of family ``source`` make up.

        Args:
            source, target: names of families.
            shapes: of the model's weights and buffers.
            variables: values of the map's variables (``heads``, ...); those with a default may be left out.

        Raises SpecError: an unknown family or variable; a name without a row (the nearest one is named); a hub of which a part is missing;
        a shape that does not fit the map and its variables.
        """
        for family in (source, target):
            if family not in self.families:
                raise SpecError(f"{self.source}: no family {family!r}; it has {', '.join(self.families)}")
        lookup = self._variables(variables or {})
        instances, ignored = self._instances(source, target, {name: tuple(shape) for name, shape in shapes.items()})
        out: dict[str, list[tuple[int | None, MappedTensor]]] = {}
        for instance in instances:
            for tensor, at in _convert(instance, source, target, shapes, lookup, self.source):
                out.setdefault(tensor.fqn, []).append((at, tensor))
        return NamePlan(tuple(_stacked(name, out[name], self.source) for name in sorted(out)), tuple(ignored))

    def _variables(self, given: Mapping[str, int]) -> Callable[[str], Value]:
        unknown = set(given) - set(self.variables)
        if unknown:
            raise SpecError(f"{self.source}: no variable {sorted(unknown)}; it has {', '.join(self.variables) or 'none'}")
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise SpecError(f"{self.source}: variable {name} is {value!r}, expected a whole number from 1")

        def lookup(name: str, seen: tuple[str, ...] = ()) -> Value:
            if name in given:
                return given[name]
            default = self.variables.get(name)
            if default is None or name in seen:
                raise SpecError(f"{self.source}: variable {name!r} has no value and no default; give variables={{{name!r}: ...}}")
            return default if isinstance(default, int) else Expr(default).evaluate(lambda other: lookup(other, (*seen, name)))

        return lookup

    def _instances(self, source: str, target: str, shapes: Mapping[str, _Shape]) -> tuple[list[_Instance], list[str]]:
        found: dict[tuple[Any, ...], _Instance] = {}
        ignored: list[str] = []
        lost: list[str] = []
        for name, shape in shapes.items():
            hit = self._find(source, name)
            if hit is None:
                (ignored if any(glob.match(name) for glob in self.ignore.get(source, ())) else lost).append(name)
                continue
            row, number, match = hit
            part = row.parts[source][number]
            if target not in row.parts:
                ignored.append(name)
                continue
            if part.stack and not shape:
                raise SpecError(f"{self.source}: {name!r} has no dimensions, but row {row.number} says that it is stacked")
            for at in range(shape[0]) if part.stack else (None,):
                captures = match.captures if at is None else {**match.captures, part.stack: at}
                key = (row.number, tuple(sorted(captures.items())), match.wildcards)
                instance = found.setdefault(key, _Instance(row, Match(captures, match.wildcards), {}))
                instance.found[number] = name
        if lost:
            globs = [part.glob.text for row in self.rows for part in row.parts.get(source, ())]
            near = min(globs, key=lambda glob: distance(glob, lost[0]), default="")
            raise SpecError(
                f"{self.source}: {len(lost)} names have no row in family {source!r}: {', '.join(lost[:5])}"
                f"{' ...' if len(lost) > 5 else ''}. The nearest to the first is {near!r}"
            )
        return list(found.values()), ignored


def _extended(data: Any, source: str) -> Any:
    """The data with the rows, variables and ignored names of the ready map that it extends in front of its own."""
    name = data.get("extends") if isinstance(data, Mapping) else None
    if not name:
        return data
    if name not in ready_name_maps():
        raise SpecError(f"{source}: it extends {name!r:.80}, expected a ready map: {', '.join(ready_name_maps())}")
    text = (resources.files("ucp_dcp") / "name_maps" / f"{name}.yaml").read_text("utf-8")
    below = _extended(load_yaml(text, f"{name}.yaml")[0], f"{name}.yaml")
    out = {**below, **data}
    if not isinstance(data.get("rows", []), list):
        return data  # the typed reading says what is wrong
    out["rows"] = [*below["rows"], *data.get("rows", [])]
    for key in ("variables", "ignore", "inherit"):
        if not isinstance(data.get(key, {}), dict):
            return data
        out[key] = {**below.get(key, {}), **data.get(key, {})}
    return out


def _row(data: _RowData, number: int, top: _MapData, source: str) -> _Row:
    where = f"{source}: row {number}"
    unknown = set(data.names) - set(top.families)
    if unknown:
        raise SpecError(f"{where}: families {sorted(unknown)}, expected of {top.families}")
    count = len(data.join.sizes) if data.join else 0
    parts: dict[str, tuple[_Part, ...]] = {}
    inherited = {child: data.names[parent] for child, parent in top.inherit.items() if parent in data.names}
    for family, value in {**inherited, **data.names}.items():
        items = value if isinstance(value, list) else [value]
        if isinstance(value, list) and len(items) != count:
            raise SpecError(f"{where}: {len(items)} names of family {family}, but the row joins {count} parts")
        made = []
        for j, item in enumerate(items):
            one = item if isinstance(item, _PartData) else _PartData(item)
            if one.concat and (isinstance(value, list) or not count):
                raise SpecError(f"{where}: `concat` needs a single name and a `join`")
            which = (j,) if isinstance(value, list) else tuple(range(count)) if one.concat else None
            if sorted(one.permute) != list(range(len(one.permute))):
                raise SpecError(f"{where}: permute {one.permute} is no order of dimensions")
            also = tuple(NameGlob(glob) for glob in one.also)
            if set(one.offset) - set(NameGlob(one.name).captures):
                raise SpecError(f"{where}: offset {one.offset} of what {one.name!r} does not capture")
            offset = tuple(one.offset.items())
            made.append(_Part(NameGlob(one.name), also, which, one.stack, tuple(one.permute), one.rotary, offset))
        parts[family] = tuple(made)
    return _Row(parts, data.join, number)


def _check_row(row: _Row, variables: set[str], source: str) -> None:
    where = f"{source}: row {row.number}"
    kinds = {
        (frozenset({*glob.captures, *([part.stack] if part.stack else [])}), glob.n_wildcards)
        for parts in row.parts.values()
        for part in parts
        for glob in (part.glob, *part.also)
    }
    if len(kinds) > 1:
        raise SpecError(f"{where}: its names capture different things: {sorted((sorted(c), n) for c, n in kinds)}")
    texts = [part.rotary for parts in row.parts.values() for part in parts]
    if row.join:
        texts += [*row.join.sizes, row.join.groups]
    for text in texts:
        unknown = (Expr(text).names if isinstance(text, str) else set()) - variables - {"total"}
        if unknown:
            raise SpecError(f"{where}: {text!r} reads {sorted(unknown)}, expected of {sorted(variables)} and total")


def _check_disjoint(globs: Sequence[tuple[NameGlob, int]], family: str, source: str) -> None:
    for a, (one, first) in enumerate(globs):
        for other, second in globs[:a]:
            both = one.overlap(other)
            if both is not None:
                raise SpecError(f"{source}: rows {second} and {first} both know the name {both!r} in family {family}")


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


def _runs(part: _Part, sizes: Sequence[int], groups: int, total: int, lookup: Callable[[str], Value], what: str) -> _Runs:
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


def _hub_shape(part: _Part, shape: Sequence[int], what: str) -> _Shape:
    inner = tuple(shape[1:] if part.stack else shape)
    if part.permute and len(part.permute) != len(inner):
        raise SpecError(f"{what}: {len(inner)} dimensions, but the row permutes {len(part.permute)}")
    return tuple(inner[part.permute.index(q)] for q in range(len(inner))) if part.permute else inner


def _cut(
    rows: _Pieces, number: int, name: str, part: _Part, instance: _Instance, hub: _Shape, dim: int, target_dims: tuple[int, ...]
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
