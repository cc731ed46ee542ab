"""Moving stored chunks into memory: byte ranges planned per file, read straight into the destination where that is possible.

A :class:`Copy` is one rectangular piece of one chunk and the torch view that receives it. Where dtype and strides allow, the store reads
into the view's own memory; otherwise bytes go through a bounded scratch buffer and torch copies (strides, cast, device) from there. A
chunk is never read whole when a part is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from .dtypes import ITEMSIZE, NAMES, torch_dtype
from .errors import CorruptCheckpointError
from .geometry import runs
from .storage.store import Range

if TYPE_CHECKING:
    from .formats import Source

__all__ = ["Copy", "ReadStats", "flat_bytes", "read_copies"]

_SCRATCH = 64 << 20  # bytes of scratch memory in use at once
_BATCH = 2048  # ranges handed to the store at once
_SECTOR = 512  # bytes: a smaller gap costs less to read than to leave out


@dataclass(frozen=True, slots=True)
class Copy:
    """Element box [offset, offset + view.shape) *inside* the chunk -> view."""

    chunk: int
    offset: tuple[int, ...]
    view: torch.Tensor


@dataclass(slots=True)
class ReadStats:
    """What a read did: bytes asked of the store, ranges, bytes that were wanted."""

    bytes_read: int = 0
    ranges: int = 0
    bytes_wanted: int = 0


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor as a flat uint8 tensor over the same memory."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() <= 1:  # contiguous whatever its stride is, which view() does not accept
        flat = flat.as_strided((flat.numel(),), (1,))
    return flat.view(torch.uint8)


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable."""
    return flat_bytes(tensor).numpy().data


