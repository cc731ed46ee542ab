"""Which bytes of one file are read in which order, with what between them: a pure planner over columns.

A *piece* is consecutive bytes of a file and the address that gets them. *Filler* pieces are bytes nobody wants: holes small enough that
reading them costs less than leaving them out, and the rest of a block whose digest can then be checked. A *call* is consecutive bytes
that one ``preadv`` can fetch; a *task* is some MiB of calls that one thread works through. Blocks are never divided between tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["CALL", "FilePlan", "Verify", "layers", "plan_file"]

Verify = Literal["covered", "strict", "off"]
_Int64 = npt.NDArray[np.int64]
_Bool = npt.NDArray[np.bool_]

CALL = 1 << 20
"""Bytes of a call at most: what was just read is still in the core's cache when it is digested."""
_PIECES = 1024  # of a call at most (IOV_MAX)
_SECTOR = 512  # bytes: a smaller hole costs less to read than to leave out
_CALL_COST = 16 << 10  # bytes that take as long to read as a system call


@dataclass(frozen=True, slots=True)
class FilePlan:
    """What to read of one file, ascending.

    Attributes:
        start, length: (n,) bytes of each piece.
        address: (n,) where it goes; for filler the offset in a buffer of :data:`CALL` bytes that is used anew by each call.
        unit: (n,) scratch unit of the piece, -1 for none.
        filler: (n,)
        call: (c + 1,) first piece of each call.
        call_start, call_length: (c,) bytes of each call.
        call_block: (c,) number of the block that holds the call, when it is to be checked; else -1.
        task: (t + 1,) first call of each task.
        ranges: consecutive ranges of the file, as an object store would count requests.
        verified: wanted bytes in blocks that are checked.
    """

    start: _Int64
    length: _Int64
    address: _Int64
    unit: _Int64
    filler: _Bool
    call: _Int64
    call_start: _Int64
    call_length: _Int64
    call_block: _Int64
    task: _Int64
    ranges: int
    verified: int

    @property
    def bytes(self) -> int:
        """Bytes read, filler included."""
        return int(self.length.sum())


def layers(start: _Int64, length: _Int64) -> list[_Int64]:
    """Rows in ascending order, in as few lists as needed so that the pieces of one list do not overlap (usually one)."""
    rows = np.lexsort((length, start))
    out = []
    while len(rows):
        begin, end = start[rows], start[rows] + length[rows]
        if len(rows) == 1 or bool((begin[1:] >= np.maximum.accumulate(end)[:-1]).all()):
            out.append(rows)
            break
        keep = np.zeros(len(rows), dtype=np.bool_)
        reach = -1
        for i, (b, e) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
            if b >= reach:
                keep[i], reach = True, e
        out.append(rows[keep])
        rows = rows[~keep]
    return out


