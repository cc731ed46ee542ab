"""Who writes which bytes: exactly one holder of every byte, bytes balanced over the holders. Pure numpy.

Boxes held by one rank only are given. The others are grouped by the set of ranks that hold them. Groups are handled from the smallest set
to the largest (the most constrained first): their boxes are laid end to end on a line of bytes, and the line is cut so that every holder
is filled up to one common level (water-filling over what the ranks write already). A cut moves to a box boundary or, inside a large box,
to a boundary of rows, so there are never more pieces than boxes + ranks per group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Pieces", "assign_owners"]

I64 = npt.NDArray[np.int64]

_LARGEST_SNAP = 1 << 20  # bytes; a cut may move by this much at most ...
_SMALLEST_SNAP = 1 << 12  # ... and boxes up to this size are never cut
_SNAP_SHARE = 64  # ... or by this fraction of a rank's share, if that is less


@dataclass(frozen=True)
class Pieces:
    """Pieces of boxes with their owners, ordered by (box, start). ``start``/``stop``: C-order element range inside the box."""

    box: I64
    start: I64
    stop: I64
    holder: I64
    """Index into the ``holders`` column given to assign_owners: which copy of the box is written."""


def _fill_level(loads: npt.NDArray[np.float64], total: float) -> float:
    """The level L with sum(max(0, L - load)) == total."""
    ordered = np.sort(loads)
    below = np.cumsum(ordered)
    counts = np.arange(1, len(ordered) + 1)
    levels = (total + below) / counts
    upper = np.append(ordered[1:], np.inf)
    return float(levels[np.argmax(levels <= upper)])


def _row_elements(size: I64, itemsize: int, snap: int) -> int:
    """Elements of the largest trailing block of a box whose bytes do not exceed ``snap``: cuts fall between such blocks."""
    block = 1
    for extent in size[::-1]:
        if block * int(extent) * itemsize > snap:
            break
        block *= max(int(extent), 1)
    return block


def assign_owners(numel: I64, itemsize: I64, sizes: list[I64], hold_start: I64, holders: I64, world: int) -> Pieces:
    """Choose one owner for every byte of every box.

    numel, itemsize: (B,) of each box. sizes: per box its (ndim,) extents (used only where a box is cut). hold_start: (B+1,) and
    holders: ranks holding box b are ``holders[hold_start[b]:hold_start[b+1]]``, ascending, at least one. world: number of ranks.
    """
    nbytes = numel * itemsize
    counts = np.diff(hold_start)
    loads = np.zeros(world, dtype=np.float64)
    single = counts == 1
    np.add.at(loads, holders[hold_start[:-1][single]], nbytes[single].astype(np.float64))

    box = [np.flatnonzero(single)]
    start = [np.zeros(len(box[0]), dtype=np.int64)]
    stop = [numel[single]]
    chosen = [hold_start[:-1][single]]

    for members in _groups_of_equal_holders(np.flatnonzero(~single), counts, hold_start, holders):
        first = members[0]
        ranks = holders[hold_start[first] : hold_start[first + 1]]
        line = np.concatenate(([0], np.cumsum(nbytes[members])))
        level = _fill_level(loads[ranks], float(line[-1]))
        quota = np.maximum(0.0, level - loads[ranks])
        snap = int(max(_SMALLEST_SNAP, min(_LARGEST_SNAP, line[-1] / len(ranks) / _SNAP_SHARE)))
        cuts = _snapped_cuts(np.cumsum(quota)[:-1], line, members, numel, itemsize, sizes, snap)
        # pieces between all boundaries (box ends and cuts); the owner is the holder in whose interval a piece begins
        bounds = np.union1d(line, cuts)
        begin, end = bounds[:-1], bounds[1:]
        which = np.searchsorted(line, begin, side="right") - 1
        owner = np.searchsorted(cuts, begin, side="right")
        # zero-byte boxes collapse on the line; they are not written at all
        piece_box = members[which]
        box.append(piece_box)
        start.append((begin - line[which]) // itemsize[piece_box])
        stop.append((end - line[which]) // itemsize[piece_box])
        chosen.append(hold_start[piece_box] + owner)
        np.add.at(loads, ranks[owner], (end - begin).astype(np.float64))

    all_box, all_start = np.concatenate(box), np.concatenate(start)
    order = np.lexsort((all_start, all_box))
    return Pieces(all_box[order], all_start[order], np.concatenate(stop)[order], np.concatenate(chosen)[order])


def _groups_of_equal_holders(boxes: I64, counts: I64, hold_start: I64, holders: I64) -> list[I64]:
    """Box indices grouped by equal holder sets, smallest sets first, order of boxes kept inside a group."""
    groups: list[I64] = []
    for count in np.unique(counts[boxes]):
        same = boxes[counts[boxes] == count]
        rows = holders[hold_start[same][:, None] + np.arange(count)]
        # a random-weight sum sorts rows into candidate groups in one pass; the real rows decide inside each
        weights = np.random.default_rng(count).integers(1, 1 << 62, size=int(holders.max()) + 1, dtype=np.uint64)
        signature = weights[rows].sum(axis=1, dtype=np.uint64)
        order = np.argsort(signature, kind="stable")
        edges = np.flatnonzero(np.diff(signature[order])) + 1
        for part in np.split(order, edges):
            if (rows[part] == rows[part[0]]).all():
                groups.append(same[part])
            else:
                _, inverse = np.unique(rows[part], axis=0, return_inverse=True)
                groups.extend(same[part[inverse.ravel() == i]] for i in range(int(inverse.max()) + 1))
    return groups


def _snapped_cuts(wanted: npt.NDArray[np.float64], line: I64, members: I64, numel: I64, itemsize: I64, sizes: list[I64], snap: int) -> I64:
    """Move each wanted cut (a byte of the line) to a box boundary or to a row boundary inside a box larger than ``snap``."""
    cuts = np.zeros(len(wanted), dtype=np.int64)
    position = np.minimum(np.searchsorted(line, wanted, side="right") - 1, len(members) - 1)
    for i, (at, place) in enumerate(zip(wanted, position, strict=True)):
        low, high = int(line[place]), int(line[place + 1])
        member = int(members[place])
        best = low if at - low <= high - at else high
        if high - low > snap:
            width = int(itemsize[member])
            step = _row_elements(sizes[member], width, snap) * width
            best = min(low + round((float(at) - low) / step) * step, high)
        cuts[i] = best
    return np.maximum.accumulate(cuts) if len(cuts) else cuts
