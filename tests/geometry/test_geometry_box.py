"""Boxes and flat ranges."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucp_dcp.errors import PlanError
from ucp_dcp.geometry import Box, array_to_boxes, boxes_to_array, c_strides, flat_range_to_boxes, full_box

from .naive import boxes_in, elements, marks, shapes

BIG = 2**40


@given(st.data(), shapes)
@settings(max_examples=150, deadline=None)
def test_intersect_is_the_shared_elements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    both = (marks(shape, [a]) * marks(shape, [b])).reshape(-1).nonzero()[0]
    shared = a.intersect(b)
    assert shared == b.intersect(a)
    if shared is None:
        assert len(both) == 0
    else:
        assert not shared.empty
        assert elements(shape, shared).tolist() == both.tolist()
        assert a.contains(shared) and b.contains(shared)
    assert a.contains(b) == (set(elements(shape, b)) <= set(elements(shape, a)))
    assert a.numel == len(elements(shape, a)) and a.empty == (a.numel == 0)


def test_box_0d_holds_one_element() -> None:
    box = full_box(())
    assert (box.ndim, box.numel, box.empty, box.stop) == (0, 1, False, ())
    assert box.intersect(box) == box and box.contains(box) and box.relative_to(()) == box


def test_box_moves() -> None:
    box = Box((3, 5), (2, 4))
    assert box.stop == (5, 9)
    assert box.translate((1, -5)) == Box((4, 0), (2, 4))
    assert box.relative_to((3, 4)) == Box((0, 1), (2, 4))
    assert sorted([Box((1, 0), (1, 1)), Box((0, 9), (9, 9)), Box((0, 9), (1, 1))])[0] == Box((0, 9), (1, 1))


def test_box_refuses_what_is_no_box() -> None:
    with pytest.raises(PlanError, match="as many offsets"):
        Box((0,), (1, 2))
    with pytest.raises(PlanError, match="negative"):
        Box((0,), (-1,))
    with pytest.raises(PlanError, match="negative"):
        Box((1,), (1,)).relative_to((2,))
    with pytest.raises(PlanError, match="dims"):
        Box((1,), (1,)).intersect(full_box(()))
    with pytest.raises(PlanError, match="moved by"):
        Box((1,), (1,)).translate((1, 2))


@given(shapes)
@settings(max_examples=50, deadline=None)
def test_c_strides_are_numpys(shape: tuple[int, ...]) -> None:
    array = np.empty(shape, dtype=np.int8)
    if array.size:  # numpy gives strides of an empty array as if its sizes were 1 in a way of its own
        for d, n in enumerate(shape):
            assert n == 1 or array.strides[d] == c_strides(shape)[d]
    assert all(s > 0 for s in c_strides(shape))


@given(st.data(), shapes)
@settings(max_examples=300, deadline=None)
def test_flat_range(data: st.DataObject, shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    boxes = flat_range_to_boxes(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(not box.empty for box in boxes)
    # In flat order, disjoint, each contiguous in C order, together exactly the range: all of it in one comparison.
    found = list(itertools.chain.from_iterable(elements(shape, box).tolist() for box in boxes))
    assert found == list(range(start, stop))


def test_flat_range_needs_all_its_boxes() -> None:
    # The bound 2n - 1 is reached, so it is the bound.
    assert len(flat_range_to_boxes((4, 4, 4), 1, 63)) == 5
    assert flat_range_to_boxes((4, 4, 4), 0, 64) == [full_box((4, 4, 4))]
    assert flat_range_to_boxes((4, 4, 4), 16, 48) == [Box((1, 0, 0), (2, 4, 4))]
    assert flat_range_to_boxes((), 0, 1) == [Box((), ())]
    assert flat_range_to_boxes((), 1, 1) == []
    assert flat_range_to_boxes((0, 3), 0, 0) == []


def test_flat_range_beyond_32_and_64_bits() -> None:
    shape = (BIG, BIG)
    boxes = flat_range_to_boxes(shape, BIG - 1, 3 * BIG + 2)
    assert boxes == [Box((0, BIG - 1), (1, 1)), Box((1, 0), (2, BIG)), Box((3, 0), (1, 2))]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_flat_range_outside(start: int, stop: int) -> None:
    with pytest.raises(PlanError, match="6 elements"):
        flat_range_to_boxes((2, 3), start, stop)


@given(st.data(), shapes)
@settings(max_examples=50, deadline=None)
def test_box_arrays_round_trip(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(st.lists(boxes_in(shape), max_size=4))
    array = boxes_to_array(boxes, len(shape))
    assert array.shape == (len(boxes), 2, len(shape)) and array.dtype == np.int64
    assert array_to_boxes(array) == boxes


def test_box_arrays_refuse() -> None:
    with pytest.raises(PlanError, match="2\\*\\*63"):
        boxes_to_array([Box((2**63,), (1,))], 1)
    with pytest.raises(PlanError, match="1 dims"):
        boxes_to_array([Box((0,), (1,)), Box((0,), (1,))], 2)
