"""The contiguous runs of elements that a strided box occupies in memory or in a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import PlanError, UnsupportedError
from .box import Int64Array

__all__ = ["Runs", "runs"]


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of one strided box; reading them one after the other gives a C-order array of shape ``shape``.

    ``numpy.concatenate([memory[s : s + length] for s in starts]).reshape(shape).transpose(numpy.argsort(dims))``, broadcast to the size
    of the box, is the box.

    Attributes:
        starts: (m,) int64, first element of each run, relative to the box's first. Ascending unless elements overlap in memory.
        length: elements per run (the same for all).
        dims: the dims of the box from the outermost to the innermost in memory; a permutation of ``range(ndim)``.
        shape: ``size[d] for d in dims``, with 1 for a dim of stride 0 (a broadcast dim is stored, and read, once).
    """

    starts: Int64Array
    length: int
    dims: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of all runs together."""
        return len(self.starts) * self.length


def runs(size: Sequence[int], strides: Sequence[int]) -> Runs:
    """The fewest runs of equal length that hold a box of this size and these element strides.

    Args:
        size: elements per dim; a box with a 0 has no runs.
        strides: elements between neighbours per dim, not negative (torch has no negative strides); of no meaning where the size is 1.

    Raises:
        PlanError: lengths differ, a number is negative, or the box reaches over 2**63 elements.
        UnsupportedError: there are more runs than elements under the box, so elements overlap many times over. (The check bounds what is
            allocated by the size of the memory or file that was already checked to hold the box.)
    """
    size, strides = tuple(size), tuple(strides)
    n = len(size)
    if len(strides) != n:
        raise PlanError(f"a box of size {size} cannot have strides {strides}")
    if any(s < 0 for s in strides) or any(k < 0 for k in size):
        raise PlanError(f"sizes and strides must not be negative, found size {size} and strides {strides}")
    if 0 in size:
        return Runs(np.zeros(0, dtype=np.int64), 0, tuple(range(n)), size)
    # A dim of size 1 or stride 0 contributes one element at one place; outermost it is in nobody's way.
    still = [d for d in range(n) if size[d] == 1 or strides[d] == 0]
    moving = sorted((d for d in range(n) if size[d] != 1 and strides[d] != 0), key=lambda d: -strides[d])
    last = sum((size[d] - 1) * strides[d] for d in moving)
    if last >= 2**63 - 1:
        raise PlanError(f"a box of size {size} with strides {strides} reaches over more than 2**63 elements")
    length = 1
    outer = list(moving)
    while outer and strides[outer[-1]] == length:
        length *= size[outer.pop()]
    count = math.prod(size[d] for d in outer)
    if count > last + 1:
        raise UnsupportedError(f"a box of size {size}, strides {strides}, overlaps itself in memory: {count} runs in {last + 1} elements")
    starts = np.zeros(1, dtype=np.int64)
    for d in outer:
        starts = (starts[:, None] + np.arange(size[d], dtype=np.int64) * strides[d]).reshape(-1)
    dims = tuple(still + moving)
    shape = tuple(1 if strides[d] == 0 else size[d] for d in dims)
    return Runs(starts, length, dims, shape)