def plan_file(
    start: _Int64,
    length: _Int64,
    address: _Int64,
    unit: _Int64,
    *,
    size: int,
    block: int,
    verify: Verify,
    gap: int,
    task: int,
    widen: tuple[bool, bool] = (False, False),
) -> FilePlan:
    """Plan pieces that are ascending and do not overlap.

    Args:
        size: bytes of the file.
        block: bytes of a digested block (a power of two), 0 when the file has no digests.
        verify: ``"covered"`` reads up to ``gap`` bytes more where that completes a block; ``"strict"`` completes every block.
        gap: holes of at most this many bytes may be filled, as long as no more than the wanted bytes is read in addition.
        task: bytes per task, about.
        widen: complete the first, the last block: the rest of it is wanted too, but read another time.
    """
    check = block > 0 and verify != "off"
    end = start + length
    lo, hi = start, end
    if check:
        floor, ceiling = start // block * block, np.minimum(-(-end // block) * block, size)
        if verify == "strict":
            lo, hi = floor, ceiling
        else:
            near = min(gap, block // 8)  # so that completing a block is little beside the block
            lo = np.where(start - floor <= near, floor, start)
            hi = np.where(ceiling - end <= near, ceiling, end)
            if widen[0]:
                lo[0] = floor[0]
            if widen[1]:
                hi[-1] = ceiling[-1]
    first, last = _join(lo, hi, length, gap)
    head, tail = lo[first], np.maximum.reduceat(hi, first) if len(first) else hi
    if check and verify == "covered":
        # reading more is of use only where it completes the block
        whole_head = np.minimum((head // block + 1) * block, size) <= tail
        whole_tail = (tail - 1) // block * block >= head
        head = np.where((head < start[first]) & ~whole_head, start[first], head)
        tail = np.where((tail > end[last]) & ~whole_tail, end[last], tail)
        if not any(widen) and int((start[first] - head).sum() + (tail - end[last]).sum()) > int(length.sum()):
            head, tail = start[first], end[last]
    return _cut(start, length, address, unit, first, last, head, tail, size=size, block=block if check else 0, task=task)


def _join(lo: _Int64, hi: _Int64, length: _Int64, gap: int) -> tuple[_Int64, _Int64]:
    """First and last row of each range that is read in one."""
    hole = lo[1:] - np.maximum.accumulate(hi)[:-1]
    small = (hole > 0) & (hole <= gap)
    if int(hole[small].sum()) > int(length.sum()):
        small &= (hole < _SECTOR) | (2 * hole <= length[1:] + length[:-1])
    joined = (hole <= 0) | small
    first = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(~joined) + 1))
    return first, np.append(first[1:], len(lo)) - 1


def _cut(
    start: _Int64,
    length: _Int64,
    address: _Int64,
    unit: _Int64,
    first: _Int64,
    last: _Int64,
    head: _Int64,
    tail: _Int64,
    *,
    size: int,
    block: int,
    task: int,
) -> FilePlan:
    """Put in filler, cut pieces at calls and blocks, group calls into tasks."""
    end = start + length
    followed = np.ones(len(start), dtype=np.bool_)
    followed[last] = False
    inner = np.flatnonzero(followed)
    begin = np.concatenate((head, end[inner], end[last]))
    stop = np.concatenate((start[first], start[inner + 1], tail))
    some = stop > begin
    begin, stop = begin[some], stop[some]
    more = len(begin)
    start = np.concatenate((start, begin))
    length = np.concatenate((length, stop - begin))
    address = np.concatenate((address, np.zeros(more, np.int64)))
    unit = np.concatenate((unit, np.full(more, -1, np.int64)))
    filler = np.zeros(len(start), dtype=np.bool_)
    if more:
        filler[-more:] = True
        order = np.argsort(start, kind="stable")
        start, length, address, unit, filler = start[order], length[order], address[order], unit[order], filler[order]

    step = min(block, CALL) if block else CALL
    parts = (start + length - 1) // step - start // step + 1
    if int(parts.max(initial=1)) > 1:
        row = np.repeat(np.arange(len(start)), parts)
        k = np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)
        edge = (start[row] // step + k) * step
        begin = np.maximum(start[row], edge)
        stop = np.minimum(start[row] + length[row], edge + step)
        address = np.where(filler[row], 0, address[row] + (begin - start[row]))
        start, length, unit, filler = begin, stop - begin, unit[row], filler[row]

    n = len(start)
    apart = np.ones(n, dtype=np.bool_)
    apart[1:] = start[1:] != start[:-1] + length[:-1]
    ranges = int(apart.sum())
    breaks = apart.copy()
    breaks[1:] |= start[1:] // step != start[:-1] // step
    begins = np.flatnonzero(breaks)
    within = np.arange(n) - np.repeat(begins, np.diff(np.append(begins, n)))
    breaks |= within % _PIECES == 0
    call = np.append(np.flatnonzero(breaks), n)
    call_length = np.add.reduceat(length, call[:-1])
    call_start = start[call[:-1]]
    wasted = np.where(filler, length, 0)
    before = np.cumsum(wasted) - wasted
    address = np.where(filler, before - np.repeat(before[call[:-1]], np.diff(call)), address)

    verified = 0
    call_block = np.full(len(call_start), -1, np.int64)
    group = np.arange(len(call_start))  # calls of one block are of one task
    if block:
        number = call_start // block
        edges = np.flatnonzero(np.concatenate((np.ones(1, np.bool_), number[1:] != number[:-1])))
        blocks = number[edges]
        whole = np.add.reduceat(call_length, edges) == np.minimum(block, size - blocks * block)
        count = np.diff(np.append(edges, len(number)))
        call_block = np.where(np.repeat(whole, count), number, -1)
        group = np.repeat(edges, count)
        wanted = np.add.reduceat(np.where(filler, 0, length), call[:-1])
        verified = int(wanted[call_block >= 0].sum())
    cost = np.cumsum(call_length + _CALL_COST) - call_length - _CALL_COST
    of = cost[group] // task
    tasks = np.append(np.flatnonzero(np.concatenate((np.ones(1, np.bool_), of[1:] != of[:-1]))), len(of))
    return FilePlan(start, length, address, unit, filler, call, call_start, call_length, call_block, tasks, ranges, verified)
