"""The outcome of save planning: which chunks exist, who writes each, and the stock DCP ``Metadata`` of it.

:class:`Planned` lives on the coordinator only. What each rank gets back is an :class:`Assignment`; what DCP broadcasts after a save is a
:class:`PlannedMetadata`, which pickles to almost nothing (design decisions D1, D2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ..dtypes import torch_dtype
from ..geometry import Box, flat_range_to_boxes
from .merge import MergedBoxes, MergedObjects, without
from .ownership import assign_owners
from .wire import KeyRow, ObjectEntry

__all__ = ["Assignment", "Planned", "PlannedMetadata", "plan_chunks", "stock_state_dict_metadata", "ucp_planner_data", "with_objects"]

I64 = npt.NDArray[np.int64]

PLANNER_DATA_KEY = "ucp_dcp"


@dataclass(frozen=True)
class Assignment:
    """What one rank writes, in file order. I items.

    fragment: (I,) index of the rank's fragment. part: (I,) row of ``part_coords`` when only a part of the fragment is written, -1 for all
    of it. part_coords: flat; offsets and sizes relative to the fragment's box. objects: keys of the objects it writes, with their index
    in the rank's own object list.
    """

    rank: int
    fragment: npt.NDArray[np.int32]
    part: npt.NDArray[np.int32]
    part_boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
    objects: list[tuple[str, str]]
    """(key as written, key in the rank's own list)."""


@dataclass(frozen=True)
class Planned:
    """All chunks to be written, ordered by (tensor, box). C chunks, T tensors.

    chunk_start: (T+1,). coords: flat, offsets then sizes of each chunk. owner: (C,) rank. objects: (entry, owner).
    """

    rows: list[KeyRow]
    chunk_start: I64
    coords: I64
    owner: I64
    objects: list[tuple[ObjectEntry, int]]
    world: int
    tied: dict[int, int] = field(default_factory=dict)
    """Row without chunks of its own -> row whose bytes are its bytes (tied weights)."""

    def with_tied(self) -> tuple[Planned, I64]:
        """(the plan with the chunks of tied tensors as well, for each of its chunks the chunk that is written)."""
        ndim = np.asarray([len(row.shape) for row in self.rows], dtype=np.int64)
        counts = np.diff(self.chunk_start)
        take: list[I64] = []
        for t in range(len(self.rows)):
            source = self.tied.get(t, t)
            take.append(np.arange(self.chunk_start[source], self.chunk_start[source + 1]))
        chosen = np.concatenate(take) if take else np.zeros(0, dtype=np.int64)
        begin = np.concatenate(([0], np.cumsum(np.repeat(2 * ndim, counts))))
        width = begin[1:] - begin[:-1]
        lengths = width[chosen]
        starts = np.concatenate(([0], np.cumsum(lengths)))[:-1]
        index = np.repeat(begin[:-1][chosen] - starts, lengths) + np.arange(int(lengths.sum()))
        chunk_start = np.concatenate(([0], np.cumsum([len(part) for part in take]))).astype(np.int64)
        return Planned(self.rows, chunk_start, self.coords[index], self.owner[chosen], self.objects, self.world), chosen

    def boxes(self) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """(tensor, offset, size) of every chunk in order."""
        flat = self.coords.tolist()
        at = 0
        for t, row in enumerate(self.rows):
            n = len(row.shape)
            for _ in range(int(self.chunk_start[t]), int(self.chunk_start[t + 1])):
                yield t, tuple(flat[at : at + n]), tuple(flat[at + n : at + 2 * n])
                at += 2 * n


@dataclass
class PlannedMetadata(Metadata):
    """The ``Metadata`` of a save of ours: carries the plan on the coordinator, and nothing to other ranks."""

    state_dict_metadata: dict[str, Any] = field(default_factory=dict)
    planned: Planned | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # DCP broadcasts the Metadata of a save to all ranks; the catalog is in the index file, nobody needs it here.
        return (Metadata, ({}, {PLANNER_DATA_KEY: {"version": 1}}, None, None, self.version))


def plan_chunks(merged: MergedBoxes, world: int, tied: Mapping[int, int] | None = None) -> tuple[Planned, list[Assignment]]:
    """Choose owners, split what must be split, and make every rank's assignment. Objects are added by :func:`with_objects`.

    tied: row -> row of the tensor that it is; it gets no chunks of its own.
    """
    if tied:
        merged = without(merged, list(tied))
    flat = merged.coords.tolist()
    starts = merged.coord_start.tolist()
    ndims = merged.ndim.tolist()
    counts = np.diff(merged.hold_start)
    shared = np.flatnonzero(counts > 1)
    sizes: list[I64] = [np.zeros(0, dtype=np.int64)] * len(ndims)
    for b in shared.tolist():
        sizes[b] = merged.coords[starts[b] + ndims[b] : starts[b + 1]]
    pieces = assign_owners(merged.numel, merged.itemsize, sizes, merged.hold_start, merged.holder_rank, world)

    whole = (pieces.start == 0) & (pieces.stop == merged.numel[pieces.box])
    owner = merged.holder_rank[pieces.holder]
    fragment = merged.holder_fragment[pieces.holder]
    tensor = merged.tensor[pieces.box]
    if whole.all():
        coords = merged.coords
        part = np.full(len(owner), -1, dtype=np.int64)
        part_boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    else:
        coords, tensor, owner, fragment, part, part_boxes = _split(
            merged, pieces.box, pieces.start, pieces.stop, whole, owner, fragment, flat
        )
    chunk_start = np.searchsorted(tensor, np.arange(len(merged.rows) + 1)).astype(np.int64)
    planned = Planned(merged.rows, chunk_start, coords, owner, [], world, dict(tied or {}))
    return planned, _assignments(owner, fragment, part, part_boxes, world)


def with_objects(planned: Planned, assignments: Sequence[Assignment], objects: MergedObjects) -> tuple[Planned, list[Assignment]]:
    """The same plan with the objects of one save: they may be others each time while the tensors stay as they are."""
    own: list[list[tuple[str, str]]] = [[] for _ in range(planned.world)]
    for entry, rank in objects.entries:
        local = entry.key.removesuffix(f".per_rank.{rank}") if entry.per_rank else entry.key
        own[rank].append((entry.key, local))
    return replace(planned, objects=objects.entries), [replace(a, objects=own[a.rank]) for a in assignments]


def _split(
    merged: MergedBoxes, box: I64, start: I64, stop: I64, whole: npt.NDArray[np.bool_], owner: I64, fragment: I64, flat: Sequence[int]
) -> tuple[I64, I64, I64, I64, I64, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Pieces of boxes as boxes, in (tensor, box) order: (coords, tensor, owner, fragment, part, part boxes)."""
    rows: list[tuple[int, tuple[int, ...], tuple[int, ...], int, int, int]] = []
    part_boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    starts, ndims, tensors = merged.coord_start.tolist(), merged.ndim.tolist(), merged.tensor.tolist()
    for b, low, high, entire, own, frag in zip(
        box.tolist(), start.tolist(), stop.tolist(), whole.tolist(), owner.tolist(), fragment.tolist(), strict=True
    ):
        at, n = starts[b], ndims[b]
        offset, size = tuple(flat[at : at + n]), tuple(flat[at + n : at + 2 * n])
        if entire:
            rows.append((tensors[b], offset, size, own, frag, -1))
            continue
        for piece in flat_range_to_boxes(size, low, high):
            placed = Box(piece.offset, piece.size).translate(offset)
            rows.append((tensors[b], placed.offset, placed.size, own, frag, len(part_boxes)))
            part_boxes.append((piece.offset, piece.size))
    rows.sort(key=lambda r: (r[0], r[1], r[2]))
    coords = np.asarray([x for r in rows for x in (*r[1], *r[2])], dtype=np.int64)
    columns = np.asarray([(r[0], r[3], r[4], r[5]) for r in rows], dtype=np.int64).reshape(-1, 4)
    return coords, columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3], part_boxes


def _assignments(
    owner: I64, fragment: I64, part: I64, part_boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], world: int
) -> list[Assignment]:
    order = np.argsort(owner, kind="stable")
    edges = np.searchsorted(owner[order], np.arange(world + 1))
    out = []
    for rank in range(world):
        mine = order[edges[rank] : edges[rank + 1]]
        parts = part[mine]
        used = parts >= 0
        renumbered = np.full(len(mine), -1, dtype=np.int32)
        renumbered[used] = np.arange(int(used.sum()))
        out.append(
            Assignment(
                rank=rank,
                fragment=fragment[mine].astype(np.int32),
                part=renumbered,
                part_boxes=[part_boxes[int(i)] for i in parts[used]],
                objects=[],
            )
        )
    return out


def stock_state_dict_metadata(planned: Planned) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
    """What a stock planner would have put into ``Metadata.state_dict_metadata``: one chunk object per chunk."""
    size_of = torch.Size
    chunks: list[list[ChunkStorageMetadata]] = [[] for _ in planned.rows]
    for t, offset, size in planned.boxes():
        chunks[t].append(ChunkStorageMetadata(offsets=size_of(offset), sizes=size_of(size)))
    out: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        row.key: TensorStorageMetadata(properties=TensorProperties(dtype=torch_dtype(row.dtype)), size=size_of(row.shape), chunks=chunks[t])
        for t, row in enumerate(planned.rows)
    }
    for entry, _ in planned.objects:
        out[entry.key] = BytesStorageMetadata()
    return out


def ucp_planner_data(planned: Planned) -> dict[str, Any]:
    """``Metadata.planner_data``: the nesting paths DCP's own tools need, and roles and patterns under one key, as plain values."""
    data: dict[str, Any] = {row.key: tuple(row.path) for row in planned.rows}
    data.update({entry.key: tuple(entry.path) for entry, _ in planned.objects})
    data[PLANNER_DATA_KEY] = {
        "version": 1,
        "tensors": {row.key: [int(row.role), row.fqn, row.state, row.pattern] for row in planned.rows if row.role != 5 or row.pattern},
    }
    return data
