"""Which tensors lie at some bytes of a file: for messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..dtypes import itemsize
from ..geometry import Box

if TYPE_CHECKING:
    from ..formats import Source

__all__ = ["describe", "tensors_at"]

_SHOWN = 4


def tensors_at(source: Source, file: int, start: int, stop: int) -> list[tuple[str, Box]]:
    """(key, box) of every chunk that has bytes in ``start .. stop`` of a file, and of every object (with an empty box)."""
    catalog = source.catalog
    chunks = np.flatnonzero((catalog.chunk_file == file) & (catalog.chunk_offset < stop)).astype(np.int64)
    out: list[tuple[str, Box]] = []
    for chunk, t in zip(chunks.tolist(), catalog.tensor_of(chunks).tolist(), strict=True):
        row = catalog.tensor(t)
        at = chunk - int(catalog.chunk_start[t])
        offset, size = catalog.boxes(t)[at].tolist()
        if 0 in size:
            continue
        strides = catalog.strides(t)[at].tolist()
        last = sum((n - 1) * s for n, s in zip(size, strides, strict=True))
        if int(catalog.chunk_offset[chunk]) + (last + 1) * itemsize(row.dtype) > start:
            out.append((row.key, Box(tuple(offset), tuple(size))))
    for item in catalog.objects:
        if item.encoding != "inline" and item.file == file and item.offset < stop and item.offset + item.length > start:
            out.append((item.key, Box((), ())))
    return out


def describe(source: Source, file: int, start: int, stop: int) -> str:
    """The same in words."""
    found = tensors_at(source, file, start, stop)
    names = [f"{key!r} box {box.offset} + {box.size}" if box.size else repr(key) for key, box in found]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) + more) or "no tensor"
