"""Rows of a name map: which tensors of each family one logical tensor (the hub) is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from .names import Match, NameGlob, Template

__all__ = ["Join", "Part", "Row", "find"]


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How parts lie in the hub: along ``dim``, ``groups`` times over, ``sizes`` rows of each part in a group."""

    sizes: list[int | str]
    groups: int | str = 1
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Part:
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
class Row:
    """A hub: the parts of each family, and how they are joined. ``number`` counts the rows of the map, for messages."""

    parts: Mapping[str, tuple[Part, ...]]
    join: Join | None
    number: int


def find(rows: Sequence[Row], family: str, name: str) -> tuple[Row, int, Match] | None:
    """(row, number of the part in its family, what the name captures), or None when no row knows the name."""
    for row in rows:
        for number, part in enumerate(row.parts.get(family, ())):
            match = part.match(name)
            if match is not None:
                return row, number, match
    return None
