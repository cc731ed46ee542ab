"""Small helpers for ragged columns (one flat array + starts)."""

from __future__ import annotations

import numpy as np

from .box import Int64Array

__all__ = ["coords_start", "gather_boxes", "ragged_arange"]


def ragged_arange(start: Int64Array, count: Int64Array) -> tuple[Int64Array, Int64Array]:
    """``(owner, index)``: for each row r the numbers ``start[r] .. start[r] + count[r]``, end to end; ``owner`` is the row of each."""
    owner = np.repeat(np.arange(len(count), dtype=np.int64), count)
    ends = np.cumsum(count)
    index = np.arange(len(owner), dtype=np.int64)
    index += np.repeat(start - (ends - count), count)
    return owner, index


def coords_start(chunk_start: Int64Array, ndim: Int64Array) -> Int64Array:
    """(T + 1,) where each tensor's boxes start in a flat coords column: a chunk of tensor t takes ``2 * ndim[t]`` numbers."""
    out = np.zeros(len(ndim) + 1, dtype=np.int64)
    np.cumsum(np.diff(chunk_start) * (2 * ndim), out=out[1:])
    return out


def gather_boxes(coords: Int64Array, start: Int64Array, count: Int64Array, ndim: int) -> Int64Array:
    """The boxes of several tensors of one ndim as one box array (sum(count), 2, ndim).

    Args:
        coords: flat coords column.
        start: (s,) where each tensor's boxes start in ``coords``.
        count: (s,) boxes of each tensor.
        ndim: dims of all of them.
    """
    total = int(count.sum())
    if ndim == 0 or total == 0:
        return np.empty((total, 2, ndim), dtype=np.int64)
    width = 2 * ndim
    if len(start) == 1 or bool(np.all(start[:-1] + count[:-1] * width == start[1:])):
        first = int(start[0])  # end to end: a view
        return coords[first : first + total * width].reshape(total, 2, ndim)
    row, index = ragged_arange(np.zeros(len(count), dtype=np.int64), count)
    at = start[row] + index * width
    boxes: Int64Array = coords[at[:, None] + np.arange(width, dtype=np.int64)].reshape(total, 2, ndim)
    return boxes
