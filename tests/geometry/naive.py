"""Naive oracles for geometry: elements are marked one by one in small arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ucp_dcp.geometry import Box, boxes_to_array

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
solid_shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: Sequence[int], empty: bool = True) -> Box:
    """A box inside a shape; empty ones too."""
    offset, size = [], []
    for n in shape:
        o = draw(st.integers(0, n))
        k = draw(st.integers(0 if empty or n == 0 else min(1, n - o), n - o))
        offset.append(o)
        size.append(k)
    return Box(tuple(offset), tuple(size))


@st.composite
def tilings(draw: st.DrawFn, shape: Sequence[int]) -> list[Box]:
    """Boxes that cover a shape exactly once: it is cut again and again, in a random dim of a random piece."""
    pieces = [Box((0,) * len(shape), tuple(shape))]
    for _ in range(draw(st.integers(0, 8))):
        i = draw(st.integers(0, len(pieces) - 1))
        piece = pieces[i]
        dims = [d for d, n in enumerate(piece.size) if n > 1]
        if not dims:
            continue
        d = draw(st.sampled_from(dims))
        at = draw(st.integers(1, piece.size[d] - 1))
        low, high = list(piece.size), list(piece.size)
        low[d], high[d] = at, piece.size[d] - at
        offset = list(piece.offset)
        offset[d] += at
        pieces[i : i + 1] = [Box(piece.offset, tuple(low)), Box(tuple(offset), tuple(high))]
    return draw(st.permutations(pieces))


def marks(shape: Sequence[int], boxes: Sequence[Box]) -> NDArray[np.int64]:
    """How many boxes hold each element."""
    out = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        out[box.slices()] += 1
    return out


def elements(shape: Sequence[int], box: Box) -> NDArray[np.int64]:
    """Flat C-order indices of a box, in its own C order."""
    index = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    return index[box.slices()].reshape(-1)


def grid(shape: Sequence[int], parts: Sequence[int]) -> NDArray[np.int64]:
    """A tensor cut evenly into ``parts`` per dim, in C order."""
    cuts = [np.linspace(0, n, p + 1).astype(np.int64) for n, p in zip(shape, parts, strict=True)]
    lows = np.meshgrid(*[c[:-1] for c in cuts], indexing="ij")
    sizes = np.meshgrid(*[np.diff(c) for c in cuts], indexing="ij")
    if not shape:
        return boxes_to_array([Box((), ())], 0)
    return np.stack((np.stack([x.reshape(-1) for x in lows], axis=1), np.stack([x.reshape(-1) for x in sizes], axis=1)), axis=1)
