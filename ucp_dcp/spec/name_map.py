"""Name maps: the same model under the names of several families (Megatron, Hugging Face, torchtitan), as data.

A row of a map says under which names one logical tensor, the *hub*, stands in each family: whole (one name), in parts (a list of names;
``join`` says how they lie in the hub), stacked with others of its kind, transposed, or with the rows of each head in another order.
:meth:`NameMap.plan` turns the tensors of one family into those of another: for each of them, which boxes of which source tensors it is
made of. Pure: nothing is read, and bytes never move; ``ucp_dcp.formats.mapped`` makes a catalog of the result. ``docs/name-maps.md``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from ..errors import SpecError
from .expr import Expr, Value
from .name_plan import NamePlan, plan_names
from .name_rows import Join, Part, Row, find
from .names import NameGlob
from .text import load_yaml

__all__ = ["NameMap", "ready_name_maps"]

VERSION = 1
_MAX_FILE = 4 << 20


class _PartData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    stack: str = ""
    permute: list[int] = []
    rotary: int | str = 0
    concat: bool = False
    also: list[str] = []
    offset: dict[str, int] = {}


class _RowData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    names: dict[str, str | _PartData | list[str | _PartData]]
    join: Join | None = None
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


def ready_name_maps() -> tuple[str, ...]:
    """Names of the maps that come with the package."""
    folder = resources.files("ucp_dcp") / "name_maps"
    return tuple(sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml")))


@dataclass(frozen=True, slots=True)
class NameMap:
    """A parsed and checked name map. Plain data; pickles."""

    name: str
    families: tuple[str, ...]
    rows: tuple[Row, ...]
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
        counts = {family: sum(find(self.rows, family, name) is not None for name in names) for family in self.families}
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

    def plan(self, source: str, target: str, shapes: Mapping[str, Sequence[int]], variables: Mapping[str, int] | None = None) -> NamePlan:
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
        return plan_names(self.rows, self.ignore.get(source, ()), source, target, shapes, lookup, self.source)

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


def _row(data: _RowData, number: int, top: _MapData, source: str) -> Row:
    where = f"{source}: row {number}"
    unknown = set(data.names) - set(top.families)
    if unknown:
        raise SpecError(f"{where}: families {sorted(unknown)}, expected of {top.families}")
    count = len(data.join.sizes) if data.join else 0
    parts: dict[str, tuple[Part, ...]] = {}
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
            made.append(Part(NameGlob(one.name), also, which, one.stack, tuple(one.permute), one.rotary, offset))
        parts[family] = tuple(made)
    return Row(parts, data.join, number)


def _check_row(row: Row, variables: set[str], source: str) -> None:
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
