"""Moving stored chunks into memory: byte ranges planned per file, read straight into the destination where that is possible.

A :class:`Copy` is one rectangular piece of one chunk and the torch view that receives it. Where dtype and strides allow, the store reads
into the view's own memory; otherwise bytes go through a bounded scratch buffer and torch copies (strides, cast, device) from there. A
chunk is never read whole when a part is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from .dtypes import ITEMSIZE, NAMES, torch_dtype
from .errors import CorruptCheckpointError
from .geometry import runs
from .storage.store import Range

if TYPE_CHECKING:
    from .formats import Source

__all__ = ["Copy", "ReadStats", "read_copies"]

_SCRATCH = 64 << 20  # bytes of scratch memory in use at once
_BATCH = 2048  # ranges handed to the store at once


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


@dataclass(slots=True)
class _Pending:
    """Ranges waiting to be read, with what to do once their bytes are there."""

    ranges: list[Range]
    into: list[memoryview]
    finish: list[tuple[torch.Tensor, torch.Tensor]]  # (scratch view, destination)
    scratch: int = 0


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


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
            the wanted bytes.

    Raises StoreError / CorruptCheckpointError naming the file when bytes are missing.
    """
    stats = stats if stats is not None else ReadStats()
    work = [c for c in copies if c.view.numel()]
    if not work:
        return stats
    located = source.locate(np.asarray([c.chunk for c in work], dtype=np.int64))
    files = source.catalog.files
    order = np.lexsort((located.offset, located.file))
    pending = _Pending([], [], [])
    for i in order.tolist():
        code = int(located.dtype[i])
        width = ITEMSIZE[code]
        dtype = torch_dtype(NAMES[code])
        strides = tuple(int(s) for s in located.strides[i])
        path = files[int(located.file[i])].path
        base = int(located.offset[i])
        for copy in _slabs(work[i], width):
            start = base + width * sum(o * s for o, s in zip(copy.offset, strides, strict=True))
            _plan_copy(copy, dtype, width, strides, path, start, gap, pending, stats)
            if pending.scratch > _SCRATCH or len(pending.ranges) >= _BATCH:
                _flush(source, pending, stats)
    _flush(source, pending, stats)
    return stats


def _plan_copy(
    copy: Copy,
    dtype: torch.dtype,
    width: int,
    strides: Sequence[int],
    path: str,
    start: int,
    gap: int,
    pending: _Pending,
    stats: ReadStats,
) -> None:
    size = tuple(copy.view.shape)
    run = runs(size, strides)
    nbytes = copy.view.numel() * width
    stats.bytes_wanted += nbytes
    length = run.length * width
    begins = run.starts * width
    span = int(begins[-1]) + length if len(begins) else 0
    destination = copy.view.detach()
    ordered = destination.permute(run.dims)
    # a broadcast (stride 0) chunk stores fewer elements than the box has, so its bytes cannot be the destination's
    direct = destination.device.type == "cpu" and destination.dtype == dtype and tuple(ordered.shape) == run.shape
    if direct and ordered.is_contiguous() and not ordered.is_conj() and not ordered.is_neg():
        memory = _memory(ordered)
    elif len(begins) > 1 and int(np.diff(begins).max()) - length <= gap and span <= 2 * len(begins) * length:
        # few wasted bytes: one range over all runs, the strides pick the elements out of it
        scratch = torch.empty(span, dtype=torch.uint8)
        view = scratch[: span - span % width].view(dtype).as_strided(size, tuple(strides))
        pending.ranges.append(Range(path, start, span))
        pending.into.append(scratch.numpy().data)
        pending.finish.append((view, destination))
        pending.scratch += span
        return
    else:
        stored = len(begins) * length
        scratch = torch.empty(stored, dtype=torch.uint8)
        packed = scratch.view(dtype).reshape(run.shape)
        inverse = [run.dims.index(d) for d in range(len(size))]
        pending.finish.append((packed.permute(inverse).expand(size), destination))
        pending.scratch += stored
        memory = scratch.numpy().data
    for k, begin in enumerate(begins.tolist()):
        pending.ranges.append(Range(path, start + begin, length))
        pending.into.append(memory[k * length : (k + 1) * length])


def _flush(source: Source, pending: _Pending, stats: ReadStats) -> None:
    if pending.ranges:
        for wanted in pending.ranges:
            if wanted.start < 0 or wanted.length < 0:
                raise CorruptCheckpointError(f"file {wanted.path!r}: a chunk lies at byte {wanted.start} with length {wanted.length}")
        source.store.read_ranges(pending.ranges, pending.into)
        stats.ranges += len(pending.ranges)
        stats.bytes_read += sum(r.length for r in pending.ranges)
    with torch.no_grad():
        for value, destination in pending.finish:
            destination.copy_(value)
    pending.ranges, pending.into, pending.finish, pending.scratch = [], [], [], 0
