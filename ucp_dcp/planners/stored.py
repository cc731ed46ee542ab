"""What must be true of stored chunks before a load may rely on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..catalog import Catalog
from ..errors import CoverageError, UnsupportedError
from ..geometry import Box, boxes_to_array, check_cover, intersect_pairs

__all__ = ["Piece", "check_covered", "check_groups", "identity", "pieces_of"]


def identity(catalog: Catalog) -> str:
    """Tells two checkpoints apart, without reading anything: our files are in a folder whose name is drawn at random."""
    digest = xxhash.xxh3_64(f"{catalog.n_tensors} {catalog.n_chunks} {len(catalog.objects)}".encode())
    for file in catalog.files:
        digest.update(f"{file.size} {file.path}\n".encode())
    return str(digest.hexdigest())


def check_groups(key: str, t: int, catalog: Catalog) -> None:
    """Raises UnsupportedError for a tensor whose chunks must be combined."""
    if not catalog.groups:
        return
    groups = np.unique(catalog.groups_of(t))
    for g in groups[groups >= 0].tolist():
        op = catalog.groups[g]["op"]
        if op != "copy":
            raise UnsupportedError(f"tensor {key!r} is stored in parts that must be combined by {op!r}; this version cannot do that")


_FEW = 256  # pairs of a wanted box and a chunk that are looked at one by one: numpy's fixed costs are higher

Piece = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""(wanted box, chunk, offset, size) of the elements that both hold."""


def pieces_of(key: str, stored: str, wanted: Sequence[Box], chunks: npt.NDArray[np.int64]) -> list[Piece]:
    """Which chunks (k, 2, n) fill the wanted boxes, sorted by (box, chunk).

    Raises CoverageError where an element of a wanted box is in no chunk or in several.
    """
    if len(wanted) * len(chunks) <= _FEW:
        pieces = _few(wanted, chunks.tolist())
        if pieces is not None:
            return pieces
    iw, ih, parts = intersect_pairs(boxes_to_array(wanted, chunks.shape[2]), chunks)
    check_covered(key, stored, wanted, iw, ih, parts)
    return [(w, h, tuple(o), tuple(n)) for w, h, (o, n) in zip(iw.tolist(), ih.tolist(), parts.tolist(), strict=True)]


def _few(wanted: Sequence[Box], chunks: list[list[list[int]]]) -> list[Piece] | None:
    """The same where it is seen at once that the chunks tile each box as a grid does (slabs, tiles); None where it is not."""
    pieces: list[Piece] = []
    for w, box in enumerate(wanted):
        first = len(pieces)
        for h, (begin, extent) in enumerate(chunks):
            offset, size = [], []
            for a, m, b, n in zip(box.offset, box.size, begin, extent, strict=True):
                low = a if a > b else b
                high = a + m if a + m < b + n else b + n
                if low >= high:
                    break
                offset.append(low)
                size.append(high - low)
            else:
                pieces.append((w, h, tuple(offset), tuple(size)))
        if not _tile(pieces[first:], box, 0):
            return None
    return pieces


def _tile(pieces: Sequence[Piece], box: Box, dim: int) -> bool:
    """Whether the pieces, which are alike in the dims before ``dim``, make up the box there: intervals end to end, each tiled likewise."""
    if dim == len(box.size):
        return len(pieces) == 1
    groups: dict[tuple[int, int], list[Piece]] = {}
    for piece in pieces:
        groups.setdefault((piece[2][dim], piece[3][dim]), []).append(piece)
    at = box.offset[dim]
    for begin, extent in sorted(groups):
        if begin != at:
            return False
        at += extent
    return at == box.offset[dim] + box.size[dim] and all(_tile(group, box, dim + 1) for group in groups.values())


def check_covered(
    key: str, stored: str, boxes: Sequence[Any], iw: npt.NDArray[np.int64], ih: npt.NDArray[np.int64], parts: npt.NDArray[np.int64]
) -> None:
    """Every element of every wanted box must come from exactly one stored chunk."""
    counts = np.bincount(iw, minlength=len(boxes))
    order = np.argsort(iw, kind="stable")
    edges = np.concatenate(([0], np.cumsum(counts)))
    for w, box in enumerate(boxes):
        mine = parts[order[edges[w] : edges[w + 1]]]
        if len(mine) == 1 and tuple(mine[0, 1].tolist()) == box.size:
            continue
        relative = mine.copy()
        relative[:, 0] -= np.asarray(box.offset, dtype=np.int64)
        cover = check_cover(box.size, relative, limit=2)
        if cover.ok:
            continue
        holes = [f"offset {tuple(a + b for a, b in zip(h.offset, box.offset, strict=True))} size {h.size}" for h in cover.holes]
        if holes:
            raise CoverageError(f"tensor {key!r}: the checkpoint has no bytes for part of {stored!r}: {'; '.join(holes)}")
        raise CoverageError(f"tensor {key!r}: stored chunks of {stored!r} overlap: {[b.offset for _, _, b in cover.overlaps]}")
