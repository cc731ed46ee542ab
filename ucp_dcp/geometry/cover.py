"""Is a tensor covered exactly, and where not? Holes and overlaps are found and located; volumes are never compared.

The decision is exact for any boxes. The mixed difference (one difference per dim) of a box's indicator function is +1 or -1 at each
of the box's corners, and a function with finite support is determined by its mixed difference. So the boxes cover the tensor exactly
once if and only if the signed corners of all boxes, minus those of the full box, cancel. Corners are integers, brought together by
sorting: O(k log k) for k boxes, whatever dim is cut and however irregularly.

Only a tensor that fails is searched: it is bisected at box boundaries, parts that are exact are dropped, until each fault is alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError, UnsupportedError
from .box import Box, Int64Array, array_to_boxes
from .ragged import coords_start, gather_boxes, ragged_arange

__all__ = ["Cover", "check_cover", "check_cover_ragged"]

_FLAT_LIMIT = 2**62  # lattice points that fit into one sort key with its sign bit
_CORNERS = 1 << 21  # corners sorted at a time
_DIRECT = 1024  # boxes in a region up to which all pairs are compared
_FEW = 1 << 14  # corners that are never too many
_BUDGET = 4096  # regions looked at for one tensor, see Cover.complete


@dataclass(frozen=True, slots=True)
class Cover:
    """Result of ``check_cover``.

    Attributes:
        ok: every element is covered exactly once.
        holes: disjoint boxes that nothing covers.
        overlaps: ``(i, j, box)``: boxes i < j of the input share ``box``.
        complete: all holes and all overlapping pairs are listed; False when there may be more than was asked for, or when the boxes overlap
            so irregularly that the search was cut short (``ok`` is exact even then).
    """

    ok: bool
    holes: tuple[Box, ...]
    overlaps: tuple[tuple[int, int, Box], ...]
    complete: bool = True


def check_cover(shape: Sequence[int], boxes: Int64Array, limit: int = 8) -> Cover:
    """Check that ``boxes`` (k, 2, n) cover a tensor of ``shape`` exactly once.

    Empty boxes are ignored, so a tensor without elements needs no box. A 0-d tensor needs exactly one box.

    Args:
        shape: sizes per dim.
        boxes: box array, in any order.
        limit: at most this many holes and this many overlaps are located.

    Raises:
        PlanError: a box does not lie in the shape, or has another number of dims.
    """
    shape = tuple(int(n) for n in shape)
    ndim = len(shape)
    if boxes.ndim != 3 or boxes.shape[1:] != (2, ndim):
        raise PlanError(f"boxes of shape {shape} need a (k, 2, {ndim}) array, found {boxes.shape}")
    if any(n < 0 or n >= 2**63 for n in shape):
        raise PlanError(f"shape {shape} is not one of a tensor")
    extent = np.asarray(shape, dtype=np.int64)
    outside = _outside(boxes, extent)
    if outside.any():
        i = int(np.flatnonzero(outside)[0])
        offset, size = boxes[i].tolist()
        raise PlanError(f"box {i}, offset {offset}, size {size}, does not lie in shape {list(shape)}")
    if 0 in shape:
        return Cover(True, (), ())
    rows = np.flatnonzero((boxes[:, 1] > 0).all(axis=1))
    lo = boxes[rows, 0]
    hi = lo + boxes[rows, 1]
    if _exact(np.zeros(ndim, dtype=np.int64), extent, lo, hi):
        return Cover(True, (), ())
    search = _Search(boxes, limit)
    search.run(np.zeros(ndim, dtype=np.int64), extent, rows, lo, hi)
    return search.result()


def check_cover_ragged(shape_start: Int64Array, shape: Int64Array, chunk_start: Int64Array, coords: Int64Array) -> Int64Array:
    """The tensors whose boxes are not an exact cover, for all T tensors at once (``check_cover`` says where and why).

    A box outside its shape counts as a fault of its tensor.

    Args:
        shape_start: (T + 1,) start of each tensor's shape in ``shape``.
        shape: sizes end to end.
        chunk_start: (T + 1,) boxes of tensor t are ``chunk_start[t] .. chunk_start[t + 1]``.
        coords: flat coords column, per box ``ndim`` offsets, then ``ndim`` sizes.

    Returns:
        (m,) int64 tensor indices, ascending.
    """
    ndim = np.diff(shape_start)
    count = np.diff(chunk_start)
    at = coords_start(chunk_start, ndim)
    bad = np.zeros(len(ndim), dtype=np.bool_)
    for n in np.unique(ndim).tolist():
        tensors = np.flatnonzero(ndim == n)
        # Tensors in batches, so that memory is bounded by the corners of one batch (or of the largest tensor).
        weight = np.cumsum(count[tensors] + 1)
        first = 0
        while first < len(tensors):
            done = int(weight[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(weight, done + (_CORNERS >> 2), side="right")))
            batch = tensors[first:last]
            extents = shape[shape_start[batch][:, None] + np.arange(n, dtype=np.int64)].reshape(len(batch), n)
            boxes = gather_boxes(coords, at[batch], count[batch], n)
            bad[batch] = _inexact(extents, count[batch], boxes)
            first = last
    return np.flatnonzero(bad)


def _outside(boxes: Int64Array, extent: Int64Array) -> NDArray[np.bool_]:
    """Boxes that do not lie in their extent ((n,) or one row per box); written so that nothing overflows."""
    offset, size = boxes[:, 0], boxes[:, 1]
    wrong = (offset < 0) | (size < 0) | (size > extent) | (offset > extent - np.maximum(size, 0))
    return _any(wrong)


def _any(flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Per row, whether any flag is set."""
    out: NDArray[np.bool_] = np.any(flags, axis=1)
    return out


