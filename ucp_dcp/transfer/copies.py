"""Boxes of chunks -> columns of pieces: which bytes of a file belong at which address.

What depends on shape, strides and dtypes alone is worked out once per combination; a copy then adds one row. Where runs of the file are
runs of the destination too, they go straight there. Otherwise a *unit* of scratch memory takes the bytes as the file has them, and torch
copies (strides, cast, device) from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from operator import mul

import numpy as np
import numpy.typing as npt
import torch

from ..dtypes import ITEMSIZE, NAMES, torch_dtype
from ..errors import CorruptCheckpointError
from ..geometry import runs

__all__ = ["ALIGN", "UNIT", "Copy", "Shape", "Unit", "Wave", "flat_bytes", "waves"]

_Int64 = npt.NDArray[np.int64]

UNIT = 4 << 20
"""Bytes of a scratch unit at most."""
ALIGN = 64
_PIECES = 1 << 16  # of one copy at most; larger ones are cut
_WAVE_PIECES = 1 << 18
_DIRECT = 512  # bytes: shorter runs are cheaper to read together and to copy in memory
_SHORT = 16 << 10  # bytes: runs up to here are read with the holes between them when those are small


@dataclass(frozen=True, slots=True)
class Copy:
    """Element box [offset, offset + view.shape) *inside* the chunk -> view."""

    chunk: int
    offset: tuple[int, ...]
    view: torch.Tensor


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor as a flat uint8 tensor over the same memory."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() <= 1:  # contiguous whatever its stride is, which view() does not accept
        flat = flat.as_strided((flat.numel(),), (1,))
    return flat.view(torch.uint8)


@dataclass(slots=True)
class Shape:
    """How boxes of one size, strides and dtypes are read.

    Attributes:
        source, target: (m,) bytes from the first element of the box, in the file and in the destination (or scratch memory), of each piece.
        length: bytes of each piece.
        scratch: bytes of scratch memory; 0: straight into the destination.
        span: the scratch memory is a copy of the file from the first to the last element, holes included.
        wanted: bytes of the box in the file.
    """

    source: _Int64
    target: _Int64
    length: int
    scratch: int
    span: bool
    wanted: int
    dtype: torch.dtype
    size: tuple[int, ...]
    strides: tuple[int, ...]
    run_shape: tuple[int, ...] = ()
    inverse: tuple[int, ...] = ()
    cut: tuple[int, int] | None = None
    """(dim, step): too large for one unit; take ``step`` of this dim at a time."""

    def values(self, flat: torch.Tensor) -> torch.Tensor:
        """The box, out of the bytes of its scratch memory (on any device)."""
        typed = flat.view(self.dtype)
        if self.span:
            return typed.as_strided(self.size, self.strides)
        return typed.reshape(self.run_shape).permute(self.inverse).expand(self.size)


def _shape(size: tuple[int, ...], strides: tuple[int, ...], code: int, target: tuple[int, ...] | None, gap: int, unit: int) -> Shape:
    """``target``: element strides of the destination where bytes may go straight into it."""
    width, dtype = ITEMSIZE[code], torch_dtype(NAMES[code])
    # the outermost dim of the file first: cut there, runs stay as they are
    outer = max((d for d in range(len(size)) if size[d] > 1), key=lambda d: strides[d], default=None)

    def cut(parts: int) -> Shape:
        assert outer is not None
        none = np.zeros(0, np.int64)
        return Shape(none, none, 0, 0, False, 0, dtype, size, strides, cut=(outer, max(1, size[outer] // parts)))

    moving = sorted((d for d in range(len(size)) if size[d] > 1 and strides[d] > 0), key=lambda d: -strides[d])
    contiguous, rest = 1, list(moving)
    while rest and strides[rest[-1]] == contiguous:
        contiguous *= size[rest.pop()]
    count = prod(size[d] for d in rest)
    if count > _PIECES:
        # a box whose elements overlap in the file is refused here, before it is taken apart
        if sum((size[d] - 1) * strides[d] for d in moving) + 1 < count:
            runs(size, strides)
        return cut(-(-count // _PIECES))
    run = runs(size, strides)
    begins = run.starts * width
    length = run.length * width
    stored = len(begins) * length
    wanted = prod(size) * width

    if target is not None and not any(n > 1 and s == 0 for n, s in zip(size, strides, strict=True)):
        common, rest = 1, list(moving)
        while rest and strides[rest[-1]] == common == target[rest[-1]]:
            common *= size[rest.pop()]
        if common * width >= min(_DIRECT, wanted):
            if prod(size[d] for d in rest) > _PIECES:
                return cut(-(-prod(size[d] for d in rest) // _PIECES))
            source, into = np.zeros(1, np.int64), np.zeros(1, np.int64)
            for d in rest:
                k = np.arange(size[d], dtype=np.int64)
                source = (source[:, None] + k * (strides[d] * width)).reshape(-1)
                into = (into[:, None] + k * (target[d] * width)).reshape(-1)
            return Shape(source, into, common * width, 0, False, wanted, dtype, size, strides)

    inverse = tuple(run.dims.index(d) for d in range(len(size)))
    if len(begins) > 1 and length < _SHORT:
        reach = int(begins[-1]) + length
        apart = int(np.diff(begins).max()) - length
        if apart <= gap and (apart < _DIRECT or reach <= 2 * stored):
            if reach > unit and outer is not None:
                return cut(-(-reach // unit))
            zero = np.zeros(1, np.int64)
            return Shape(zero, zero, reach, reach, True, wanted, dtype, size, strides)
    if stored > unit and outer is not None:
        return cut(-(-stored // unit))
    packed = np.arange(len(begins), dtype=np.int64) * length
    return Shape(begins, packed, length, stored, False, wanted, dtype, size, strides, run.shape, inverse)


@dataclass(frozen=True, slots=True)
class Unit:
    """Scratch memory that takes the bytes of one box: ``length`` bytes from byte ``offset`` of the wave's arena."""

    offset: int
    length: int
    shape: Shape
    view: torch.Tensor


