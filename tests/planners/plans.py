"""Rank plans made of plain tuples, for tests and benchmarks of the coordinator's half of a save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ucp_dcp.planners.wire import KeyRow, LocalPlan, ObjectEntry

Boxes = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]


def rank_plan(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    boxes: Mapping[str, Boxes],
    digests: Mapping[str, int] | None = None,
    objects: Sequence[ObjectEntry] = (),
) -> LocalPlan:
    """What one rank would send: ``tensors`` key -> (dtype, shape), ``boxes`` key -> (offset, size) it holds, ``digests`` of its copies."""
    keys = sorted(tensors)
    rows = [KeyRow(k, 5, "", "", tensors[k][0], tensors[k][1], "", (k,)) for k in keys]
    index: list[int] = []
    coords: list[int] = []
    digest: list[int | None] = []
    for i, key in enumerate(keys):
        for offset, size in sorted(boxes.get(key, ())):
            index.append(i)
            coords += [*offset, *size]
            digest.append(None if digests is None else digests.get(key))
    return LocalPlan(
        table=msgspec.msgpack.encode(rows),
        key=np.asarray(index, dtype=np.int32),
        coords=np.asarray(coords, dtype=np.int64),
        digest=np.asarray([d or 0 for d in digest], dtype=np.uint64),
        has_digest=np.asarray([d is not None for d in digest], dtype=np.bool_),
        objects=msgspec.msgpack.encode(list(objects)),
    )


def whole(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The box of a whole tensor."""
    return (0,) * len(shape), shape


def rows_of(shape: tuple[int, ...], rank: int, ranks: int) -> Boxes:
    """The box that ``Shard(0)`` gives a rank (torch.chunk), nothing when it is empty."""
    step = -(-shape[0] // ranks)
    begin = min(rank * step, shape[0])
    end = min(begin + step, shape[0])
    return [((begin, *(0,) * (len(shape) - 1)), (end - begin, *shape[1:]))] if end > begin else []
