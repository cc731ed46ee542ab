"""A parameter as one rank has it, and its elements as boxes of global tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ..deepspeed.rows import Record, Stored
from .rules import VOCABULARY, Unit

__all__ = ["Chunk", "Param", "Shards"]


@dataclass(frozen=True, slots=True)
class Param:
    """A local parameter.

    Attributes:
        name: local name. stored: where its weight lies.
        units: the global parameters in it, with global names.
        expert: whether experts' own optimizer has it. alone: a shared embedding, which has a bucket of its own.
        copy: a tied copy of the word embedding, whose optimizer state is the embedding's.
    """

    name: str
    stored: Stored
    units: tuple[Unit, ...]
    expert: bool
    alone: bool
    copy: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Local shape."""
        return self.stored[2]

    @property
    def numel(self) -> int:
        """Local elements."""
        return prod(self.stored[2])

    @property
    def decays(self) -> bool:
        """Whether weight decay applies by Megatron's default."""
        return len(self.shape) > 1 and not self.name.endswith(".bias")

    @property
    def is_end(self) -> bool:
        """Word embedding or output layer, which may have a learning rate of their own."""
        return self.name in VOCABULARY


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements of one rank: (offset, size) in the global tensor, the byte of the first, element strides."""

    record: Record
    offset: tuple[int, ...]
    size: tuple[int, ...]
    byte: int
    strides: tuple[int, ...]


class Shards:
    """The shards of one global tensor (a weight, its master, one of its states), by tensor-parallel coordinate."""

    def __init__(self, unit: Unit, dtype: str, count: int) -> None:
        self.unit = unit
        self.dtype = dtype
        self.count = count if unit.rule.dim >= 0 else 1
        self.found: dict[int, tuple[Record, int, tuple[int, ...]]] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape, vocabulary padding included."""
        return tuple(n * self.count if d == self.unit.rule.dim else n for d, n in enumerate(self.unit.shape))

    def add(self, coordinate: int, record: Record, byte: int, strides: tuple[int, ...]) -> None:
        """A rank's shard from byte ``byte`` of its file on. Copies of one that is there already are left aside."""
        self.found.setdefault(coordinate if self.unit.rule.dim >= 0 else 0, (record, byte, strides))

    def missing(self) -> list[int]:
        """Coordinates without a shard."""
        return [k for k in range(self.count) if k not in self.found]

    def chunks(self, kept: Sequence[int], itemsize: int) -> list[Chunk]:
        """The parts of all shards inside the global shape ``kept`` (less than ``shape`` where padding is cut off)."""
        dim, parts, local = self.unit.rule.dim, self.unit.rule.parts, self.unit.shape
        out: list[Chunk] = []
        for k, (record, byte, strides) in sorted(self.found.items()):
            if dim < 0:
                out += self._clip(record, (0,) * len(local), (0,) * len(local), local, byte, strides, kept, itemsize)
                continue
            each = local[dim] // parts
            for p in range(parts):
                inner = tuple(p * each if d == dim else 0 for d in range(len(local)))
                offset = tuple(p * each * self.count + k * each if d == dim else 0 for d in range(len(local)))
                size = tuple(each if d == dim else n for d, n in enumerate(local))
                out += self._clip(record, inner, offset, size, byte, strides, kept, itemsize)
        return out

    @staticmethod
    def _clip(
        record: Any,
        inner: tuple[int, ...],
        offset: tuple[int, ...],
        size: tuple[int, ...],
        byte: int,
        strides: tuple[int, ...],
        kept: Sequence[int],
        itemsize: int,
    ) -> list[Chunk]:
        cut = tuple(min(o + n, whole) - o for o, n, whole in zip(offset, size, kept, strict=True))
        if any(n <= 0 for n in cut) and 0 not in size:
            return []
        at = byte + itemsize * sum(a * b for a, b in zip(inner, strides, strict=True))
        return [Chunk(record, offset, cut, at, strides)]
