"""What must be true of stored chunks before a load may rely on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..catalog import Catalog
from ..errors import CoverageError, UnsupportedError
from ..geometry import check_cover

__all__ = ["check_covered", "check_groups", "identity"]


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
