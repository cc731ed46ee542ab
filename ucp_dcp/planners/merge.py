"""The coordinator's half of a save: the columns of all ranks become one checked set of boxes, each byte with one owner.

Everything is numpy over all fragments of all ranks at once; Python loops run over distinct name tables, over dimensionalities and over
findings, never over fragments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..dtypes import CODES, ITEMSIZE
from ..errors import CoverageError, PlanError, ReplicaMismatchError
from ..geometry import check_cover, check_cover_ragged
from ..names import Role
from .wire import KeyRow, LocalPlan, ObjectEntry, parse_table

__all__ = ["MergedBoxes", "MergedObjects", "check_replicas", "find_tied", "merge_objects", "merge_tables", "merge_tensors", "without"]

I64 = npt.NDArray[np.int64]
_SHOWN = 5  # problems listed in one message


@dataclass(frozen=True)
class MergedBoxes:
    """Distinct boxes of all tensors, ordered by (tensor, box offset, box size). T tensors sorted by key, B boxes.

    tensor: (B,) row of ``rows``. ndim: (B,). coord_start: (B+1,) into coords, which holds offsets then sizes of each box.
    hold_start: (B+1,) into the parallel columns holder_rank (ascending per box) and holder_fragment (that rank's fragment index).
    """

    rows: list[KeyRow]
    tensor: I64
    ndim: I64
    coord_start: I64
    coords: I64
    numel: I64
    itemsize: I64
    hold_start: I64
    holder_rank: I64
    holder_fragment: I64
    held: I64
    """For each holder its place among the fragments of all ranks, end to end."""
    maps: list[I64]
    """Per rank: row of its table -> row of ``rows``."""


@dataclass(frozen=True)
class MergedObjects:
    """Objects of all ranks: one (entry, owner rank) for each object to be written, sorted by key."""

    entries: list[tuple[ObjectEntry, int]]


def _starts(lengths: I64) -> I64:
    out = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


def _problem_text(problems: Sequence[str]) -> str:
    more = f"\n  ... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "\n  ".join(problems[:_SHOWN]) + more


def merge_tables(plans: Sequence[LocalPlan]) -> tuple[list[KeyRow], list[I64]]:
    """All tensors sorted by key, and per rank the map from its table rows to them.

    Raises ReplicaMismatchError where ranks disagree about a tensor's dtype, shape or role; PlanError for one name under two keys.
    """
    distinct: dict[bytes, list[KeyRow]] = {}
    first_rank: dict[bytes, int] = {}
    for rank, plan in enumerate(plans):
        if plan.table not in distinct:
            distinct[plan.table] = parse_table(plan.table)
            first_rank[plan.table] = rank
    known: dict[str, KeyRow] = {}
    origin: dict[str, int] = {}
    problems: list[str] = []
    for blob, rows in distinct.items():
        for row in rows:
            other = known.setdefault(row.key, row)
            if other is row:
                origin[row.key] = first_rank[blob]
                continue
            for what, mine, theirs in (
                ("shape", row.shape, other.shape),
                ("dtype", row.dtype, other.dtype),
                ("role", (Role(row.role).name, row.fqn, row.state), (Role(other.role).name, other.fqn, other.state)),
            ):
                if mine != theirs:
                    problems.append(
                        f"tensor {row.key!r}: {what} is {theirs} on rank {origin[row.key]} but {mine} on rank {first_rank[blob]}"
                    )
    if problems:
        raise ReplicaMismatchError(
            "ranks disagree about global tensors:\n  "
            + _problem_text(problems)
            + "\nGive the layout the global shapes (shapes=...) or uneven widths, and save one dtype on all ranks."
        )
    rows = [known[key] for key in sorted(known)]
    named: dict[tuple[int, str, str], str] = {}
    for row in rows:
        if row.role != Role.PLAIN:
            twin = named.setdefault((row.role, row.fqn, row.state), row.key)
            if twin != row.key:
                problems.append(f"{Role(row.role).name.lower()} {row.fqn!r} {row.state!r} is under both {twin!r} and {row.key!r}")
    if problems:
        raise PlanError("one global name with two keys:\n  " + _problem_text(problems) + "\nRemove one of the two from the state dict.")
    index = {row.key: i for i, row in enumerate(rows)}
    maps = {blob: np.asarray([index[row.key] for row in table], dtype=np.int64) for blob, table in distinct.items()}
    return rows, [maps[plan.table] for plan in plans]


def merge_tensors(plans: Sequence[LocalPlan]) -> MergedBoxes:
    """Distinct boxes of all tensors with their holders; coverage is checked, contents are not (:func:`check_replicas`).

    Raises CoverageError (holes, overlaps: tensor, box, ranks), PlanError.
    """
    rows, maps = merge_tables(plans)
    row_ndim = np.asarray([len(row.shape) for row in rows], dtype=np.int64)
    tensor = np.concatenate([m[p.key] for m, p in zip(maps, plans, strict=True)]) if plans else np.zeros(0, np.int64)
    rank = np.repeat(np.arange(len(plans)), [len(p.key) for p in plans])
    fragment = np.concatenate([np.arange(len(p.key)) for p in plans])
    coords = np.concatenate([p.coords for p in plans])
    ndim = row_ndim[tensor] if len(tensor) else np.zeros(0, np.int64)
    begin = _starts(2 * ndim)

    box_tensor: list[I64] = []
    box_ndim: list[I64] = []
    box_coords: list[I64] = []
    hold_counts: list[I64] = []
    hold_rows: list[I64] = []
    for n in np.unique(ndim):
        member = np.flatnonzero(ndim == n)
        matrix = np.empty((len(member), 1 + 2 * n), dtype=np.int64)
        matrix[:, 0] = tensor[member]
        matrix[:, 1:] = coords[begin[member][:, None] + np.arange(2 * n)]
        # rank is the last sort key: lexsort is stable and members are in rank order already
        order = np.lexsort(matrix.T[::-1])
        matrix = matrix[order]
        new = np.ones(len(order), dtype=np.bool_)
        new[1:] = (matrix[1:] != matrix[:-1]).any(axis=1)
        first = np.flatnonzero(new)
        box_tensor.append(matrix[first, 0])
        box_ndim.append(np.full(len(first), n, dtype=np.int64))
        box_coords.append(matrix[first, 1:].ravel())
        hold_counts.append(np.diff(np.append(first, len(order))))
        hold_rows.append(member[order])
    empty = np.zeros(0, dtype=np.int64)
    tensors = np.concatenate(box_tensor) if box_tensor else empty
    ndims = np.concatenate(box_ndim) if box_ndim else empty
    all_coords = np.concatenate(box_coords) if box_coords else empty
    counts = np.concatenate(hold_counts) if hold_counts else empty
    held = np.concatenate(hold_rows) if hold_rows else empty

    # the parts of different ndim are joined into one order by tensor; inside a tensor boxes are sorted already
    order = np.argsort(tensors, kind="stable")
    coord_start, coords_sorted = _take_ragged(_starts(2 * ndims), all_coords, order)
    hold_start, held = _take_ragged(_starts(counts), held, order)
    tensors, ndims = tensors[order], ndims[order]
    itemsize = np.asarray([ITEMSIZE[CODES[row.dtype]] for row in rows], dtype=np.int64)
    merged = MergedBoxes(
        rows=rows,
        tensor=tensors,
        ndim=ndims,
        coord_start=coord_start,
        coords=coords_sorted,
        numel=_numel(coord_start, coords_sorted, ndims),
        itemsize=itemsize[tensors] if len(tensors) else empty,
        hold_start=hold_start,
        holder_rank=rank[held],
        holder_fragment=fragment[held],
        held=held,
        maps=maps,
    )
    _check_coverage(merged)
    return merged


def find_tied(plans: Sequence[LocalPlan], merged: MergedBoxes) -> dict[int, int]:
    """Row of a tied tensor -> row of the tensor whose memory it is, where all ranks that hold any of it say the same."""
    claims: dict[int, set[int]] = {}
    for plan, table in zip(plans, merged.maps, strict=True):
        for key, source in table[plan.tied].tolist():
            claims.setdefault(key, set()).add(source)
    out = {}
    for key, sources in claims.items():
        rows = merged.rows[key], merged.rows[min(sources)]
        if len(sources) > 1 or (rows[0].shape, rows[0].dtype) != (rows[1].shape, rows[1].dtype):
            continue
        for plan, table in zip(plans, merged.maps, strict=True):
            holds = bool((table[plan.key] == key).any())
            if holds and key not in table[plan.tied[:, 0]]:
                break
        else:
            out[key] = min(sources)
    # a source is never tied itself: it is the first key of its memory on every rank that claims it, but ranks may differ
    return {key: source for key, source in out.items() if source not in out}


def without(merged: MergedBoxes, tensors: Sequence[int]) -> MergedBoxes:
    """The same without the boxes of some tensors; ``rows`` keeps its numbers."""
    order = np.flatnonzero(~np.isin(merged.tensor, np.asarray(tensors, dtype=np.int64)))
    coord_start, coords = _take_ragged(merged.coord_start, merged.coords, order)
    holders = np.arange(len(merged.holder_rank))
    hold_start, held = _take_ragged(merged.hold_start, holders, order)
    return MergedBoxes(
        rows=merged.rows,
        tensor=merged.tensor[order],
        ndim=merged.ndim[order],
        coord_start=coord_start,
        coords=coords,
        numel=merged.numel[order],
        itemsize=merged.itemsize[order],
        hold_start=hold_start,
        holder_rank=merged.holder_rank[held],
        holder_fragment=merged.holder_fragment[held],
        held=merged.held[held],
        maps=merged.maps,
    )


def _take_ragged(start: I64, flat: I64, order: I64) -> tuple[I64, I64]:
    """Rows of a ragged column in another order: (new start, new flat)."""
    lengths = np.diff(start)[order]
    new_start = _starts(lengths)
    if not len(flat):
        return new_start, flat
    source = np.repeat(start[:-1][order] - new_start[:-1], lengths) + np.arange(new_start[-1])
    return new_start, flat[source]


def _numel(coord_start: I64, coords: I64, ndims: I64) -> I64:
    out = np.ones(len(ndims), dtype=np.int64)
    for n in np.unique(ndims):
        member = np.flatnonzero(ndims == n)
        out[member] = coords[coord_start[member][:, None] + n + np.arange(n)].prod(axis=1)
    return out


def _check_coverage(merged: MergedBoxes) -> None:
    rows = merged.rows
    shape_start = _starts(np.asarray([len(r.shape) for r in rows], dtype=np.int64))
    shape = np.asarray([extent for r in rows for extent in r.shape], dtype=np.int64)
    chunk_start = np.searchsorted(merged.tensor, np.arange(len(rows) + 1))
    bad = check_cover_ragged(shape_start, shape, chunk_start.astype(np.int64), merged.coords)
    problems: list[str] = []
    for t in bad[: _SHOWN + 1]:
        row = rows[int(t)]
        low, high = int(chunk_start[t]), int(chunk_start[t + 1])
        boxes = merged.coords[merged.coord_start[low] : merged.coord_start[high]].reshape(high - low, 2, len(row.shape))
        cover = check_cover(row.shape, boxes, limit=2)

        def ranks(i: int, low: int = low) -> list[int]:
            return [int(r) for r in merged.holder_rank[merged.hold_start[low + i] : merged.hold_start[low + i + 1]]]

        parts = [f"nobody holds offset {hole.offset} size {hole.size}" for hole in cover.holes]
        parts += [f"ranks {ranks(i)} and {ranks(j)} both hold offset {b.offset} size {b.size}" for i, j, b in cover.overlaps]
        problems.append(f"tensor {row.key!r} of shape {row.shape}: " + "; ".join(parts))
    if problems:
        problems += [f"tensor {rows[int(t)].key!r}" for t in bad[_SHOWN + 1 :]]
        raise CoverageError(
            "fragments do not cover their global tensors exactly:\n  "
            + _problem_text(problems)
            + "\nCheck the layout's coordinates on every rank, the mesh, and that all ranks take part in this save. Nothing was written."
        )


def check_replicas(plans: Sequence[LocalPlan], merged: MergedBoxes) -> None:
    """Raises ReplicaMismatchError where ranks hold different values of one box."""
    digest = np.concatenate([p.digest for p in plans])[merged.held]
    has_digest = np.concatenate([p.has_digest for p in plans])[merged.held]
    counts = np.diff(merged.hold_start)
    if not (counts > 1).any():
        return
    box_of = np.repeat(np.arange(len(counts)), counts)
    # compare each copy with the first copy of its box that carries a digest
    reference = np.zeros(len(counts), dtype=np.uint64)
    known = np.flatnonzero(has_digest)
    reference[box_of[known[::-1]]] = digest[known[::-1]]
    differs = np.flatnonzero(has_digest & (digest != reference[box_of]))
    if not len(differs):
        return
    problems = []
    for b in np.unique(box_of[differs]):
        row = merged.rows[int(merged.tensor[b])]
        low, high = int(merged.hold_start[b]), int(merged.hold_start[b + 1])
        groups: dict[int, list[int]] = {}
        for i in range(low, high):
            if has_digest[i]:
                groups.setdefault(int(digest[i]), []).append(int(merged.holder_rank[i]))
        n = int(merged.ndim[b])
        box = merged.coords[merged.coord_start[b] : merged.coord_start[b + 1]]
        sets = " / ".join(str(ranks) for ranks in groups.values())
        where = f"at offset {tuple(map(int, box[:n]))} size {tuple(map(int, box[n:]))}"
        problems.append(f"tensor {row.key!r} {where}: ranks {sets} hold different values")
    raise ReplicaMismatchError(
        "replicas of one tensor differ between ranks:\n  "
        + _problem_text(problems)
        + "\nIf each rank holds its own part, describe it with a layout or a DTensor; if the ranks drifted apart on purpose, use Average()"
        " in the layout; check_replicas='off' keeps one copy unseen."
    )


def merge_objects(plans: Sequence[LocalPlan]) -> MergedObjects:
    """One owner (the lowest rank) for each object; per-rank objects become ``<key>.per_rank.<rank>``.

    Raises ReplicaMismatchError when ranks hold different values under one key.
    """
    seen: dict[str, tuple[ObjectEntry, int]] = {}
    problems: list[str] = []
    for rank, plan in enumerate(plans):
        for entry in plan.object_entries():
            if entry.per_rank:
                entry = ObjectEntry(
                    key=f"{entry.key}.per_rank.{rank}",
                    path=(*entry.path, "per_rank", str(rank)),
                    digest=entry.digest,
                    length=entry.length,
                    per_rank=True,
                )
            first, owner = seen.setdefault(entry.key, (entry, rank))
            if first.digest != entry.digest:
                problems.append(f"object {entry.key!r}: rank {owner} and rank {rank} hold different values")
    if problems:
        raise ReplicaMismatchError(
            "objects differ between ranks:\n  "
            + _problem_text(problems)
            + "\nWrap what is different on every rank in ucp_dcp.PerRank(value)."
        )
    return MergedObjects([seen[key] for key in sorted(seen)])
