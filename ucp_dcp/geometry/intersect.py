"""Intersections of many boxes with many boxes, of one tensor or of all tensors at once.

Small or lopsided cases are compared directly. The others are joined dim by dim: the boxes of each side form a tree whose level-d
nodes are the distinct intervals in the d-th dim below one parent; pairs of nodes that overlap are joined with interval searches and only
their children are looked at. For grids of any kind (Shard, flat partitions, their products) the work is proportional to the boxes and
the pairs found; the dim that separates the boxes best comes first, so a dim that is not cut costs nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .box import Box, Int64Array
from .ragged import coords_start, gather_boxes, ragged_arange

__all__ = ["RaggedPairs", "intersect_one", "intersect_pairs", "intersect_ragged"]

_DIRECT = 4096  # pairs below which comparing all of them beats building trees
_DIRECT_RAGGED = 256.0  # the same for one of many tensors
_DIRECT_FACTOR = 4.0  # pairs per box below which comparing all is linear work anyway
_BLOCK = 1 << 20  # candidate pairs compared at a time


class RaggedPairs(NamedTuple):
    """Intersecting pairs of all tensors, sorted by (tensor, want, have).

    Attributes:
        tensor: (m,) tensor index of each pair.
        want: (m,) row in the wanted boxes (global, as ``want_start`` counts).
        have: (m,) row in the stored boxes (global, as ``have_start`` counts).
        start: (m + 1,) where each pair's box starts in ``coords``.
        coords: flat coords of the intersections: per pair ``ndim`` offsets, then ``ndim`` sizes, in the tensor's coordinates.
    """

    tensor: Int64Array
    want: Int64Array
    have: Int64Array
    start: Int64Array
    coords: Int64Array


def intersect_one(boxes: Int64Array, box: Box) -> tuple[Int64Array, Int64Array]:
    """Which of ``boxes`` (k, 2, n) share elements with ``box``: ``(idx (m,), intersections (m, 2, n))``, in the order of ``boxes``."""
    lo = np.maximum(boxes[:, 0], np.asarray(box.offset, dtype=np.int64))
    size = np.minimum(boxes[:, 0] + boxes[:, 1], np.asarray(box.stop, dtype=np.int64)) - lo
    idx = np.flatnonzero((size > 0).all(axis=1))
    return idx, np.stack((lo[idx], size[idx]), axis=1)


def intersect_pairs(a: Int64Array, b: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """All pairs of a box of ``a`` (k, 2, n) and a box of ``b`` (l, 2, n) that share elements, sorted by (row of a, row of b).

    Returns:
        ``(ia (m,), ib (m,), intersections (m, 2, n))``; empty boxes intersect nothing; 0-d boxes all intersect.
    """
    if len(a) * len(b) <= _DIRECT:
        ia, ib = np.divmod(np.arange(len(a) * len(b), dtype=np.int64), max(1, len(b)))
    else:
        ia, ib = _join(np.zeros(len(a), dtype=np.int64), a, np.zeros(len(b), dtype=np.int64), b)
    ia, ib, out = _meet(a, b, ia, ib)
    return ia, ib, out


def intersect_ragged(
    want_start: Int64Array,
    want_coords: Int64Array,
    have_start: Int64Array,
    have_coords: Int64Array,
    ndim_of_tensor: NDArray[np.integer],
) -> RaggedPairs:
    """All pairs of a wanted and a stored box of the same tensor that share elements, for all T tensors at once.

    Args:
        want_start: (T + 1,) wanted boxes of tensor t are rows ``want_start[t] .. want_start[t + 1]``; none for a tensor not wanted.
        want_coords: their flat coords, per box offsets then sizes.
        have_start, have_coords: the same of the stored chunks (``tensor.chunk_start`` and ``chunk.coords`` of a catalog).
        ndim_of_tensor: (T,) dims of each tensor.
    """
    ndim = np.asarray(ndim_of_tensor, dtype=np.int64)
    want_start = np.asarray(want_start, dtype=np.int64)
    have_start = np.asarray(have_start, dtype=np.int64)
    want_at, have_at = coords_start(want_start, ndim), coords_start(have_start, ndim)
    want_count, have_count = np.diff(want_start), np.diff(have_start)
    both = (want_count > 0) & (have_count > 0)
    product = want_count.astype(np.float64) * have_count
    direct = product <= np.maximum(_DIRECT_FACTOR * (want_count + have_count), _DIRECT_RAGGED)
    parts: list[tuple[int, Int64Array, Int64Array, Int64Array, Int64Array]] = []
    for n in np.unique(ndim[both]).tolist():
        for straight in (True, False):
            tensors = np.flatnonzero(both & (ndim == n) & (direct == straight))
            if len(tensors) == 0:
                continue
            wc, hc = want_count[tensors], have_count[tensors]
            a = gather_boxes(want_coords, want_at[tensors], wc, n)
            b = gather_boxes(have_coords, have_at[tensors], hc, n)
            owner_a, row_a = ragged_arange(want_start[tensors], wc)
            owner_b, row_b = ragged_arange(have_start[tensors], hc)
            if straight:
                ia, ib, out = _all_pairs(a, owner_a, b, hc)
            else:
                ia, ib = _join(owner_a, a, owner_b, b)
                ia, ib, out = _meet(a, b, ia, ib)
            parts.append((n, tensors[owner_a[ia]], row_a[ia], row_b[ib], out))
    return _merge(parts)


def _merge(parts: list[tuple[int, Int64Array, Int64Array, Int64Array, Int64Array]]) -> RaggedPairs:
    """Pairs of several ndims, in one order."""
    if not parts:
        none = np.zeros(0, dtype=np.int64)
        return RaggedPairs(none, none, none, np.zeros(1, dtype=np.int64), none)
    tensor = np.concatenate([p[1] for p in parts])
    want = np.concatenate([p[2] for p in parts])
    have = np.concatenate([p[3] for p in parts])
    width = np.concatenate([np.full(len(p[1]), 2 * p[0], dtype=np.int64) for p in parts])
    coords = np.concatenate([p[4].reshape(-1) for p in parts])
    start = np.zeros(len(tensor) + 1, dtype=np.int64)
    np.cumsum(width, out=start[1:])
    if len(parts) > 1:
        # Within a part the rows are sorted, and a tensor is in one part only.
        order = np.argsort(tensor, kind="stable")
        _, at = ragged_arange(start[:-1][order], width[order])
        tensor, want, have, coords = tensor[order], want[order], have[order], coords[at]
        np.cumsum(width[order], out=start[1:])
    return RaggedPairs(tensor, want, have, start, coords)


def _meet(a: Int64Array, b: Int64Array, ia: Int64Array, ib: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Of candidate pairs those that share elements, and their intersections."""
    n = a.shape[2]
    keep: NDArray[np.bool_] | None = None
    for d in range(n):
        lo_a, lo_b = a[:, 0, d], b[:, 0, d]
        hi_a, hi_b = lo_a + a[:, 1, d], lo_b + b[:, 1, d]
        hit = np.minimum(hi_a[ia], hi_b[ib]) > np.maximum(lo_a[ia], lo_b[ib])
        keep = hit if keep is None else keep & hit
    if keep is not None and not keep.all():
        ia, ib = ia[keep], ib[keep]
    out = np.empty((len(ia), 2, n), dtype=np.int64)
    aa, bb = a[ia], b[ib]
    np.maximum(aa[:, 0], bb[:, 0], out=out[:, 0])
    np.minimum(aa[:, 0] + aa[:, 1], bb[:, 0] + bb[:, 1], out=out[:, 1])
    out[:, 1] -= out[:, 0]
    return ia, ib, out


