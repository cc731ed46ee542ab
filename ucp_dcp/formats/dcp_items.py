"""Where the tensor bytes of a stock DCP item are.

An item is a ``torch.save`` archive of one tensor. Its directory is at its end, its pickle at its start, its bytes in between, at a place
that depends on the torch version, and in the element order that the tensor had (DCP keeps strides). All of it is read from the item.
The bytes before the payload depend on nothing but dtype, shape, strides and the writer's version, so that one parsed item answers for all
that begin alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..catalog import Catalog
from ..dtypes import CODES, NAMES
from ..errors import CorruptCheckpointError, FormatError
from ..geometry import c_strides
from ..safe_pickle import StoredTensor, drive_many, tree_steps
from ..storage.store import Range, Store
from .source import Located

__all__ = ["ItemCache"]

_HEAD = 1 << 10
_TAIL = 1 << 10
"""Bytes of an item's two ends that are read at once; what does not fit is read afterwards."""
_BATCH = 4096
_TEMPLATES = 8


class ItemCache:
    """What is known of the items of one checkpoint; ``lengths`` are the items' lengths in bytes, by chunk."""

    def __init__(self, lengths: NDArray[np.int64]) -> None:
        self.lengths = lengths
        self._payload = np.full(len(lengths), -1, dtype=np.int64)
        self._dtype = np.zeros(len(lengths), dtype=np.uint8)
        self._strides: dict[int, tuple[int, ...]] = {}
        self._templates: dict[tuple[int, int, tuple[int, ...]], list[tuple[bytes, int, tuple[int, ...]]]] = {}

    def locate(self, catalog: Catalog, store: Store, chunks: NDArray[np.int64]) -> Located:
        """Places of these chunks (:meth:`Source.locate`)."""
        missing = np.unique(chunks[self._payload[chunks] < 0]) if len(chunks) else chunks
        for at in range(0, len(missing), _BATCH):
            self._resolve(catalog, store, missing[at : at + _BATCH])
        strides: list[tuple[int, ...]] = []
        plain: dict[tuple[int, ...], tuple[int, ...]] = {}  # most chunks of a checkpoint have one of few sizes
        for chunk, size in zip(chunks.tolist(), _sizes(catalog, chunks, catalog.tensor_of(chunks)), strict=True):
            known = self._strides.get(chunk)
            if known is None:
                known = plain.get(size)
                if known is None:
                    known = plain[size] = c_strides(size)
            strides.append(known)
        return Located(catalog.chunk_file[chunks], self._payload[chunks], strides, self._dtype[chunks])

    def _resolve(self, catalog: Catalog, store: Store, chunks: NDArray[np.int64]) -> None:
        paths = [catalog.files[f].path for f in catalog.chunk_file[chunks].tolist()]
        starts = catalog.chunk_offset[chunks].tolist()
        lengths = self.lengths[chunks].tolist()
        owning = catalog.tensor_of(chunks)
        owners = owning.tolist()
        ids = chunks.tolist()
        sizes = _sizes(catalog, chunks, owning)
        heads = _read(store, [Range(p, s, min(n, _HEAD)) for p, s, n in zip(paths, starts, lengths, strict=True)])

        def known(i: int) -> bool:
            for prefix, payload, strides in self._templates.get((lengths[i], int(catalog.tensor_dtype[owners[i]]), sizes[i]), ()):
                if heads[i].startswith(prefix):
                    self._keep(ids[i], starts[i] + payload, int(catalog.tensor_dtype[owners[i]]), strides, sizes[i])
                    return True
            return False

        def parse(which: list[int]) -> None:
            ends: dict[int, bytes] = {}

            def read(asked: list[tuple[int, int, int]]) -> Sequence[bytes]:
                # The item's two ends serve most of what the parser asks for.
                fresh: list[tuple[int, int, int, bool]] = []
                for n, start, length in asked:
                    i = which[n]
                    in_tail = start >= lengths[i] - _TAIL
                    if start + length > len(heads[i]) and not (in_tail and i in ends):
                        fresh.append(
                            (n, max(lengths[i] - _TAIL, 0), min(_TAIL, lengths[i]), True) if in_tail else (n, start, length, False)
                        )
                parts = _read(store, [Range(paths[which[n]], starts[which[n]] + s, k) for n, s, k, _ in fresh])
                other: dict[tuple[int, int, int], bytes] = {}
                for (n, start, length, tail), part in zip(fresh, parts, strict=True):
                    if tail:
                        ends[which[n]] = part
                    else:
                        other[n, start, length] = part
                answers = []
                for n, start, length in asked:
                    i = which[n]
                    if start + length <= len(heads[i]):
                        answers.append(heads[i][start : start + length])
                    elif (n, start, length) in other:
                        answers.append(other[n, start, length])
                    else:
                        at = start - max(lengths[i] - _TAIL, 0)
                        answers.append(ends[i][at : at + length])
                return answers

            names = [f"{catalog.keys[owners[i]]!r} in {paths[i]} at byte {starts[i]}" for i in which]
            trees = drive_many([tree_steps(lengths[i], what=name) for i, name in zip(which, names, strict=True)], read)
            for i, name, tensor in zip(which, names, trees, strict=True):
                code = int(catalog.tensor_dtype[owners[i]])
                if not isinstance(tensor, StoredTensor):
                    raise FormatError(f"{name}: the item holds a {type(tensor).__name__}, expected a tensor")
                if tensor.shape != sizes[i] or CODES[tensor.dtype] != code:
                    raise CorruptCheckpointError(
                        f"{name}: the item holds {tensor.dtype} {list(tensor.shape)}, .metadata says {NAMES[code]} {list(sizes[i])}"
                    )
                self._keep(ids[i], starts[i] + tensor.offset, code, tensor.strides, sizes[i])
                templates = self._templates.setdefault((lengths[i], code, sizes[i]), [])
                if 0 < tensor.offset <= len(heads[i]) and tensor.storage_offset == 0 and len(templates) < _TEMPLATES:
                    templates.append((heads[i][: tensor.offset], tensor.offset, tensor.strides))

        rest = [i for i in range(len(ids)) if not known(i)]
        first: dict[tuple[int, int, tuple[int, ...]], int] = {}
        for i in rest:
            first.setdefault((lengths[i], int(catalog.tensor_dtype[owners[i]]), sizes[i]), i)
        if first:
            parse(list(first.values()))
            chosen = set(first.values())
            rest = [i for i in rest if i not in chosen and not known(i)]
        if rest:
            parse(rest)

    def _keep(self, chunk: int, payload: int, dtype: int, strides: tuple[int, ...], size: tuple[int, ...]) -> None:
        self._payload[chunk] = payload
        self._dtype[chunk] = dtype
        if strides != c_strides(size):
            self._strides[chunk] = strides


def _sizes(catalog: Catalog, chunks: NDArray[np.int64], owners: NDArray[np.int64]) -> list[tuple[int, ...]]:
    """The size of each chunk; the boxes of a tensor are looked up once."""
    sizes: list[tuple[int, ...]] = [()] * len(chunks)
    order = np.argsort(owners, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(owners[order])) + 1) if len(order) else []:
        t = int(owners[rows[0]])
        for row, size in zip(rows.tolist(), catalog.boxes(t)[chunks[rows] - catalog.chunk_start[t], 1].tolist(), strict=True):
            sizes[row] = tuple(size)
    return sizes


def _read(store: Store, ranges: list[Range]) -> list[bytes]:
    buffers = [bytearray(r.length) for r in ranges]
    if ranges:
        store.read_ranges(ranges, [memoryview(b) for b in buffers])
    return [bytes(b) for b in buffers]