def _slabs(copy: Copy, itemsize: int) -> Iterator[Copy]:
    """Cut a copy along its outer dimensions until each part fits the scratch memory."""
    shape = tuple(copy.view.shape)
    nbytes = copy.view.numel() * itemsize
    dim = next((d for d, extent in enumerate(shape) if extent > 1), None)
    if nbytes <= _SCRATCH // 2 or dim is None:
        yield copy
        return
    step = max(1, shape[dim] * (_SCRATCH // 2) // nbytes)
    for begin in range(0, shape[dim], step):
        extent = min(step, shape[dim] - begin)
        offset = tuple(o + begin if d == dim else o for d, o in enumerate(copy.offset))
        yield from _slabs(Copy(copy.chunk, offset, copy.view.narrow(dim, begin, extent)), itemsize)


def read_copies(source: Source, copies: Iterable[Copy], *, gap: int = 0, stats: ReadStats | None = None) -> ReadStats:
    """Read every copy's bytes into its view.

    Args:
        source: an open checkpoint.
        copies: what to read; views may be on any device, of any dtype that torch can cast to, and strided.
        gap: two runs of one copy that are at most this many bytes apart are read as one range, while that reads at most twice
            the wanted bytes or the runs are less than 512 bytes apart.

    Raises StoreError / CorruptCheckpointError naming the file when bytes are missing.
    """
    stats = stats if stats is not None else ReadStats()
    work = [c for c in copies if c.view.numel()]
    if not work:
        return stats
    located = source.locate(np.asarray([c.chunk for c in work], dtype=np.int64))
    files = source.catalog.files
    reading = _Reading(source, gap, stats)
    codes, file, offset = located.dtype.tolist(), located.file.tolist(), located.offset.tolist()
    for i in np.lexsort((located.offset, located.file)).tolist():
        width = ITEMSIZE[codes[i]]
        dtype = torch_dtype(NAMES[codes[i]])
        strides = tuple(int(s) for s in located.strides[i])
        path = files[file[i]].path
        for copy in _slabs(work[i], width):
            start = offset[i] + width * sum(o * s for o, s in zip(copy.offset, strides, strict=True))
            reading.add(copy.view.detach(), dtype, width, strides, path, start)
    reading.flush()
    return stats


class _Reading:
    """Ranges waiting to be read, with what to do once their bytes are there."""

    def __init__(self, source: Source, gap: int, stats: ReadStats) -> None:
        self._source = source
        self._gap = gap
        self._stats = stats
        self._ranges: list[Range] = []
        self._into: list[memoryview] = []
        self._finish: list[tuple[torch.Tensor, torch.Tensor]] = []  # (scratch view, destination)
        self._scratch = 0

    def add(self, destination: torch.Tensor, dtype: torch.dtype, width: int, strides: tuple[int, ...], path: str, start: int) -> None:
        """A box of the destination's shape whose first element is at byte ``start``, with these element strides."""
        size = tuple(destination.shape)
        run = runs(size, strides)
        length = run.length * width
        begins = run.starts * width
        stored = len(begins) * length
        ordered = destination.permute(run.dims)
        # a broadcast (stride 0) chunk stores fewer elements than the box has, so its bytes cannot be the destination's
        direct = destination.device.type == "cpu" and destination.dtype == dtype and tuple(ordered.shape) == run.shape
        direct = direct and ordered.is_contiguous() and not ordered.is_conj() and not ordered.is_neg()
        if len(begins) > 1:
            span = int(begins[-1]) + length
            apart = int(np.diff(begins).max()) - length
            # long runs are better read straight to where they belong, whatever lies between them
            if apart <= self._gap and (apart < _SECTOR or span <= 2 * stored) and not (direct and length >= _SECTOR):
                self._add_span(destination, dtype, width, strides, path, start, span, run.dims[0])
                return
        if direct:
            self._stats.bytes_wanted += destination.numel() * width
            self._add_runs(path, start, begins, length, _memory(ordered))
            return
        self._stats.bytes_wanted += destination.numel() * width
        self._make_room(stored)
        scratch = torch.empty(stored, dtype=torch.uint8)
        packed = scratch.view(dtype).reshape(run.shape)
        inverse = [run.dims.index(d) for d in range(len(size))]
        self._add_runs(path, start, begins, length, scratch.numpy().data)
        self._finish.append((packed.permute(inverse).expand(size), destination))

    def _add_span(
        self,
        destination: torch.Tensor,
        dtype: torch.dtype,
        width: int,
        strides: tuple[int, ...],
        path: str,
        start: int,
        span: int,
        dim: int,
    ) -> None:
        """Few wasted bytes: one range over all runs; the strides pick the elements out. ``dim``: the outermost in the file."""
        extent = destination.shape[dim]
        if span > _SCRATCH // 2 and extent > 1:
            step = max(1, extent * (_SCRATCH // 2) // span)
            for begin in range(0, extent, step):
                part = destination.narrow(dim, begin, min(step, extent - begin))
                self.add(part, dtype, width, strides, path, start + begin * strides[dim] * width)
            return
        self._stats.bytes_wanted += destination.numel() * width
        self._make_room(span)
        scratch = torch.empty(span, dtype=torch.uint8)
        self._ranges.append(Range(path, start, span))
        self._into.append(scratch.numpy().data)
        self._finish.append((scratch.view(dtype).as_strided(tuple(destination.shape), strides), destination))

    def _add_runs(self, path: str, start: int, begins: NDArray[np.int64], length: int, memory: memoryview) -> None:
        for k, begin in enumerate(begins.tolist()):
            if len(self._ranges) >= _BATCH:
                self._read()
            self._ranges.append(Range(path, start + begin, length))
            self._into.append(memory[k * length : (k + 1) * length])

    def _make_room(self, nbytes: int) -> None:
        if self._scratch + nbytes > _SCRATCH:
            self.flush()
        self._scratch += nbytes

    def _read(self) -> None:
        for wanted in self._ranges:
            if wanted.start < 0 or wanted.length < 0:
                raise CorruptCheckpointError(f"file {wanted.path!r}: a chunk lies at byte {wanted.start} with length {wanted.length}")
        if self._ranges:
            self._source.store.read_ranges(self._ranges, self._into)
        self._stats.ranges += len(self._ranges)
        self._stats.bytes_read += sum(r.length for r in self._ranges)
        self._ranges, self._into = [], []

    def flush(self) -> None:
        """Read everything that waits, and put scratch memory where it belongs."""
        self._read()
        with torch.no_grad():
            for value, destination in self._finish:
                destination.copy_(value)
        self._finish, self._scratch = [], 0
