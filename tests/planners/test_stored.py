"""Which chunks fill a wanted box, and that each of its elements comes from exactly one: counted element by element."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucp_dcp.errors import CoverageError
from ucp_dcp.geometry import Box
from ucp_dcp.planners import stored
from ucp_dcp.planners.stored import pieces_of


@st.composite
def stored_and_wanted(draw: st.DrawFn) -> tuple[np.ndarray, list[Box]]:
    """A tensor cut into chunks (a grid, further cuts of some tiles, perhaps one lost, doubled or moved), and boxes of it."""
    ndim = draw(st.integers(0, 3))
    shape = [draw(st.integers(1, 6)) for _ in range(ndim)]
    edges = [sorted({0, n, *draw(st.lists(st.integers(1, max(1, n - 1)), max_size=2))}) for n in shape]
    tiles = [list(zip(*tile, strict=True)) if tile else [(), ()] for tile in itertools.product(*(itertools.pairwise(e) for e in edges))]
    chunks = [[list(low), [b - a for a, b in zip(low, high, strict=True)]] for low, high in tiles]
    for _ in range(draw(st.integers(0, 2)) if ndim else 0):
        at, dim = draw(st.integers(0, len(chunks) - 1)), draw(st.integers(0, ndim - 1))
        offset, size = chunks[at]
        if size[dim] > 1:
            cut = draw(st.integers(1, size[dim] - 1))
            chunks[at] = [offset, [cut if d == dim else n for d, n in enumerate(size)]]
            chunks.append(
                [[o + cut if d == dim else o for d, o in enumerate(offset)], [n - cut if d == dim else n for d, n in enumerate(size)]]
            )
    harm = draw(st.sampled_from(["none", "none", "lost", "doubled", "moved"]))
    at = draw(st.integers(0, len(chunks) - 1))
    if harm == "lost" and len(chunks) > 1:
        del chunks[at]
    elif harm == "doubled":
        chunks.append(chunks[at])
    elif harm == "moved" and ndim:
        dim = draw(st.integers(0, ndim - 1))
        chunks[at] = [[o + (d == dim) for d, o in enumerate(chunks[at][0])], chunks[at][1]]
    chunks = draw(st.permutations(chunks))
    wanted = []
    for _ in range(draw(st.integers(1, 3))):
        offset = [draw(st.integers(0, n - 1)) for n in shape]
        wanted.append(Box(tuple(offset), tuple(draw(st.integers(1, n - o)) for o, n in zip(offset, shape, strict=True))))
    return np.asarray(chunks, dtype=np.int64).reshape(len(chunks), 2, ndim), wanted


@given(stored_and_wanted(), st.sampled_from([0, 256]))
@settings(max_examples=80, deadline=None)
def test_every_element_once(case: tuple[np.ndarray, list[Box]], few: int) -> None:
    chunks, wanted = case
    room = tuple(int(n) for n in (chunks[:, 0] + chunks[:, 1]).max(axis=0))
    count = np.zeros(room, dtype=int)
    for offset, size in chunks.tolist():
        count[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))] += 1
    inside = [all(stop <= n for stop, n in zip(box.stop, room, strict=True)) for box in wanted]
    whole = all(fits and (count[box.slices()] == 1).all() for box, fits in zip(wanted, inside, strict=True))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stored, "_FEW", few)  # 0: only the way that is taken for many chunks
        if not whole:
            with pytest.raises(CoverageError, match="'w'"):
                pieces_of("w", "w", wanted, chunks)
            return
        pieces = pieces_of("w", "w", wanted, chunks)
    assert [(w, h) for w, h, _, _ in pieces] == sorted((w, h) for w, h, _, _ in pieces)
    filled = [np.zeros(box.size, dtype=int) for box in wanted]
    for w, h, offset, size in pieces:
        chunk = Box(tuple(chunks[h, 0].tolist()), tuple(chunks[h, 1].tolist()))
        piece = Box(offset, size)
        assert chunk.contains(piece) and wanted[w].contains(piece) and not piece.empty
        filled[w][piece.relative_to(wanted[w].offset).slices()] += 1
    assert all((f == 1).all() for f in filled)


def test_grids_take_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "check_covered", None)
    rows = np.asarray([[[i, 0], [1, 4]] for i in (2, 0, 1, 3)], dtype=np.int64)
    assert pieces_of("w", "w", [Box((1, 1), (2, 3))], rows) == [(0, 2, (1, 1), (1, 3)), (0, 0, (2, 1), (1, 3))][::-1]
    tiles = np.asarray([[[i, j], [2, 2]] for j in (0, 2) for i in (0, 2)], dtype=np.int64)
    assert len(pieces_of("w", "w", [Box((0, 0), (4, 4)), Box((1, 1), (2, 2))], tiles)) == 8
