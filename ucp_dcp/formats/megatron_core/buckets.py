"""Geometry of Megatron's distributed optimizer (``core/optimizer/param_layout.py``), integers only.

A buffer holds the parameters of a model chunk in reverse order of the module; each begins at a multiple of 64 elements within its bucket.
Of a bucket everything up to the end of its last parameter is stored. Where buckets end is recorded, so that nothing about bucket sizes,
overlap or tied embeddings has to be known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ...geometry import Box, c_strides, flat_range_to_boxes

__all__ = ["LocalParam", "lay_out", "pieces_of_range"]

_ALIGN = 64


@dataclass(frozen=True, slots=True)
class LocalParam:
    """A parameter as one model-parallel rank has it.

    Attributes:
        fqn: global name.
        shape: global shape, vocabulary padding included.
        dim: the divided dim, -1 for none.
        pieces: (begin, length) along ``dim`` of the global tensor, in local order; two for gate and up.
        skip: another rank's copy is the one that is used (replicated, tied).
    """

    fqn: str
    shape: tuple[int, ...]
    dim: int = -1
    pieces: tuple[tuple[int, int], ...] = ()
    skip: bool = False

    @property
    def local(self) -> tuple[int, ...]:
        """Local shape."""
        if self.dim < 0:
            return self.shape
        return tuple(sum(n for _, n in self.pieces) if d == self.dim else size for d, size in enumerate(self.shape))

    @property
    def numel(self) -> int:
        """Local elements."""
        return prod(self.local)


def lay_out(numels: Sequence[int], ends: Sequence[int]) -> list[tuple[int, int]] | None:
    """(bucket, first element) of each parameter, in buffer order; None when they do not fill buckets that end at ``ends`` exactly."""
    places: list[tuple[int, int]] = []
    bucket, cursor = 0, 0
    for numel in numels:
        if bucket < len(ends) and cursor == ends[bucket]:
            bucket, cursor = bucket + 1, 0
        start = -(-cursor // _ALIGN) * _ALIGN
        if bucket >= len(ends) or start + numel > ends[bucket]:
            return None
        places.append((bucket, start))
        cursor = start + numel
    return places if bucket == len(ends) - 1 and cursor == ends[bucket] else None


def pieces_of_range(param: LocalParam, start: int, stop: int) -> list[tuple[Box, int]]:
    """Elements ``start .. stop`` of the flattened local parameter: boxes of the global one, and the flat index where each begins."""
    local = param.local
    strides = c_strides(local)
    found: list[tuple[Box, int]] = []
    for box in flat_range_to_boxes(local, start, stop):
        if param.dim < 0:
            found.append((box, sum(a * b for a, b in zip(box.offset, strides, strict=True))))
            continue
        low, high = box.offset[param.dim], box.stop[param.dim]
        first = 0  # of the piece, in local elements along the dim
        for begin, length in param.pieces:
            a, b = max(low, first), min(high, first + length)
            if a < b:
                inside = tuple(a if d == param.dim else n for d, n in enumerate(box.offset))
                offset = tuple(begin + a - first if d == param.dim else n for d, n in enumerate(box.offset))
                size = tuple(b - a if d == param.dim else n for d, n in enumerate(box.size))
                found.append((Box(offset, size), sum(x * y for x, y in zip(inside, strides, strict=True))))
            first += length
    return found
