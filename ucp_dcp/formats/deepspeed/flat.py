"""Which rank holds which elements of which parameter, and where: the flat buffers of ZeRO as integers (``docs/deepspeed.md``).

Stages 1 and 2 lay the parameters of a group end to end, pad the end to a multiple of 2 x dp, and cut the buffer into dp equal
partitions. Stage 3 cuts each parameter by itself into dp pieces of ceil(numel / dp) and lays a rank's pieces end to end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...geometry import boxes_to_array, c_strides, flat_range_to_boxes

__all__ = ["Pieces", "partition_size", "pieces_of_group", "pieces_of_subgroup", "range_boxes"]

_ALIGN = 2
"""nccl_start_alignment_factor of DeepSpeed, in elements, whatever the dtype."""

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """One parameter as boxes (k, 2, ndim), each of which is contiguous in the partition of ``rank`` from element ``start`` on."""

    name: str
    shape: tuple[int, ...]
    boxes: Int64Array
    rank: Int64Array
    start: Int64Array


def partition_size(numel: int, dp: int) -> int:
    """Elements per rank of a flat buffer of stages 1 and 2 that holds ``numel`` elements."""
    align = _ALIGN * dp
    return -(-numel // align) * align // dp


def pieces_of_group(params: Sequence[tuple[str, tuple[int, ...]]], paddings: Sequence[int], dp: int) -> tuple[list[Pieces], int, int]:
    """Stages 1 and 2, one optimizer group.

    Args:
        params: (name, shape) in flat-buffer order.
        paddings: elements of padding after each parameter.
        dp: number of partitions.

    Returns the pieces, the number of elements without the padding at the end, and the size of a partition.
    """
    total = sum(math.prod(shape) + pad for (_, shape), pad in zip(params, paddings, strict=True))
    size = partition_size(total, dp)
    pieces = []
    begin = 0
    for (name, shape), pad in zip(params, paddings, strict=True):
        numel = math.prod(shape)
        if numel:
            ranks = np.arange(begin // size, (begin + numel - 1) // size + 1, dtype=np.int64)
            low, high = np.maximum(ranks * size, begin), np.minimum((ranks + 1) * size, begin + numel)
            pieces.append(_pieces(name, shape, ranks, low - begin, high - begin, low - ranks * size))
        else:
            pieces.append(_nothing(name, shape))
        begin += numel + pad
    return pieces, total, size


def pieces_of_subgroup(params: Sequence[tuple[str, tuple[int, ...]]], dp: int) -> tuple[list[Pieces], int]:
    """Stage 3, one sub-group: the pieces and the number of elements of each rank's flat buffer, padding included."""
    pieces = []
    at = 0
    for name, shape in params:
        numel = math.prod(shape)
        each = -(-numel // dp)
        if numel:
            ranks = np.arange(-(-numel // each), dtype=np.int64)
            low = ranks * each
            pieces.append(_pieces(name, shape, ranks, low, np.minimum(low + each, numel), np.full(len(ranks), at, dtype=np.int64)))
        else:
            pieces.append(_nothing(name, shape))
        at += each
    return pieces, at


def _nothing(name: str, shape: tuple[int, ...]) -> Pieces:
    none = np.empty(0, dtype=np.int64)
    return Pieces(name, shape, np.empty((0, 2, len(shape)), dtype=np.int64), none, none)


def _pieces(name: str, shape: tuple[int, ...], rank: Int64Array, low: Int64Array, high: Int64Array, at: Int64Array) -> Pieces:
    """``low .. high`` are flat ranges of the parameter; ``at`` is where each begins in its rank's partition."""
    boxes, owner = range_boxes(shape, low, high)
    first = boxes[:, 0] @ np.asarray(c_strides(shape), dtype=np.int64) if shape else np.zeros(len(boxes), dtype=np.int64)
    return Pieces(name, shape, boxes, rank[owner], at[owner] + first - low[owner])


def range_boxes(shape: tuple[int, ...], low: Int64Array, high: Int64Array) -> tuple[Int64Array, Int64Array]:
    """``flat_range_to_boxes`` for many ranges of one tensor: the boxes (k, 2, ndim), in order, and the range that each belongs to.

    Vectorised for what nearly all parameters are (1-d and 2-d): a stage-3 checkpoint of 1,024 ranks has a thousand ranges per tensor.
    """
    n = len(low)
    if len(shape) == 1:
        return np.stack((low, high - low), axis=1)[:, :, None], np.arange(n, dtype=np.int64)
    if len(shape) != 2:
        parts = [flat_range_to_boxes(shape, a, b) for a, b in zip(low.tolist(), high.tolist(), strict=True)]
        owner = np.repeat(np.arange(n, dtype=np.int64), [len(p) for p in parts])
        return boxes_to_array([box for part in parts for box in part], len(shape)), owner
    width = shape[1]
    row, column = np.divmod(low, width)
    last_row, last_column = np.divmod(high, width)
    single = row == last_row
    head = np.where(single, last_column - column, np.where(column > 0, width - column, 0))
    head = np.where(single & (column == 0), 0, head)  # a range inside one row that starts it is the tail below
    begin = row + (column > 0)
    middle = np.maximum(last_row - begin, 0)
    tail = np.where(single & (column > 0), 0, last_column)
    boxes = np.zeros((n, 3, 2, 2), dtype=np.int64)
    boxes[:, 0, 0, 0], boxes[:, 0, 0, 1], boxes[:, 0, 1, 0], boxes[:, 0, 1, 1] = row, column, 1, head
    boxes[:, 1, 0, 0], boxes[:, 1, 1, 0], boxes[:, 1, 1, 1] = begin, middle, width
    boxes[:, 2, 0, 0], boxes[:, 2, 1, 0], boxes[:, 2, 1, 1] = last_row, 1, tail
    keep = np.stack((head > 0, middle > 0, tail > 0), axis=1)
    return boxes[keep], np.broadcast_to(np.arange(n, dtype=np.int64)[:, None], (n, 3))[keep]