def _inexact(extents: Int64Array, count: Int64Array, boxes: Int64Array) -> NDArray[np.bool_]:
    """(t,) which tensors of one ndim are not covered exactly. ``extents`` (t, n), ``count`` boxes of each in ``boxes``."""
    t, n = extents.shape
    if n == 0:
        not_one: NDArray[np.bool_] = count != 1
        return not_one
    owner = np.repeat(np.arange(t, dtype=np.int64), count)
    outside = np.zeros(len(boxes), dtype=np.bool_)
    live = np.ones(len(boxes), dtype=np.bool_)
    lows, highs, pieces = [], [], []
    # Dim by dim on contiguous columns, which is several times faster than on (k, n).
    for d in range(n):
        lo, size, extent = boxes[:, 0, d], boxes[:, 1, d], np.repeat(extents[:, d], count)
        outside |= (lo < 0) | (size < 0) | (size > extent) | (lo > extent - np.maximum(size, 0))
        live &= size > 0
        lows.append(np.ascontiguousarray(lo))
        highs.append(lo + size)
        pieces.append(size != extent)  # inside, a box spans the dim if and only if it has its size
    bad = _any(extents < 0)
    bad[owner[outside]] = True
    todo = ~bad & ~_any(extents == 0)
    live &= np.repeat(todo, count)
    # Per tensor, the set of dims that some box does not span, as bits: corners are only made in those.
    cut = np.zeros(t, dtype=np.uint64)
    for d in range(n):
        in_dim = np.zeros(t, dtype=np.bool_)
        in_dim[owner[live & pieces[d]]] = True
        cut |= in_dim.astype(np.uint64) << np.uint64(d)
    cuts = np.unique(cut[todo]).tolist()
    for bits in cuts:
        mine = todo & (cut == bits)
        tensors = np.flatnonzero(mine)
        dims = [d for d in range(n) if bits >> d & 1]
        rows = live & np.repeat(mine, count)
        if rows.all():
            own, lo_, hi_ = owner, [lows[d] for d in dims], [highs[d] for d in dims]
        else:
            own, lo_, hi_ = owner[rows], [lows[d][rows] for d in dims], [highs[d][rows] for d in dims]
        if len(tensors) < t:
            own = (np.cumsum(mine) - 1)[own]
        bad[tensors] = _uncancelled(extents[tensors][:, dims], own, lo_, hi_)
    return bad


