"""The numeric columns of a catalog and their checks: lengths, starts, boxes in their shapes, bytes in their files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..dtypes import ITEMSIZE, NAMES
from ..errors import FormatError, UnsupportedError
from ..geometry.ragged import coords_start, gather_boxes, ragged_arange
from ..names import Role

__all__ = ["ChunkColumns", "TensorColumns", "check_chunk_columns", "check_chunks", "check_tensor_columns"]

Int64Array = NDArray[np.int64]

_MAX_NDIM = 64  # numpy's limit; torch's is 64 too
_MAX_NUMEL = 2.0**58  # times 16 bytes, the widest dtype, stays below 2**62, so that no sum of two such numbers overflows int64
_BLOCK = 1 << 18  # chunks checked at a time
_ITEMSIZE = np.asarray(ITEMSIZE, dtype=np.int64)

Explain = Callable[[int], str]
"""The name of tensor t, for a message."""


@dataclass(frozen=True, slots=True)
class TensorColumns:
    """Columns with one entry per tensor (T), or per dim of a tensor; names and types as in ``docs/format.md``."""

    role: NDArray[np.uint8]
    dtype: NDArray[np.uint8]
    kind: NDArray[np.uint8]
    pattern: NDArray[np.int32]
    shape_start: Int64Array
    shape: Int64Array
    chunk_start: Int64Array
    strided: NDArray[np.uint8] | None

    @property
    def ndim(self) -> Int64Array:
        """(T,) dims of each tensor."""
        return np.diff(self.shape_start)


@dataclass(frozen=True, slots=True)
class ChunkColumns:
    """Columns with one entry per chunk (C), or per dim of a chunk; names and types as in ``docs/format.md``."""

    coords: Int64Array
    file: NDArray[np.int32]
    offset: Int64Array
    dtype: NDArray[np.uint8] | None
    strides: Int64Array | None
    group: NDArray[np.int32] | None


def _need_length(what: str, found: int, expected: int, error: type[FormatError]) -> None:
    if found != expected:
        raise error(f"catalog column {what} has {found} entries, expected {expected}")


def _check_starts(what: str, start: Int64Array, rows: int, total: int | None, error: type[FormatError]) -> None:
    _need_length(what, len(start), rows + 1, error)
    if start[0] != 0:
        raise error(f"catalog column {what} starts at {int(start[0])}, expected 0")
    # Compared, not subtracted: a difference of hostile numbers overflows.
    falls = np.flatnonzero(start[1:] < start[:-1])
    if len(falls):
        i = int(falls[0])
        raise error(f"catalog column {what} falls from {int(start[i])} to {int(start[i + 1])} at entry {i + 1}, expected ascending starts")
    if total is not None and start[-1] != total:
        raise error(f"catalog column {what} ends at {int(start[-1])}, expected {total}")


def _check_codes(what: str, codes: NDArray[np.integer], low: int, count: int, error: type[FormatError]) -> None:
    """Codes lie in ``[low, count)``."""
    if len(codes) == 0:
        return
    lowest, highest = int(codes.min()), int(codes.max())
    if lowest < low or highest >= count:
        raise error(f"catalog column {what} holds {lowest if lowest < low else highest}, expected {low} to {count - 1}")


def check_tensor_columns(columns: TensorColumns, error: type[FormatError]) -> None:
    """Check what can be checked without chunks. Raises ``error``, or UnsupportedError for what a later version wrote."""
    t = len(columns.role)
    _need_length("tensor.dtype", len(columns.dtype), t, error)
    _need_length("tensor.kind", len(columns.kind), t, error)
    _need_length("tensor.pattern", len(columns.pattern), t, error)
    _check_codes("tensor.role", columns.role, 0, len(Role), error)
    if t and int(columns.dtype.max()) >= len(NAMES):
        raise UnsupportedError(
            f"dtype code {int(columns.dtype.max())} in tensor.dtype is not known to this version (0 to {len(NAMES) - 1} are)"
        )
    if t and int(columns.kind.max()) != 0:
        raise UnsupportedError(f"tensor kind {int(columns.kind.max())} is not known to this version, which reads kind 0 (explicit boxes)")
    _check_starts("tensor.shape_start", columns.shape_start, t, len(columns.shape), error)
    _check_starts("tensor.chunk_start", columns.chunk_start, t, None, error)
    if columns.strided is not None:
        _need_length("tensor.strided", len(columns.strided), t, error)
        _check_codes("tensor.strided", columns.strided, 0, 2, error)
    ndim = columns.ndim
    if t and int(ndim.max()) > _MAX_NDIM:
        raise error(f"tensor {int(ndim.argmax())} has {int(ndim.max())} dims, expected at most {_MAX_NDIM}")
    if len(columns.shape) and int(columns.shape.min()) < 0:
        raise error(f"catalog column tensor.shape holds {int(columns.shape.min())}, expected sizes of 0 or more")
    some = np.flatnonzero(ndim > 0)
    if len(some):
        volume = np.multiply.reduceat(np.maximum(columns.shape, 1).astype(np.float64), columns.shape_start[some])
        if float(volume.max()) > _MAX_NUMEL:
            worst = int(some[int(volume.argmax())])
            shape = columns.shape[columns.shape_start[worst] : columns.shape_start[worst + 1]].tolist()
            raise error(f"tensor {worst} has shape {shape}, more elements than any checkpoint holds (2**58)")


def check_chunk_columns(tensors: TensorColumns, chunks: ChunkColumns, n_files: int, n_groups: int, error: type[FormatError]) -> None:
    """Check lengths and codes of the chunk columns; ``check_chunks`` checks what a chunk claims."""
    c = int(tensors.chunk_start[-1])
    _need_length("chunk.file", len(chunks.file), c, error)
    _need_length("chunk.offset", len(chunks.offset), c, error)
    # c is the length of a real array from here on, so these products are of honest size.
    count, ndim = np.diff(tensors.chunk_start), tensors.ndim
    _need_length("chunk.coords", len(chunks.coords), int((count * 2 * ndim).sum()), error)
    _check_codes("chunk.file", chunks.file, 0, n_files, error)
    if chunks.dtype is not None:
        _need_length("chunk.dtype", len(chunks.dtype), c, error)
        if c and int(chunks.dtype.max()) >= len(NAMES):
            raise UnsupportedError(f"dtype code {int(chunks.dtype.max())} in chunk.dtype is not known to this version")
    if (chunks.strides is None) != (tensors.strided is None):
        raise error("catalog columns chunk.strides and tensor.strided must both be there or both be absent")
    if chunks.strides is not None and tensors.strided is not None:
        _need_length("chunk.strides", len(chunks.strides), int((count * ndim * tensors.strided).sum()), error)
    if chunks.group is not None:
        _need_length("chunk.group", len(chunks.group), c, error)
        _check_codes("chunk.group", chunks.group, -1, n_groups, error)


def check_chunks(
    tensors: TensorColumns,
    chunks: ChunkColumns,
    file_size: Int64Array,
    file_path: Sequence[str],
    which: Int64Array,
    explain: Explain,
    error: type[FormatError],
) -> None:
    """Check that every box of the tensors ``which`` (ascending) lies in its shape and every last byte in its file.

    Nothing here can overflow: shapes are bounded by ``check_tensor_columns``, sizes by shapes, and the reach of strides is first computed
    in floating point.
    """
    all_ndim = tensors.ndim
    at = coords_start(tensors.chunk_start, all_ndim)
    strides_at = np.zeros(0, dtype=np.int64)
    if tensors.strided is not None:
        strides_at = np.zeros(len(all_ndim) + 1, dtype=np.int64)
        np.cumsum(np.diff(tensors.chunk_start) * all_ndim * tensors.strided, out=strides_at[1:])
    for n in np.unique(all_ndim[which]).tolist():
        of_ndim = which[all_ndim[which] == n]
        weight = np.cumsum(tensors.chunk_start[of_ndim + 1] - tensors.chunk_start[of_ndim] + 1)
        first = 0
        while first < len(of_ndim):
            done = int(weight[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(weight, done + _BLOCK, side="right")))
            block = of_ndim[first:last]
            _check_block(tensors, chunks, file_size, file_path, block, n, at[block], strides_at, explain, error)
            first = last


def _check_block(
    tensors: TensorColumns,
    chunks: ChunkColumns,
    file_size: Int64Array,
    file_path: Sequence[str],
    block: Int64Array,
    n: int,
    at: Int64Array,
    strides_at: Int64Array,
    explain: Explain,
    error: type[FormatError],
) -> None:
    """``check_chunks`` for tensors of one ndim."""
    count = tensors.chunk_start[block + 1] - tensors.chunk_start[block]
    owner, chunk = ragged_arange(tensors.chunk_start[block], count)
    boxes = gather_boxes(chunks.coords, at, count, n)
    shape = tensors.shape[tensors.shape_start[block][:, None] + np.arange(n, dtype=np.int64)].reshape(len(block), n)
    outside = np.zeros(len(chunk), dtype=np.bool_)
    need = np.ones(len(chunk), dtype=np.int64)
    for d in range(n):
        extent, offset, size = shape[owner, d], boxes[:, 0, d], boxes[:, 1, d]
        outside |= (offset < 0) | (size < 0) | (size > extent) | (offset > extent - np.maximum(size, 0))
        need *= np.clip(size, 0, extent)
    if outside.any():
        i = int(np.flatnonzero(outside)[0])
        t = int(block[owner[i]])
        raise error(
            f"tensor {explain(t)}: chunk {int(chunk[i] - tensors.chunk_start[t])}, offset {boxes[i, 0].tolist()}, "
            f"size {boxes[i, 1].tolist()}, does not lie in shape {shape[owner[i]].tolist()}"
        )
    code = chunks.dtype[chunk] if chunks.dtype is not None else tensors.dtype[block][owner]
    item = _ITEMSIZE[code]
    if tensors.strided is not None and chunks.strides is not None:
        strided = np.flatnonzero(tensors.strided[block])
        if len(strided) and n:
            rows = np.flatnonzero(tensors.strided[block][owner])
            _, index = ragged_arange(np.zeros(len(strided), dtype=np.int64), count[strided])
            own = np.repeat(strides_at[block[strided]], count[strided])
            strides = chunks.strides[(own + index * n)[:, None] + np.arange(n, dtype=np.int64)]
            steps = np.maximum(boxes[rows, 1] - 1, 0)
            reach = (steps.astype(np.float64) * strides).sum(axis=1)
            wrong = (strides < 0).any(axis=1) | (reach * item[rows] > 2.0**62)
            if wrong.any():
                i = int(np.flatnonzero(wrong)[0])
                t = int(block[owner[rows[i]]])
                raise error(f"tensor {explain(t)}: a chunk of size {boxes[rows[i], 1].tolist()} has strides {strides[i].tolist()}")
            need[rows] = np.where(need[rows] > 0, (steps * strides).sum(axis=1) + 1, 0)
    need *= item
    start = chunks.offset[chunk]
    files = chunks.file[chunk]
    beyond = (start < 0) | (start > file_size[files] - need)
    if beyond.any():
        i = int(np.flatnonzero(beyond)[0])
        t = int(block[owner[i]])
        raise error(
            f"tensor {explain(t)}: chunk {int(chunk[i] - tensors.chunk_start[t])} claims {int(need[i])} bytes at byte {int(start[i])} "
            f"of {file_path[int(files[i])]!r}, which has {int(file_size[files[i]])} bytes"
        )
