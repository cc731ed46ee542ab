"""Which byte ranges of one file to read together: a pure function over columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Coalesced", "coalesce"]

_Int64 = npt.NDArray[np.int64]
_LIMIT = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Coalesced:
    """Groups of ranges. Member ``i`` is ``length[i]`` bytes from byte ``member_offset[i]`` of group ``member_group[i]``.

    ``group_start`` and ``group_length`` (G,) are ascending in ``group_start``; ``member_group`` and ``member_offset`` (N,) are in
    the order of the ranges as given. All int64, in bytes.
    """

    group_start: _Int64
    group_length: _Int64
    member_group: _Int64
    member_offset: _Int64


def coalesce(starts: npt.ArrayLike, lengths: npt.ArrayLike, gap: int, max_length: int) -> Coalesced:
    """Put ranges of one file into groups that are each read at once.

    Two neighbours share a group when at most ``gap`` unwanted bytes lie between them. A group is longer than ``max_length`` only when one
    member of it is, and then it holds nothing outside that member. The result does not depend on the order of the ranges. Ranges
    may overlap; a byte is in two groups only when two members want it. Raises ValueError for a negative start, a range without
    bytes (it would join its neighbours over a wider gap than allowed) or one that ends above 2^63 - 1.
    """
    start = np.asarray(starts, dtype=np.int64)
    length = np.asarray(lengths, dtype=np.int64)
    if start.ndim != 1 or start.shape != length.shape:
        raise ValueError(f"starts {start.shape} and lengths {length.shape} must be 1-d and equally long")
    if gap < 0 or max_length <= 0:
        raise ValueError(f"gap {gap} must not be negative and max_length {max_length} must be positive")
    count = len(start)
    if count == 0:
        return Coalesced(*(np.zeros(0, np.int64) for _ in range(4)))
    if start.min() < 0 or length.min() <= 0 or (length > _LIMIT - start).any():
        raise ValueError("ranges must have start >= 0, length > 0 and end below 2^63")

    order = np.lexsort((-length, start))  # the longest of those that start together first, so that it takes in the others
    first = start[order]
    # End of the furthest member so far. A group begins only at a member that moves it, so within a group it is the group's own end.
    reach = np.maximum.accumulate(first + length[order])

    # Where a run ends because the next member is more than `gap` away. Compared without adding: reach + gap could overflow.
    apart = np.zeros(count, bool)
    apart[0] = True
    ahead = first[1:] > reach[:-1]
    apart[1:][ahead] = (first[1:] - reach[:-1])[ahead] > gap
    run_start = np.flatnonzero(apart)
    run_stop = np.append(run_start[1:], count)

    begins = apart
    long = reach[run_stop - 1] - first[run_start] > max_length
    if long.any():
        # The first later member that makes a group beginning at i too long. One that moves no end is free and never splits.
        limit = np.minimum(max_length, _LIMIT - first) + first
        split = np.searchsorted(reach, np.maximum(limit, reach), side="right").tolist()
        for begin, stop in zip(run_start[long].tolist(), run_stop[long].tolist(), strict=True):
            position = split[begin]
            while position < stop:
                begins[position] = True
                position = split[position]

    group = np.cumsum(begins) - 1
    at = np.flatnonzero(begins)
    last = np.append(at[1:], count) - 1
    group_start = first[at]
    group_length = reach[last] - group_start
    member_group = np.empty(count, np.int64)
    member_group[order] = group
    return Coalesced(group_start, group_length, member_group, start - group_start[member_group])