def _uncancelled(extents: Int64Array, owner: Int64Array, lo: list[Int64Array], hi: list[Int64Array]) -> NDArray[np.bool_]:
    """(t,) tensors whose signed corners do not cancel.

    Boxes ``[lo, hi)`` (one column (k,) per dim) are not empty, inside, and sorted by owner; ``extents`` (t, n).
    """
    t, n = extents.shape
    bad = np.zeros(t, dtype=np.bool_)
    boxes_of = np.bincount(owner, minlength=t)
    last_row = np.cumsum(boxes_of)
    first_row = last_row - boxes_of
    # Where every box is a piece of one dim, in order, neighbours simply have to meet: no sorting.
    if n == 1 and bool((boxes_of > 0).all()):
        meets = lo[0][1:] == hi[0][:-1]
        meets[first_row[1:] - 1] = True
        ends = bool((lo[0][first_row] == 0).all()) and bool((hi[0][last_row - 1] == extents[:, 0]).all())
        if ends and bool(meets.all()):
            return bad
    lattice = np.prod(extents.astype(np.float64) + 1, axis=1)
    big = (lattice > _FLAT_LIMIT / 4) | ((boxes_of + 1.0) * 2.0**n > np.maximum(16 * boxes_of, 4 * _CORNERS))
    for i in np.flatnonzero(big).tolist():
        rows = slice(int(first_row[i]), int(last_row[i]))
        box_lo, box_hi = (np.stack([column[rows] for column in columns], axis=1) for columns in (lo, hi))
        bad[i] = not _exact(np.zeros(n, dtype=np.int64), extents[i], box_lo, box_hi)
    small = np.flatnonzero(~big)
    # As many tensors at a time as share one key space and one bounded buffer.
    position = 0
    while position < len(small):
        points, corners, end = 0, 0, position
        if float(lattice[small[position:]].sum()) < _FLAT_LIMIT / 2 and (int(boxes_of[small[position:]].sum()) + t) << n <= _CORNERS:
            end = len(small)
        else:
            while end < len(small):
                more_points = math.prod(int(e) + 1 for e in extents[small[end]])
                more_corners = (int(boxes_of[small[end]]) + 1) << n
                if end > position and (points + more_points > _FLAT_LIMIT or corners + more_corners > _CORNERS):
                    break
                points, corners, end = points + more_points, corners + more_corners, end + 1
        chosen = small[position:end]
        bad[chosen] = _cancel(extents[chosen], boxes_of[chosen], first_row[chosen], lo, hi)
        position = end
    return bad


def _cancel(extents: Int64Array, count: Int64Array, first: Int64Array, lo: list[Int64Array], hi: list[Int64Array]) -> NDArray[np.bool_]:
    """``_uncancelled`` for tensors that share one key space: key = 2 * (lattice point, numbered through all tensors) + (sign < 0)."""
    t, n = extents.shape
    points = np.prod(extents + 1, axis=1, dtype=np.int64)
    base = np.cumsum(points) - points
    _, rows = ragged_arange(first, count)
    k = len(rows)
    # Corners are built by doubling: those of d + 1 dims are those of d dims moved to lo and to hi. The full box joins with opposite signs.
    keys = np.concatenate((np.repeat(2 * base, count), 2 * base + 1))[None]
    stride = np.full(t, 2, dtype=np.int64)
    for d in range(n - 1, -1, -1):
        step = np.repeat(stride, count)
        low, high = np.zeros(k + t, dtype=np.int64), np.empty(k + t, dtype=np.int64)
        np.multiply(lo[d][rows], step, out=low[:k])
        np.multiply(hi[d][rows], step, out=high[:k])
        high[k:] = extents[:, d] * stride
        # At hi the sign turns: the last bit is 0 or 1 and flips.
        keys = np.concatenate((keys + low, (keys ^ 1) + high))
        stride = stride * (extents[:, d] + 1)
    flat = keys.reshape(-1)
    flat.sort()
    point = flat >> 1
    group = np.flatnonzero(np.concatenate((np.ones(1, dtype=np.bool_), point[1:] != point[:-1])))
    sums = np.add.reduceat(1 - 2 * (flat & 1), group)
    faults = point[group[sums != 0]]
    bad = np.zeros(t, dtype=np.bool_)
    bad[np.searchsorted(base, faults, side="right") - 1] = True
    return bad