@dataclass(slots=True)
class Wave:
    """What is read together: as many copies as the scratch memory takes."""

    file: _Int64
    start: _Int64
    length: _Int64
    address: _Int64
    """In the destination; of pieces with a unit: the offset in the arena."""
    unit: _Int64
    units: list[Unit]
    views: list[torch.Tensor]
    """Keeps the destinations alive."""
    scratch: int
    wanted: int
    more: bool = False
    """Another wave follows; it may continue in the file where this one ends."""


@dataclass(slots=True)
class _Group:
    """Copies of one shape."""

    file: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    base: list[int] = field(default_factory=list)
    unit: list[int] = field(default_factory=list)


class _Building:
    def __init__(self) -> None:
        self.groups: dict[int, tuple[Shape, _Group]] = {}
        self.units: list[Unit] = []
        self.views: list[torch.Tensor] = []
        self.scratch = self.pieces = self.wanted = 0

    def add(self, shape: Shape, view: torch.Tensor, file: int, start: int) -> None:
        found = self.groups.get(id(shape))
        if found is None:
            found = self.groups[id(shape)] = (shape, _Group())
        group = found[1]
        group.file.append(file)
        group.start.append(start)
        self.views.append(view)
        self.pieces += len(shape.source)
        self.wanted += shape.wanted
        if shape.scratch:
            group.base.append(self.scratch)
            group.unit.append(len(self.units))
            self.units.append(Unit(self.scratch, shape.scratch, shape, view))
            self.scratch += -(-shape.scratch // ALIGN) * ALIGN
        else:
            group.base.append(view.data_ptr())
            group.unit.append(-1)

    def done(self) -> Wave:
        columns: list[tuple[_Int64, ...]] = []
        for shape, group in self.groups.values():
            m = len(shape.source)
            start = (np.asarray(group.start, dtype=np.int64)[:, None] + shape.source).reshape(-1)
            base = (np.asarray(group.base, dtype=np.int64)[:, None] + shape.target).reshape(-1)
            file, unit = (np.repeat(np.asarray(c, dtype=np.int64), m) for c in (group.file, group.unit))
            columns.append((file, start, np.full(len(start), shape.length, np.int64), base, unit))
        file, start, length, address, unit = (np.concatenate(c) for c in zip(*columns, strict=True))
        return Wave(file, start, length, address, unit, self.units, self.views, self.scratch, self.wanted)


def waves(
    copies: list[Copy],
    file: list[int],
    offset: list[int],
    strides: list[tuple[int, ...]],
    dtype: list[int],
    *,
    gap: int,
    scratch: int,
    paths: list[str],
    unit: int = UNIT,
) -> Iterator[Wave]:
    """The copies, in the order given (ascending by file and byte), as columns.

    Args:
        file, offset, strides, dtype: of each copy's chunk: where its first element is, its element strides, its dtype code.
        gap: holes of at most this many bytes between short runs of one copy may be read too.
        scratch: bytes of scratch memory of a wave, at most (at least one unit).
        paths: of the files, for messages.
    """
    known: dict[tuple[object, ...], Shape] = {}
    building = _Building()
    unit = min(unit, scratch)
    stack: list[tuple[torch.Tensor, tuple[int, ...], int]] = []
    for copy, number, begin, step, code in zip(copies, file, offset, strides, dtype, strict=True):
        width = ITEMSIZE[code]
        start = begin + width * sum(map(mul, copy.offset, step)) if any(copy.offset) else begin
        stack.append((copy.view, step, start))
        while stack:
            view, step, start = stack.pop()
            if start < 0:
                raise CorruptCheckpointError(f"file {paths[number]!r}: a chunk lies at byte {start}")
            size = tuple(view.shape)
            target = view.stride() if view.is_cpu else None
            key = (size, step, code, target, view.dtype, view.is_conj() or view.is_neg())
            shape = known.get(key)
            if shape is None:
                if view.dtype != torch_dtype(NAMES[code]) or view.is_conj() or view.is_neg():
                    target = None
                shape = known[key] = _shape(size, step, code, target, gap, unit)
            if shape.cut is not None:
                dim, extent = shape.cut
                pieces = range(0, size[dim], extent)
                # the last is on top of the stack first, so push them the other way round
                stack.extend(
                    (view.narrow(dim, at, min(extent, size[dim] - at)), step, start + at * step[dim] * width) for at in reversed(pieces)
                )
                continue
            if building.views and (building.scratch + shape.scratch > scratch or building.pieces + len(shape.source) > _WAVE_PIECES):
                wave = building.done()
                wave.more = True
                yield wave
                building = _Building()
                known.clear()  # so that what is kept is bounded by a wave
                known[key] = shape
            building.add(shape, view, number, start)
    if building.views:
        yield building.done()
