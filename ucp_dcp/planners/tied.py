"""Tied weights: several names of one memory (a head that is the embedding).

At save such a tensor is written once, and all its names point to the same bytes. At load it is filled once; a checkpoint that holds two
different tensors for it cannot be loaded into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..catalog import Catalog
from ..errors import PlanError
from ..formats import Source
from ..geometry import Box, boxes_to_array, intersect_pairs
from ..layout import Fragment
from ..names import Role
from ..transfer import Copy, ReadStats, read_copies

__all__ = ["Tied", "check_tied", "same_memory"]

_SLAB = 64 << 20  # bytes compared at once


def same_memory(fragments: Iterable[Fragment]) -> list[list[str]]:
    """Keys of weights that are the very same elements on this rank, in lists of at least two; parts without elements do not count."""
    parts: dict[str, list[tuple[object, ...]]] = {}
    for f in fragments:
        if f.role in (Role.WEIGHT, Role.BUFFER) and f.view.numel() and not f.view.is_meta:
            place = (f.view.device, f.view.data_ptr(), f.view.stride(), f.view.dtype, f.view.is_conj(), f.view.is_neg(), f.shape, f.box)
            parts.setdefault(f.key, []).append(place)
    keys: dict[tuple[tuple[object, ...], ...], list[str]] = {}
    for key, places in parts.items():
        if all(place[1] for place in places):  # a tensor subclass without a memory of its own has address 0
            keys.setdefault(tuple(places), []).append(key)
    return [sorted(group) for group in keys.values() if len(group) > 1]


@dataclass
class Tied:
    """The tied weights of a wanted state dict. twin: key -> first key of its memory. fqns: fqn -> fqns of the others."""

    twin: dict[str, str] = field(default_factory=dict)
    fqns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    """First key -> the stored row that fills the memory."""
    compare: list[tuple[str, str, int, int, list[Box]]] = field(default_factory=list)
    """(first key, other key, their rows, wanted boxes) that are stored apart."""

    @classmethod
    def of(cls, fragments: Sequence[Fragment]) -> Tied:
        """Find them."""
        out = cls()
        fqn = {f.key: f.fqn for f in fragments}
        for group in same_memory(fragments):
            names = [fqn[key] for key in group]
            out.twin.update(dict.fromkeys(group, group[0]))
            for name in names:
                out.fqns[name] = tuple(n for n in names if n != name)
        return out

    def first(self, key: str, fragments: Sequence[Fragment], row: int) -> bool:
        """Whether this key has to fill the memory: none of its twins does. Another row than theirs is remembered for comparison."""
        head = self.twin.get(key)
        if head is None:
            return True
        if head not in self.rows:
            self.rows[head] = row
            return True
        if self.rows[head] != row:
            self.compare.append((head, key, self.rows[head], row, [f.box for f in fragments if not f.box.empty]))
        return False


def _same_bytes(catalog: Catalog, a: int, b: int) -> bool:
    """Whether two rows point to the same chunks of the same files."""
    (a0, a1), (b0, b1) = catalog.chunk_range(a), catalog.chunk_range(b)
    if a1 - a0 != b1 - b0 or catalog.tensor(a).dtype != catalog.tensor(b).dtype or not np.array_equal(catalog.boxes(a), catalog.boxes(b)):
        return False
    columns: Mapping[str, np.ndarray] = {"file": catalog.chunk_file, "offset": catalog.chunk_offset}
    return all(np.array_equal(column[a0:a1], column[b0:b1]) for column in columns.values())


def check_tied(source: Source, tied: Tied) -> None:
    """Raise PlanError where two names of one memory are stored with different values. Reads what is wanted of both, in bounded parts."""
    from ..dtypes import torch_dtype

    catalog = source.catalog
    for first, other, a, b, boxes in tied.compare:
        if _same_bytes(catalog, a, b):
            continue
        rows = catalog.tensor(a), catalog.tensor(b)
        if rows[0].dtype != rows[1].dtype:
            raise PlanError(_differ(first, other, f"as {rows[0].dtype} and as {rows[1].dtype}"))
        for box in boxes:
            for part in _slabs(box, torch_dtype(rows[0].dtype).itemsize):
                x, y = (_read(source, row.index, part, torch_dtype(row.dtype)) for row in rows)
                if not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
                    raise PlanError(_differ(first, other, "with different values"))


def _differ(first: str, other: str, how: str) -> str:
    return (
        f"{first!r} and {other!r} are one tensor here (tied weights), and the checkpoint holds them {how}; untie the model, or exclude one"
    )


def _slabs(box: Box, itemsize: int) -> Iterable[Box]:
    rest = itemsize
    for extent in box.size[1:]:
        rest *= extent
    step = max(1, _SLAB // max(rest, 1))
    for start in range(0, box.size[0], step) if box.size else ():
        size = min(step, box.size[0] - start)
        yield Box((box.offset[0] + start, *box.offset[1:]), (size, *box.size[1:]))
    if not box.size:
        yield box


def _read(source: Source, row: int, box: Box, dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros(box.size, dtype=dtype)
    boxes = source.catalog.boxes(row)
    first = source.catalog.chunk_range(row)[0]
    _, chunk, parts = intersect_pairs(boxes_to_array([box], box.ndim), boxes)
    copies = []
    for h, (offset, size) in zip(chunk.tolist(), parts.tolist(), strict=True):
        view = out
        for dim in range(box.ndim):
            view = view.narrow(dim, offset[dim] - box.offset[dim], size[dim])
        copies.append(Copy(first + h, tuple(o - s for o, s in zip(offset, boxes[h, 0].tolist(), strict=True)), view))
    read_copies(source, copies, gap=0, stats=ReadStats())
    return out.reshape(-1)