def _exact(lo: Int64Array, hi: Int64Array, box_lo: Int64Array, box_hi: Int64Array) -> bool:
    """True when non-empty boxes ``[box_lo, box_hi)`` (k, n), inside the region ``[lo, hi)`` (n,), cover it exactly once."""
    k = len(box_lo)
    dims = [d for d in range(len(lo)) if bool((box_lo[:, d] != lo[d]).any()) or bool((box_hi[:, d] != hi[d]).any())]
    if not dims or k < 2:
        return k == 1 and not dims
    # Corners are made dim by dim and brought together after each: in a grid all but the outer ones cancel at once, so that the number of
    # corners stays near k instead of growing by 2 with every dim. `label` numbers the distinct rests of a box (its other dims).
    lows = np.concatenate((box_lo[:, dims], lo[dims][None]))
    highs = np.concatenate((box_hi[:, dims], hi[dims][None]))
    sign = np.append(np.ones(k, dtype=np.int64), -1)
    label = np.zeros(k + 1, dtype=np.int64)
    for d in range(len(dims)):
        if len(lows) > max(16 * k, _FEW):
            return _exact_by_parts(lo, hi, box_lo, box_hi)
        values, rank = np.unique(np.concatenate((lows[:, d], highs[:, d])), return_inverse=True)
        m = len(lows)
        # (labels seen so far) x (coordinates): at most 2 * corners each, so the key fits.
        point = np.concatenate((label, label)) * len(values) + rank
        sign = np.concatenate((sign, -sign))
        _, label = np.unique(point, return_inverse=True)
        rest_lo, rest_hi = lows[:, d + 1 :], highs[:, d + 1 :]
        row = np.concatenate((np.arange(m), np.arange(m)))
        columns = [rest_hi[row, e] for e in range(rest_hi.shape[1])] + [rest_lo[row, e] for e in range(rest_lo.shape[1])] + [label]
        order = np.lexsort(tuple(columns))
        new = np.zeros(len(order), dtype=np.bool_)
        new[0] = True
        for column in columns:
            s = column[order]
            new[1:] |= s[1:] != s[:-1]
        first = np.flatnonzero(new)
        sums = np.add.reduceat(sign[order], first)
        keep = sums != 0
        at = order[first[keep]]
        if len(at) == 0:
            return True
        lows, highs, sign, label = lows[row[at]], highs[row[at]], sums[keep], label[at]
    return False


def _exact_by_parts(lo: Int64Array, hi: Int64Array, box_lo: Int64Array, box_hi: Int64Array) -> bool:
    """``_exact`` for boxes cut irregularly in so many dims that their corners are far more than the boxes.

    Boxes inside a region cover it exactly if and only if their volumes add up to its volume and no two share an element; regions of many
    boxes are bisected until all pairs can be compared. Raises UnsupportedError when that does not come to an end within the budget.
    """
    stack = [(lo, hi, np.arange(len(box_lo), dtype=np.int64), box_lo, box_hi)]
    for _ in range(_BUDGET):
        if not stack:
            return True
        lo, hi, rows, box_lo, box_hi = stack.pop()
        volume = math.prod((hi - lo).tolist())
        if int(np.prod((box_hi - box_lo).astype(object), axis=1).sum()) != volume:
            return False
        if len(rows) > _DIRECT:
            stack += _bisect(lo, hi, rows, box_lo, box_hi)
            continue
        for i in range(len(rows) - 1):
            if bool((np.minimum(box_hi[i], box_hi[i + 1 :]) > np.maximum(box_lo[i], box_lo[i + 1 :])).all(axis=1).any()):
                return False
    raise UnsupportedError(f"{len(box_lo)} boxes in {len(lo)} dims are cut too irregularly to check that they cover their tensor")


_Region = tuple[Int64Array, Int64Array, Int64Array, Int64Array, Int64Array]  # lo, hi, rows, and their boxes clipped to [lo, hi)


