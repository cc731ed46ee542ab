"""Contiguous runs of strided boxes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from ucp_dcp.errors import PlanError, UnsupportedError
from ucp_dcp.geometry import c_strides, runs


def read(size: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Reading the runs gives the box, whatever its strides."""
    last = sum((n - 1) * s for n, s in zip(size, strides, strict=True)) if 0 not in size else -1
    memory = np.arange(last + 1, dtype=np.int64)
    box = as_strided(memory, size, [8 * s for s in strides]) if 0 not in size else np.empty(size, dtype=np.int64)
    r = runs(size, strides)
    assert sorted(r.dims) == list(range(len(size)))
    assert r.numel == math.prod(r.shape)
    parts = [memory[s : s + r.length] for s in r.starts]
    flat = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    got = flat.reshape(r.shape).transpose(np.argsort(r.dims).astype(int))
    np.testing.assert_array_equal(np.broadcast_to(got, size), box)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=3))
@settings(max_examples=300, deadline=None)
def test_any_strides(dims: list[tuple[int, int]]) -> None:
    size, strides = tuple(n for n, _ in dims), tuple(s for _, s in dims)
    try:
        runs(size, strides)
    except UnsupportedError:
        # Only boxes with more elements than places may be refused.
        moving = [(n, s) for n, s in dims if n > 1 and s > 0]
        assert math.prod(n for n, _ in moving) > sum((n - 1) * s for n, s in moving) + 1
        return
    read(size, strides)


@given(st.data(), st.lists(st.integers(1, 4), max_size=4))
@settings(max_examples=200, deadline=None)
def test_slices_of_permuted_arrays(data: st.DataObject, shape: list[int]) -> None:
    """What a checkpoint really holds: a slice of a C-order array, dims permuted. Runs are as few as can be."""
    strides = list(c_strides(shape))
    size = [data.draw(st.integers(1, n)) for n in shape]
    order = data.draw(st.permutations(range(len(shape))))
    read(tuple(size[d] for d in order), tuple(strides[d] for d in order))
    r = runs([size[d] for d in order], [strides[d] for d in order])
    index = np.arange(math.prod(shape)).reshape(shape)[tuple(slice(0, n) for n in size)]
    places = np.sort(index.reshape(-1))
    fewest = 1 + int((np.diff(places) != 1).sum())
    # Runs of equal length that happen to touch stay apart only if the last run of a row touches the first of the next, which needs
    # a row to be read in full; then the dims merge. So the number of runs is the fewest possible.
    assert len(r.starts) == fewest
    assert r.starts.tolist() == sorted(r.starts.tolist())


@pytest.mark.parametrize(
    ("size", "strides", "starts", "length", "dims"),
    [
        ((), (), [0], 1, ()),
        ((3, 4), (4, 1), [0], 12, (0, 1)),
        ((3, 4), (1, 3), [0], 12, (1, 0)),
        ((3, 4), (8, 1), [0, 8, 16], 4, (0, 1)),
        ((3, 4), (8, 2), [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22], 1, (0, 1)),
        ((1, 4), (99, 1), [0], 4, (0, 1)),
        ((5, 4), (0, 1), [0], 4, (0, 1)),
        ((4, 5), (1, 0), [0], 4, (1, 0)),
        ((2, 1, 3), (3, 7, 1), [0], 6, (1, 0, 2)),
        ((2, 2, 3), (100, 3, 1), [0, 100], 6, (0, 1, 2)),
        ((3, 2), (1, 1), [0, 1, 2], 2, (0, 1)),
    ],
)
def test_cases(size: tuple[int, ...], strides: tuple[int, ...], starts: list[int], length: int, dims: tuple[int, ...]) -> None:
    r = runs(size, strides)
    assert (r.starts.tolist(), r.length, r.dims) == (starts, length, dims)
    read(size, strides)


def test_empty_box_has_no_runs() -> None:
    r = runs((3, 0), (5, 1))
    assert len(r.starts) == 0 and r.numel == 0


def test_far_apart() -> None:
    r = runs((3, 2**33), (2**40, 1))
    assert r.starts.tolist() == [0, 2**40, 2**41] and r.length == 2**33


def test_refused() -> None:
    with pytest.raises(PlanError, match="negative"):
        runs((2,), (-1,))
    with pytest.raises(PlanError, match="cannot have strides"):
        runs((2,), ())
    with pytest.raises(PlanError, match=r"2\*\*63"):
        runs((2, 2), (2**62, 2**62))
    # 10**12 elements that all lie in 2 million places: nothing of that size is allocated.
    with pytest.raises(UnsupportedError, match="overlaps itself"):
        runs((10**6, 10**6, 10**6), (1, 1, 1))
