"""Exact coverage: holes and overlaps are found and located."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import ucp_dcp.geometry.cover as module
from ucp_dcp.errors import PlanError
from ucp_dcp.geometry import Box, array_to_boxes, boxes_to_array, check_cover, check_cover_ragged, flat_range_to_boxes

from .naive import boxes_in, grid, marks, shapes, solid_shapes, tilings

LOTS = 1000


def check_against_marks(shape: tuple[int, ...], boxes: list[Box]) -> None:
    cover = check_cover(shape, boxes_to_array(boxes, len(shape)), limit=LOTS)
    count = marks(shape, boxes)
    assert cover.ok == bool((count == 1).all())
    assert cover.complete
    # Holes: exactly the elements of no box, each once.
    np.testing.assert_array_equal(marks(shape, list(cover.holes)), (count == 0).astype(np.int64))
    pairs = [(i, j, shared) for i, a in enumerate(boxes) for j, b in enumerate(boxes) if i < j and (shared := a.intersect(b)) is not None]
    assert list(cover.overlaps) == pairs
    # Whatever the limit: the same verdict, and at least one fault of those there are.
    few = check_cover(shape, boxes_to_array(boxes, len(shape)), limit=1)
    assert few.ok == cover.ok and len(few.holes) <= 1 and len(few.overlaps) <= 1
    if not few.ok:
        assert few.holes or few.overlaps
        assert {(i, j) for i, j, _ in few.overlaps} <= {(i, j) for i, j, _ in pairs}


@given(st.data(), shapes)
@settings(max_examples=200, deadline=None)
def test_any_boxes(data: st.DataObject, shape: tuple[int, ...]) -> None:
    check_against_marks(shape, data.draw(st.lists(boxes_in(shape), max_size=7)))


@given(st.data(), solid_shapes)
@settings(max_examples=200, deadline=None)
def test_broken_tilings(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """A tiling is exact; without one of its boxes, with one twice, or with one moved or grown it is not."""
    boxes = data.draw(tilings(shape))
    boxes += data.draw(st.lists(boxes_in(shape).filter(lambda box: box.empty), max_size=2)) if shape else []
    check_against_marks(shape, boxes)
    assert check_cover(shape, boxes_to_array(boxes, len(shape))).ok
    i = data.draw(st.integers(0, len(boxes) - 1))
    how = data.draw(st.sampled_from(["missing", "twice", "other"]))
    if how == "missing":
        broken = boxes[:i] + boxes[i + 1 :]
    elif how == "twice":
        broken = [*boxes, boxes[i]]
    else:
        broken = [*boxes[:i], data.draw(boxes_in(shape)), *boxes[i + 1 :]]
    check_against_marks(shape, broken)


def test_equal_volumes_are_not_a_cover() -> None:
    cover = check_cover((4, 4), boxes_to_array([Box((0, 0), (2, 4)), Box((1, 0), (2, 4))], 2))
    assert cover.holes == (Box((3, 0), (1, 4)),)
    assert cover.overlaps == ((0, 1, Box((1, 0), (1, 4))),)


def test_scalars_and_tensors_without_elements() -> None:
    one, none = np.zeros((1, 2, 0), dtype=np.int64), np.zeros((0, 2, 0), dtype=np.int64)
    assert check_cover((), one).ok
    assert check_cover((), none).holes == (Box((), ()),)
    assert check_cover((), np.concatenate((one, one))).overlaps == ((0, 1, Box((), ())),)
    assert check_cover((3, 0), np.zeros((0, 2, 2), dtype=np.int64)).ok
    assert check_cover((3, 0), boxes_to_array([Box((1, 0), (2, 0))] * 3, 2)).ok


@pytest.mark.parametrize("box", [[[0], [5]], [[-1], [2]], [[3], [2]], [[0], [-1]], [[2**62], [2**62]], [[1], [2**63 - 1]]])
def test_box_outside(box: list[list[int]]) -> None:
    with pytest.raises(PlanError, match="box 1"):
        check_cover((4,), np.array([[[0], [4]], box], dtype=np.int64))
    start = np.array([0, 1], dtype=np.int64)
    assert check_cover_ragged(start, np.array([4]), start, np.array(box, dtype=np.int64).reshape(-1)).tolist() == [0]


def test_wrong_input() -> None:
    with pytest.raises(PlanError, match=r"\(k, 2, 2\)"):
        check_cover((2, 2), np.zeros((1, 2, 1), dtype=np.int64))
    with pytest.raises(PlanError, match="not one of a tensor"):
        check_cover((-1,), np.zeros((1, 2, 1), dtype=np.int64))


def test_shapes_whose_elements_no_integer_counts() -> None:
    shape = (2**40, 2**40)
    boxes = grid(shape, (4, 8))
    assert check_cover(shape, boxes).ok
    cover = check_cover(shape, np.delete(boxes, 13, axis=0))
    assert cover.holes == tuple(array_to_boxes(boxes[13:14])) and cover.complete
    start = np.array([0, len(boxes)])
    assert check_cover_ragged(np.array([0, 2]), np.array(shape), start, boxes.reshape(-1)).tolist() == []
    boxes[13, 1, 0] -= 1
    assert check_cover_ragged(np.array([0, 2]), np.array(shape), start, boxes.reshape(-1)).tolist() == [0]


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((16384, 16384), (1, 4096)),
        ((64, 100000), (64, 1)),
        ((64, 100000), (1, 2048)),
        ((4096, 4096), (64, 64)),
        ((64, 64, 64), (16, 16, 16)),
    ],
)
def test_grids_take_milliseconds(shape: tuple[int, ...], parts: tuple[int, ...]) -> None:
    """What a quadratic check needs seconds for. The limit is loose: the machine may be busy."""
    boxes = grid(shape, parts)
    np.random.default_rng(0).shuffle(boxes)
    assert check_cover(shape, boxes).ok
    times = []
    for _ in range(5):
        start = time.perf_counter()
        check_cover(shape, boxes)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.1
    hole = len(boxes) // 3
    cover = check_cover(shape, np.delete(boxes, hole, axis=0))
    assert cover.holes == tuple(array_to_boxes(boxes[hole : hole + 1])) and not cover.overlaps and cover.complete
    twice = check_cover(shape, np.concatenate((boxes, boxes[hole : hole + 1])))
    assert twice.overlaps == ((hole, len(boxes), array_to_boxes(boxes[hole : hole + 1])[0]),) and not twice.holes and twice.complete


def test_2048_flat_partitions() -> None:
    shape = (64, 100000)
    boxes = [box for r in range(2048) for box in flat_range_to_boxes(shape, r * 3125, (r + 1) * 3125)]
    assert check_cover(shape, boxes_to_array(boxes, 2)).ok
    assert check_cover(shape, boxes_to_array(boxes[1:], 2)).holes == (boxes[0],)


def test_hostile_overlaps_come_to_an_end() -> None:
    """All rows and all columns: every row meets every column, a million crossings; only a few are asked for."""
    n = 1000
    rows = grid((n, n), (n, 1))
    columns = grid((n, n), (1, n))
    start = time.perf_counter()
    cover = check_cover((n, n), np.concatenate((rows, columns)))
    assert time.perf_counter() - start < 60
    assert not cover.ok and len(cover.overlaps) == 8 and not cover.holes and not cover.complete
    assert all(i < n <= j for i, j, _ in cover.overlaps)
    same = check_cover((n, n), np.repeat(grid((n, n), (1, 1)), 5000, axis=0))
    assert not same.ok and len(same.overlaps) == 8


def test_many_dims() -> None:
    """20 dims, each cut in two: 2**20 corners per box would be 2**40, so corners must cancel on the way or be avoided."""
    shape = (2,) * 12
    boxes = grid(shape, shape)
    assert check_cover(shape, boxes).ok
    assert not check_cover(shape, boxes[1:]).ok
    ragged = (np.array([0, 12]), np.array(shape), np.array([0, len(boxes)]), boxes.reshape(-1))
    assert check_cover_ragged(*ragged).tolist() == []
    wide = (3,) * 30
    two = boxes_to_array([Box((0,) * 30, (1, *wide[1:])), Box((1, *(0,) * 29), (2, *wide[1:]))], 30)
    assert check_cover(wide, two).ok
    hostile = np.zeros((50, 2, 30), dtype=np.int64)
    hostile[:, 1] = 1 + np.random.default_rng(0).integers(0, 2, (50, 30))
    assert check_cover_ragged(np.array([0, 30]), np.array(wide), np.array([0, 50]), hostile.reshape(-1)).tolist() == [0]


@given(st.data(), solid_shapes)
@settings(max_examples=60, deadline=None)
def test_by_parts_agrees(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """The way out for boxes with too many corners gives the same verdict."""
    boxes = data.draw(tilings(shape))
    if data.draw(st.booleans()):
        boxes[0] = data.draw(boxes_in(shape))
    array = boxes_to_array([box for box in boxes if not box.empty], len(shape))
    lo, hi = np.zeros(len(shape), dtype=np.int64), np.array(shape, dtype=np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_DIRECT", 2)
        found = module._exact_by_parts(lo, hi, array[:, 0], array[:, 0] + array[:, 1])
    assert found == bool((marks(shape, boxes) == 1).all())


def ragged(tensors: list[tuple[tuple[int, ...], list[Box]]]) -> tuple[NDArray[np.int64], ...]:
    return (
        np.cumsum([0, *[len(shape) for shape, _ in tensors]]),
        np.array([n for shape, _ in tensors for n in shape], dtype=np.int64),
        np.cumsum([0, *[len(boxes) for _, boxes in tensors]]),
        np.concatenate([*[boxes_to_array(boxes, len(shape)).reshape(-1) for shape, boxes in tensors], np.empty(0, dtype=np.int64)]),
    )


@pytest.mark.parametrize("small", [False, True])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_ragged_agrees_with_marks(small: bool, data: st.DataObject) -> None:
    """Mixed numbers of dims, exact and broken tensors side by side; ``small``: tiny batches, so that batches are many."""
    tensors = []
    for shape in data.draw(st.lists(shapes, max_size=6)):
        boxes = data.draw(tilings(shape) if 0 not in shape and data.draw(st.booleans()) else st.lists(boxes_in(shape), max_size=5))
        if data.draw(st.booleans()):
            boxes = sorted(boxes)
        tensors.append((shape, boxes))
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(module, "_CORNERS", 32)
            patch.setattr(module, "_FLAT_LIMIT", 300)
        found = check_cover_ragged(*ragged(tensors))
    # A tensor of one element or more needs each covered once; a 0-d tensor is marked like any other.
    expected = [t for t, (shape, boxes) in enumerate(tensors) if not (marks(shape, boxes) == 1).all()]
    assert found.tolist() == expected


def test_ragged_is_fast() -> None:
    """100,000 chunks in several ways of cutting take about 0.05 s; the limit is loose."""
    tensors = []
    for i in range(100):
        boxes = grid((1000, 1000), [(1000, 1), (1, 1000), (40, 25), (1, 1)][i % 4])
        tensors.append(((1000, 1000), array_to_boxes(boxes)))
    columns = ragged(tensors)
    start = time.perf_counter()
    assert check_cover_ragged(*columns).tolist() == []
    assert time.perf_counter() - start < 1.0
