"""Boxes, C strides, flat ranges as boxes, and box arrays.

A *box array* is int64 of shape (k, 2, ndim): ``a[:, 0]`` are offsets and ``a[:, 1]`` sizes, in elements. It is what the
``chunk.coords`` section of ``docs/format.md`` holds for one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError

__all__ = ["Box", "Int64Array", "array_to_boxes", "boxes_to_array", "c_strides", "flat_range_to_boxes", "full_box"]

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The index set ``[offset, offset + size)`` of an n-d tensor, in elements per dim. A 0-d box ``Box((), ())`` holds one element.

    Ordered by offset, then size: the order of chunks in a data file (``docs/format.md``).
    Raises PlanError when the lengths differ or a number is negative.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.size):
            raise PlanError(f"a box needs as many offsets as sizes, found offset {self.offset} and size {self.size}")
        if any(n < 0 for n in self.size) or any(n < 0 for n in self.offset):
            raise PlanError(f"offsets and sizes of a box must not be negative, found offset {self.offset} and size {self.size}")

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.offset)

    @property
    def numel(self) -> int:
        """Number of elements: 1 for a 0-d box."""
        return math.prod(self.size)

    @property
    def empty(self) -> bool:
        """True when the box holds no element."""
        return 0 in self.size

    @property
    def stop(self) -> tuple[int, ...]:
        """First index behind the box in each dim."""
        return tuple(o + n for o, n in zip(self.offset, self.size, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The elements in both boxes; None when there are none. Raises PlanError when the number of dims differs."""
        self._same_ndim(other)
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        size = tuple(min(a, b) - o for a, b, o in zip(self.stop, other.stop, offset, strict=True))
        if any(n <= 0 for n in size):
            return None
        return Box(offset, size)

    def contains(self, other: Box) -> bool:
        """True when every element of ``other`` is in this box; an empty box is in every box."""
        self._same_ndim(other)
        if other.empty:
            return True
        lower = all(a <= b for a, b in zip(self.offset, other.offset, strict=True))
        return lower and all(b <= a for a, b in zip(self.stop, other.stop, strict=True))

    def translate(self, delta: Sequence[int]) -> Box:
        """The box moved by ``delta`` elements per dim. Raises PlanError when it would start below 0."""
        if len(delta) != self.ndim:
            raise PlanError(f"a box of {self.ndim} dims cannot be moved by {len(delta)} numbers")
        return Box(tuple(o + d for o, d in zip(self.offset, delta, strict=True)), self.size)

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same box in coordinates whose zero lies at ``origin`` (the offset of a chunk or a fragment, say)."""
        return self.translate(tuple(-o for o in origin))

    def slices(self) -> tuple[slice, ...]:
        """The box as an index for numpy arrays and torch tensors."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.size, strict=True))

    def _same_ndim(self, other: Box) -> None:
        if len(self.offset) != len(other.offset):
            raise PlanError(f"boxes of {self.ndim} and {other.ndim} dims cannot be compared")


def full_box(shape: Sequence[int]) -> Box:
    """The box of all elements of a tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Element strides of a C-order array; dims of size 0 count as 1, as torch and numpy do, so that no stride is 0."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(1, shape[d + 1])
    return tuple(strides)


def flat_range_to_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements ``[start, stop)`` of the flattened C-order tensor as disjoint boxes, in flat order.

    At most 2n - 1 boxes for n dims (1 for 0-d), none empty, each contiguous in C order of ``shape``. This is what joins ZeRO's flat
    partitions to n-d chunks (UCP paper, arXiv 2406.18820, pattern Shard-V of ZeRO).

    Args:
        shape: sizes of the dims, in elements.
        start: first flat element.
        stop: one past the last flat element; ``0 <= start <= stop <= numel``, else PlanError.
    """
    shape = tuple(shape)
    n = len(shape)
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise PlanError(f"flat range [{start}, {stop}) does not lie in the {numel} elements of shape {shape}")
    if start == stop:
        return []
    if n == 0:
        return [Box((), ())]
    stride = c_strides(shape)
    boxes: list[Box] = []

    def emit(d: int, first: int, last: int) -> None:
        # [first, last) lies in one block of dim d - 1 and both ends are multiples of stride[d].
        offset = [0] * n
        rest = first
        for e in range(d + 1):
            offset[e], rest = divmod(rest, stride[e])
        size = (1,) * d + ((last - first) // stride[d],) + shape[d + 1 :]
        boxes.append(Box(tuple(offset), size))

    at = start
    d = n - 1
    # Up: fill the innermost block that `at` lies in, then the one around it, while the block ends inside the range.
    while d > 0 and at < stop:
        block = stride[d] * shape[d]
        end = -(-at // block) * block
        if end > stop:
            break
        if end > at:
            emit(d, at, end)
            at = end
        d -= 1
    # Across whole blocks of the outermost dim reached, then down into the last, partial block.
    while d < n and at < stop:
        end = stop // stride[d] * stride[d]
        if end > at:
            emit(d, at, end)
            at = end
        d += 1
    return boxes


def boxes_to_array(boxes: Iterable[Box], ndim: int) -> Int64Array:
    """The box array (k, 2, ndim) of k boxes. Raises PlanError when a box has another number of dims or does not fit into int64."""
    rows = [(box.offset, box.size) for box in boxes]
    for offset, _ in rows:
        if len(offset) != ndim:
            raise PlanError(f"a box of {len(offset)} dims (offset {offset}) among boxes of {ndim} dims")
    out = np.empty((len(rows), 2, ndim), dtype=np.int64)
    if rows and ndim:
        try:
            out[:] = rows
        except OverflowError as error:
            raise PlanError("an offset or size of a box is 2**63 or more") from error
    return out


def array_to_boxes(array: Int64Array) -> list[Box]:
    """The boxes of a box array (k, 2, ndim)."""
    return [Box(tuple(offset), tuple(size)) for offset, size in array.tolist()]
