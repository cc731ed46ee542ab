"""What planning a save costs stock DCP's coordinator, without the ranks: their plans are fabricated, everything else is torch's own code.

In a save every rank sends its pickled ``SavePlan`` to the coordinator (``_DistWrapper.reduce_scatter``), which unpickles all of them, runs
``DefaultSavePlanner.create_global_plan`` (dedup, metadata, validation), pickles one plan per rank to send back, and at the end pickles the
metadata into ``.metadata``. ``tests/test_benchmarks.py`` checks that a fabricated plan equals the one that torch makes of real DTensors.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["StockPlanning", "rank_plan", "stock_coordinator", "stock_coordinator_seconds"]

Paths = Mapping[tuple[str, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StockPlanning:
    """CPU seconds of the coordinator, by part; bytes on the wire."""

    unpickle_plans: float
    create_global_plan: float
    pickle_metadata: float
    pickle_plans: float
    """For sending the plans back to the ranks. Not part of ``seconds``."""
    plan_bytes: int
    """All pickled plans that arrive at the coordinator."""
    metadata_bytes: int

    @property
    def seconds(self) -> float:
        """Plans in -> metadata out, without sending the plans back."""
        return self.unpickle_plans + self.create_global_plan + self.pickle_metadata


def rank_plan(shapes: Paths, rank: int, ranks: int, dtype: torch.dtype = torch.float32) -> SavePlan:
    """The local plan of one rank whose state dict holds every path as a DTensor of that shape, ``[Shard(0)]`` over ``ranks`` ranks."""
    items = []
    for path, shape in shapes.items():
        step = -(-shape[0] // ranks)  # torch.chunk: equal steps, the last ranks may be short or empty
        start = min(rank * step, shape[0])
        offsets = torch.Size((start, *(0,) * (len(shape) - 1)))
        sizes = torch.Size((min(step, shape[0] - start), *shape[1:]))
        items.append(
            WriteItem(
                index=MetadataIndex(".".join(path), offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                    properties=TensorProperties(dtype=dtype),
                    size=torch.Size(shape),
                ),
            )
        )
    return SavePlan(items, planner_data={".".join(path): path for path in shapes})


def stock_coordinator(shapes: Paths, ranks: int) -> StockPlanning:
    """Measure one planning of a save of ``shapes`` (path -> global shape) by ``ranks`` ranks; the metadata is checked for completeness."""
    wire = [pickle.dumps(rank_plan(shapes, rank, ranks)) for rank in range(ranks)]
    clock = [time.process_time()]

    plans = [pickle.loads(data) for data in wire]
    clock.append(time.process_time())
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    new_plans, metadata = planner.create_global_plan(plans)
    clock.append(time.process_time())
    blob = pickle.dumps(metadata)
    clock.append(time.process_time())
    for plan in new_plans:
        pickle.dumps(plan)
    clock.append(time.process_time())

    _check(metadata, shapes)
    unpickle, plan_seconds, pickle_metadata, pickle_plans = (b - a for a, b in pairwise(clock))
    return StockPlanning(unpickle, plan_seconds, pickle_metadata, pickle_plans, sum(map(len, wire)), len(blob))


def stock_coordinator_seconds(shapes: Paths, ranks: int) -> float:
    """CPU seconds from the arrival of all pickled plans to the pickled metadata."""
    return stock_coordinator(shapes, ranks).seconds


def _check(metadata: Metadata, shapes: Paths) -> None:
    for path, shape in shapes.items():
        stored = metadata.state_dict_metadata[".".join(path)]
        assert sum(prod(chunk.sizes) for chunk in stored.chunks) == prod(shape), path


if __name__ == "__main__":
    import sys

    from models import LLAMA2_7B, adam_shapes

    print(stock_coordinator(adam_shapes(LLAMA2_7B), int(sys.argv[1]) if len(sys.argv) > 1 else 256))
