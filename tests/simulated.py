"""Saves and loads of several ranks in one process, moving real bytes through the real planners and storage in DCP's order of calls.

DTensors need a mesh and a mesh a process group: while one rank's state dict is built and its planner set up, torch's fake group stands
for all others. Nothing after that needs a group. What DCP sends between ranks is pickled here too.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ucp_dcp import UCPLoadPlanner, UCPSavePlanner, UCPStorageReader, UCPStorageWriter
from ucp_dcp.planners.report import LoadReport

Build = Callable[[int], dict[str, Any]]
T = TypeVar("T")


@contextlib.contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    """This process is rank ``rank`` of ``ranks``, as far as meshes and ``torch.distributed`` can tell."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _sent(value: T) -> T:
    """What another rank gets."""
    return pickle.loads(pickle.dumps(value))  # type: ignore[no-any-return]


def save(ranks: int, build: Build, planner_args: Build, url: Any, **options: Any) -> None:
    """``dcp.save`` of ``ranks`` ranks, each with its own state dict and planner arguments. ``options`` are the writer's."""
    planners, writers, plans = [], [], []
    for rank in range(ranks):
        planner, writer = UCPSavePlanner(**planner_args(rank)), UCPStorageWriter(url, **options)
        with as_rank(rank, ranks):
            planner.set_up_planner(build(rank), writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plans.append(_sent(writer.prepare_local_plan(planner.create_local_plan())))
        planners.append(planner)
        writers.append(writer)
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = []
    for writer, planner, plan in zip(writers, planners, plans, strict=True):
        results.append(_sent(writer.write_data(planner.finish_plan(_sent(plan)), planner).value()))
    writers[0].finish(metadata, results)


def load(ranks: int, build: Build, planner_args: Build, url: Any, **options: Any) -> list[tuple[dict[str, Any], LoadReport]]:
    """``dcp.load`` of ``ranks`` ranks: what each rank's state dict became, and its report. ``options`` are the reader's."""
    states, planners, readers, plans = [], [], [], []
    for rank in range(ranks):
        planner, reader = UCPLoadPlanner(**planner_args(rank)), UCPStorageReader(url, **options)
        metadata = reader.read_metadata()
        with as_rank(rank, ranks):
            state = build(rank)
            planner.set_up_planner(state, metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0)
        plans.append(_sent(reader.prepare_local_plan(planner.create_local_plan())))
        states.append(state)
        planners.append(planner)
        readers.append(reader)
    plans = readers[0].prepare_global_plan(planners[0].create_global_plan(plans))
    for reader, planner, plan in zip(readers, planners, plans, strict=True):
        reader.read_data(planner.finish_plan(_sent(plan)), planner).wait()
    return [(state, planner.report) for state, planner in zip(states, planners, strict=True)]
