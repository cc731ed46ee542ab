"""Intersections of many boxes with many."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import ucp_dcp.geometry.intersect as module
from ucp_dcp.geometry import Box, array_to_boxes, boxes_to_array, flat_range_to_boxes, intersect_one, intersect_pairs, intersect_ragged

from .naive import boxes_in, grid, shapes


def by_hand(a: list[Box], b: list[Box]) -> list[tuple[int, int, Box]]:
    return [(i, j, shared) for i, x in enumerate(a) for j, y in enumerate(b) if (shared := x.intersect(y)) is not None]


def pairs(a: NDArray[np.int64], b: NDArray[np.int64]) -> list[tuple[int, int, Box]]:
    ia, ib, out = intersect_pairs(a, b)
    return list(zip(ia.tolist(), ib.tolist(), array_to_boxes(out), strict=True))


@given(st.data(), shapes)
@settings(max_examples=100, deadline=None)
def test_one(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes, box = data.draw(st.lists(boxes_in(shape), max_size=6)), data.draw(boxes_in(shape))
    idx, out = intersect_one(boxes_to_array(boxes, len(shape)), box)
    found = list(zip(idx.tolist(), array_to_boxes(out), strict=True))
    assert found == [(i, shared) for i, _, shared in by_hand(boxes, [box])]


@pytest.mark.parametrize("direct", [0, 4096])
@given(data=st.data(), shape=shapes)
@settings(max_examples=150, deadline=None)
def test_pairs(direct: int, data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Direct comparison and the join of trees (which small inputs would not reach) both find what two loops find."""
    a = data.draw(st.lists(boxes_in(shape), max_size=8))
    b = data.draw(st.lists(boxes_in(shape), max_size=8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_DIRECT", direct - 1)
        assert pairs(boxes_to_array(a, len(shape)), boxes_to_array(b, len(shape))) == by_hand(a, b)


@pytest.mark.parametrize("straight", [True, False])
@given(data=st.data(), tensors=st.lists(shapes, max_size=5))
@settings(max_examples=100, deadline=None)
def test_ragged_is_pairs_per_tensor(straight: bool, data: st.DataObject, tensors: list[tuple[int, ...]]) -> None:
    want = [data.draw(st.lists(boxes_in(shape), max_size=4)) for shape in tensors]
    have = [data.draw(st.lists(boxes_in(shape), max_size=4)) for shape in tensors]

    def columns(boxes: list[list[Box]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        start = np.cumsum([0, *[len(b) for b in boxes]])
        flat = [boxes_to_array(b, len(shape)).reshape(-1) for b, shape in zip(boxes, tensors, strict=True)]
        return start.astype(np.int64), np.concatenate([*flat, np.empty(0, dtype=np.int64)])

    want_start, want_coords = columns(want)
    have_start, have_coords = columns(have)
    with pytest.MonkeyPatch.context() as patch:
        if not straight:
            patch.setattr(module, "_DIRECT_RAGGED", -1.0)
            patch.setattr(module, "_DIRECT_FACTOR", -1.0)
        got = intersect_ragged(want_start, want_coords, have_start, have_coords, np.array([len(s) for s in tensors], dtype=np.int64))
    found = []
    for i, (first, last) in enumerate(pairwise(got.start.tolist())):
        offset, size = got.coords[first:last].reshape(2, -1).tolist()
        found.append((int(got.tensor[i]), int(got.want[i]), int(got.have[i]), Box(tuple(offset), tuple(size))))
    expected = []
    for t in range(len(tensors)):
        expected += [(t, i + want_start[t], j + have_start[t], box) for i, j, box in by_hand(want[t], have[t])]
    assert found == expected


def best_of(n: int, action: object) -> float:
    times = []
    for _ in range(n):
        start = time.perf_counter()
        action()  # type: ignore[operator]
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize(
    ("shape", "a", "b"),
    [
        ((16384, 16384), (1, 4096), (1, 4096)),
        ((16384, 16384), (4096, 1), (1, 64)),
        ((64, 100000), (64, 1), (1, 2048)),
        ((128, 128, 128), (16, 16, 16), (16, 16, 16)),
        ((1024, 1024), (100, 100), (64, 64)),
    ],
)
def test_pairs_of_grids_are_not_quadratic(shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """All of them take well under 0.1 s; a quadratic sweep of the last takes 40 million comparisons."""
    left, right = grid(shape, a), grid(shape, b)
    ia, ib, out = intersect_pairs(left, right)
    assert int(np.prod(out[:, 1], axis=1).sum()) == int(np.prod(shape))
    assert len(np.unique(ia * len(right) + ib)) == len(ia)
    assert best_of(3, lambda: intersect_pairs(left, right)) < 1.0


def test_rows_against_columns_stay_linear() -> None:
    """Rows in one half and columns in the other: no dim separates the boxes, so any single sweep compares each row with each column."""
    n = 4000
    rows = np.zeros((n, 2, 2), dtype=np.int64)
    rows[:, 0, 0], rows[:, 1, 0], rows[:, 1, 1] = np.arange(n), 1, n
    columns = np.zeros((n, 2, 2), dtype=np.int64)
    columns[:, 0, 1], columns[:, 1, 1], columns[:, 1, 0] = np.arange(n) + n, 1, n
    boxes = np.concatenate((rows, columns))
    ia, ib, _ = intersect_pairs(boxes, boxes)
    assert ia.tolist() == ib.tolist() == list(range(2 * n))
    assert best_of(2, lambda: intersect_pairs(boxes, boxes)) < 1.0


def test_flat_partitions_against_shards() -> None:
    shape = (1000, 777)
    flat = [box for r in range(500) for box in flat_range_to_boxes(shape, r * 1554, (r + 1) * 1554)]
    odd = [box for lo in range(0, 777000, 1313) for box in flat_range_to_boxes(shape, lo, min(lo + 1313, 777000))]
    _, _, out = intersect_pairs(boxes_to_array(flat, 2), boxes_to_array(odd, 2))
    assert int(np.prod(out[:, 1], axis=1).sum()) == 777000


def test_far_beyond_32_bits() -> None:
    huge = 2**61
    a = np.array([[[0, 0], [huge, 3]], [[huge, 0], [huge, 3]]], dtype=np.int64)
    b = np.array([[[huge - 1, 1], [2, 1]]], dtype=np.int64)
    assert pairs(a, b) == [(0, 0, Box((huge - 1, 1), (1, 1))), (1, 0, Box((huge, 1), (1, 1)))]