def _all_pairs(a: Int64Array, owner_a: Int64Array, b: Int64Array, b_count: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Every box of a with every box of b of the same owner, compared in blocks. ``b`` is sorted by owner, ``b_count`` per owner."""
    b_start = np.cumsum(b_count) - b_count
    count = b_count[owner_a]
    total = np.cumsum(count)
    got: list[tuple[Int64Array, Int64Array, Int64Array]] = []
    first = 0
    while first < len(a):
        done = int(total[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(total, done + _BLOCK, side="right")))
        owner, ib = ragged_arange(b_start[owner_a[first:last]], count[first:last])
        got.append(_meet(a, b, owner + first, ib))
        first = last
    if len(got) == 1:
        return got[0]
    return np.concatenate([g[0] for g in got]), np.concatenate([g[1] for g in got]), np.concatenate([g[2] for g in got])


class _Level(NamedTuple):
    """One level of a tree of intervals. Children of a parent are sorted by (lo, hi)."""

    first: Int64Array  # (parents + 1,) first child of each parent
    lo: Int64Array  # (children,)
    hi: Int64Array
    disjoint: NDArray[np.bool_]  # (parents,) no two children of the parent overlap


def _join(group_a: Int64Array, a: Int64Array, group_b: Int64Array, b: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Pairs (row of a, row of b) of one group whose boxes share elements, sorted. Groups are small integers."""
    live_a = np.flatnonzero((a[:, 1] > 0).all(axis=1))
    live_b = np.flatnonzero((b[:, 1] > 0).all(axis=1))
    group_a, a, group_b, b = group_a[live_a], a[live_a], group_b[live_b], b[live_b]
    dims = _order_of_dims(group_a, a, group_b, b)
    root_a, levels_a, first_a, perm_a = _tree(group_a, a, dims)
    root_b, levels_b, first_b, perm_b = _tree(group_b, b, dims)
    _, pa, pb = np.intersect1d(root_a, root_b, assume_unique=True, return_indices=True)
    pa, pb = pa.astype(np.int64), pb.astype(np.int64)
    for level_a, level_b in zip(levels_a, levels_b, strict=True):
        pa, pb = _join_level(level_a, level_b, pa, pb)
    # Leaves hold the boxes that are equal in all dims.
    count_a, count_b = np.diff(first_a)[pa], np.diff(first_b)[pb]
    owner, k = ragged_arange(np.zeros(len(pa), dtype=np.int64), count_a * count_b)
    ka, kb = np.divmod(k, count_b[owner])
    ia = live_a[perm_a[first_a[pa][owner] + ka]]
    ib = live_b[perm_b[first_b[pb][owner] + kb]]
    order = np.lexsort((ib, ia))
    return ia[order], ib[order]


def _order_of_dims(group_a: Int64Array, a: Int64Array, group_b: Int64Array, b: Int64Array) -> list[int]:
    """The dims, the one in which the fewest pairs of intervals overlap first: it is the dim that is really cut."""
    n = a.shape[2]
    if n < 2 or not len(a) or not len(b):
        return list(range(n))
    counts = []
    for d in range(n):
        lo_a, lo_b = a[:, 0, d], b[:, 0, d]
        hi_a, hi_b = lo_a + a[:, 1, d], lo_b + b[:, 1, d]
        values = np.unique(np.concatenate((lo_a, hi_a, lo_b, hi_b)))
        scale = len(values) + 1
        key_lo = np.sort(group_b * scale + np.searchsorted(values, lo_b))
        key_hi = np.sort(group_b * scale + np.searchsorted(values, hi_b))
        below = np.searchsorted(key_lo, group_a * scale + np.searchsorted(values, hi_a), side="left")
        past = np.searchsorted(key_hi, group_a * scale + np.searchsorted(values, lo_a), side="right")
        counts.append(int((below - past).sum()))
    return sorted(range(n), key=lambda d: counts[d])


def _tree(group: Int64Array, boxes: Int64Array, dims: list[int]) -> tuple[Int64Array, list[_Level], Int64Array, Int64Array]:
    """``(group of each root, levels, first row of each leaf, rows in tree order)``."""
    columns: list[Int64Array] = [group]
    for d in dims:
        columns += [boxes[:, 0, d], boxes[:, 0, d] + boxes[:, 1, d]]
    perm = np.lexsort(tuple(reversed(columns)))
    k = len(perm)
    new = np.ones(k, dtype=np.bool_)
    sorted_group = group[perm]
    new[1:] = sorted_group[1:] != sorted_group[:-1]
    node_first = np.flatnonzero(new)
    roots = sorted_group[node_first]
    levels = []
    for i in range(len(dims)):
        lo, hi = columns[1 + 2 * i][perm], columns[2 + 2 * i][perm]
        parent_first = node_first
        new[1:] |= (lo[1:] != lo[:-1]) | (hi[1:] != hi[:-1])
        node_first = np.flatnonzero(new)
        first = np.append(np.searchsorted(node_first, parent_first), len(node_first))
        clo, chi = lo[node_first], hi[node_first]
        touching = np.zeros(len(node_first), dtype=np.bool_)
        touching[1:] = clo[1:] < chi[:-1]
        touching[first[:-1]] = False
        # A child that starts before the one before it ends: sorted by lo, any overlap among siblings shows between some neighbours.
        disjoint = np.add.reduceat(touching, first[:-1], dtype=np.int64) == 0 if len(parent_first) else np.zeros(0, dtype=np.bool_)
        levels.append(_Level(first, clo, chi, disjoint))
    return roots, levels, np.append(node_first, k), perm


def _join_level(a: _Level, b: _Level, pa: Int64Array, pb: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Pairs of children, of given pairs of parents, whose intervals overlap."""
    values = np.unique(np.concatenate((a.lo, a.hi, b.lo, b.hi)))
    count_a, count_b = np.diff(a.first)[pa], np.diff(b.first)[pb]
    # With disjoint children on the longer side, searching them for each child of the shorter side suffices; otherwise both sides search
    # for children of the other that *start* inside them: then every overlapping pair is found exactly once, whatever overlaps.
    by_a = (count_a <= count_b) & b.disjoint[pb]
    by_b = ~by_a & (count_b <= count_a) & a.disjoint[pa]
    both = ~by_a & ~by_b
    ja1, jb1 = _search(a, b, pa[by_a], pb[by_a], values, overlapping=True, inclusive=True)
    jb2, ja2 = _search(b, a, pb[by_b], pa[by_b], values, overlapping=True, inclusive=True)
    ja3, jb3 = _search(a, b, pa[both], pb[both], values, overlapping=False, inclusive=True)
    jb4, ja4 = _search(b, a, pb[both], pa[both], values, overlapping=False, inclusive=False)
    return np.concatenate((ja1, ja2, ja3, ja4)), np.concatenate((jb1, jb2, jb3, jb4))


def _search(
    a: _Level, b: _Level, pa: Int64Array, pb: Int64Array, values: Int64Array, *, overlapping: bool, inclusive: bool
) -> tuple[Int64Array, Int64Array]:
    """For each child x of ``pa`` the children y of ``pb`` that start in x (``inclusive``: also where x starts), or (``overlapping``,
    children of ``pb`` disjoint) all that overlap x."""
    if len(pa) == 0:
        none = np.zeros(0, dtype=np.int64)
        return none, none
    owner, ja = ragged_arange(a.first[pa], np.diff(a.first)[pa])
    scale = len(values) + 1
    parent_b = np.repeat(np.arange(len(b.first) - 1, dtype=np.int64), np.diff(b.first))
    key = parent_b * scale + np.searchsorted(values, b.lo)
    base = pb[owner] * scale
    lo = np.searchsorted(values, a.lo)[ja]
    hi = np.searchsorted(values, a.hi)[ja]
    begin = np.searchsorted(key, base + lo, side="left" if inclusive else "right")
    end = np.searchsorted(key, base + hi, side="left")
    if overlapping:
        before = begin - 1
        reaches = before >= b.first[pb[owner]]
        reaches &= b.hi[np.maximum(before, 0)] > a.lo[ja]
        begin = begin - reaches
    row, jb = ragged_arange(begin, np.maximum(end - begin, 0))
    return ja[row], jb