def _bisect(lo: Int64Array, hi: Int64Array, rows: Int64Array, box_lo: Int64Array, box_hi: Int64Array) -> list[_Region]:
    """The region cut at the middle boundary of the dim with the most boundaries inside it: upper half, lower half."""
    best: tuple[int, int, int] = (0, 0, 0)
    for d in range(len(lo)):
        values = np.unique(np.concatenate((box_lo[:, d], box_hi[:, d])))
        values = values[(values > lo[d]) & (values < hi[d])]
        if len(values) > best[0]:
            best = (len(values), d, int(values[len(values) // 2]))
    count, d, at = best
    assert count > 0, "a region that no box cuts has nothing to bisect"
    halves: list[_Region] = []
    for upper in (True, False):
        keep = box_hi[:, d] > at if upper else box_lo[:, d] < at
        part_lo, part_hi = box_lo[keep], box_hi[keep]
        region_lo, region_hi = lo.copy(), hi.copy()
        if upper:
            part_lo[:, d] = np.maximum(part_lo[:, d], at)
            region_lo[d] = at
        else:
            part_hi[:, d] = np.minimum(part_hi[:, d], at)
            region_hi[d] = at
        halves.append((region_lo, region_hi, rows[keep], part_lo, part_hi))
    return halves


@dataclass(slots=True)
class _Search:
    """Locates holes and overlaps of one tensor whose boxes are known not to be an exact cover."""

    boxes: Int64Array
    limit: int
    holes: list[Box] = field(default_factory=list)
    overlaps: dict[tuple[int, int], Box] = field(default_factory=dict)
    complete: bool = True

    def run(self, lo: Int64Array, hi: Int64Array, rows: Int64Array, box_lo: Int64Array, box_hi: Int64Array) -> None:
        """Search the region ``[lo, hi)``; ``box_lo``, ``box_hi`` are the boxes ``rows`` clipped to it."""
        # `solid`: a box that spans the region was taken out, so that it has no hole, but the other boxes may overlap.
        stack = [(False, (lo, hi, rows, box_lo, box_hi))]
        regions = 0
        while stack:
            solid, (lo, hi, rows, box_lo, box_hi) = stack.pop()
            regions += 1
            # More holes than asked for are kept until neighbours have been joined.
            more_holes = len(self.holes) < 4 * self.limit
            more_overlaps = len(self.overlaps) < self.limit
            if not (more_holes or more_overlaps) or regions > _BUDGET:
                self.complete = False
                return
            if len(rows) == 0:
                if not solid and more_holes:
                    self.holes.append(_region(lo, hi))
                elif not solid:
                    self.complete = False
                continue
            spans = ~_any((box_lo > lo) | (box_hi < hi))
            if solid or spans.any():
                if len(rows) == 1:
                    continue
                if not more_overlaps:
                    self.complete = False
                    continue
            if spans.any():
                # All others overlap the box that spans the region; they may overlap among themselves too.
                full = int(np.flatnonzero(spans)[0])
                keep = np.delete(np.arange(len(rows)), full)
                self._pairs(int(rows[full]), rows[keep])
                stack.append((True, (lo, hi, rows[keep], box_lo[keep], box_hi[keep])))
                continue
            if not more_overlaps:
                # Only holes are still wanted, and equal boxes make no difference to those.
                self.complete = False
                _, unique = np.unique(np.concatenate((box_lo, box_hi), axis=1), axis=0, return_index=True)
                rows, box_lo, box_hi = rows[unique], box_lo[unique], box_hi[unique]
            if _exact(lo, hi, box_lo, box_hi):
                continue
            if not more_holes and not solid:
                self.complete = False
            stack += [(solid, half) for half in _bisect(lo, hi, rows, box_lo, box_hi)]

    def _pairs(self, row: int, others: Int64Array) -> None:
        for other in others.tolist():
            i, j = min(row, other), max(row, other)
            if (i, j) in self.overlaps:
                continue
            if len(self.overlaps) >= self.limit:
                self.complete = False
                return
            pair = array_to_boxes(self.boxes[[i, j]])
            shared = pair[0].intersect(pair[1])
            assert shared is not None
            self.overlaps[(i, j)] = shared

    def result(self) -> Cover:
        """The faults found, holes joined where they make one box."""
        holes = _joined(self.holes)
        complete = self.complete and len(holes) <= self.limit
        overlaps = sorted((i, j, box) for (i, j), box in self.overlaps.items())
        return Cover(False, tuple(holes[: self.limit]), tuple(overlaps), complete)


def _region(lo: Int64Array, hi: Int64Array) -> Box:
    return Box(tuple(lo.tolist()), tuple((hi - lo).tolist()))


def _joined(boxes: list[Box]) -> list[Box]:
    """Disjoint boxes, joined pairwise while two of them make a box."""
    boxes = sorted(boxes)
    again = True
    while again:
        again = False
        for i, a in enumerate(boxes):
            for j in range(i + 1, len(boxes)):
                union = _union(a, boxes[j])
                if union is not None:
                    boxes[i] = union
                    del boxes[j]
                    boxes.sort()
                    again = True
                    break
            if again:
                break
    return boxes


def _union(a: Box, b: Box) -> Box | None:
    differ = [d for d in range(a.ndim) if (a.offset[d], a.size[d]) != (b.offset[d], b.size[d])]
    if len(differ) != 1:
        return None
    d = differ[0]
    if a.stop[d] == b.offset[d]:
        first = a
    elif b.stop[d] == a.offset[d]:
        first = b
    else:
        return None
    size = list(first.size)
    size[d] = a.size[d] + b.size[d]
    return Box(first.offset, tuple(size))
