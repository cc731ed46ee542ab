"""How long ``dcp.async_save`` stops training: the stage of our stager beside DCP's, of the same state in the same run.

Each stager copies the state once per round, all stagers in turn, so that a busy machine disturbs all of them alike; a copy is dropped
before the next one is made, as it is when a save is done. ``stock`` is what ``async_save`` does without a stager: new memory every time.
``stock, kept`` is a DefaultStager that the user keeps for all saves; it writes into memory that an earlier save may still be reading.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", str(min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)))

import resource
import statistics
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from harness import Bench, Measurement, human_bytes, timed
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

import ucp_dcp

warnings.filterwarnings("ignore")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
OFF = StagingOptions(False, False, False, False)


def stock(state: dict[str, Any]) -> Any:
    stager = DefaultStager(OFF)
    try:
        return stager.stage(state)
    finally:
        stager.close()


def state(count: int, numel: int) -> dict[str, Any]:
    return {"model": {f"layer.{i}.weight": torch.full((numel,), float(i)) for i in range(count)}, "step": 7}


def check(found: dict[str, Any], want: dict[str, Any]) -> None:
    """A stager that is fast because it forgets something does not count."""
    for key, value in want["model"].items():
        if not torch.equal(found["model"][key][-3:], value[-3:]) or found["model"][key].data_ptr() == value.data_ptr():
            raise SystemExit(f"{key} was not copied")


def case(bench: Bench, title: str, count: int, numel: int, rounds: int) -> None:
    live = state(count, numel)
    total = count * numel * 4
    kept, ours = DefaultStager(OFF), ucp_dcp.UCPStager()
    stagers: dict[str, Callable[[dict[str, Any]], Any]] = {
        "stock": stock,
        "stock, kept": kept.stage,
        "BlockingAsyncStager": BlockingAsyncStager().stage,
        "UCPStager, kept": ours.stage,
    }
    walls: dict[str, list[float]] = {name: [] for name in stagers}
    cpus: dict[str, list[float]] = {name: [] for name in stagers}
    faults: dict[str, int] = {}
    for turn in range(rounds + 1):
        for name, stage in stagers.items():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            found, wall, cpu = timed(lambda s=stage: s(live))
            faults[name] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            check(found, live)
            del found
            if turn:
                walls[name].append(wall)
                cpus[name].append(cpu)
    rows = {}
    for name in stagers:
        facts = {"GiB/s": total / 2**30 / statistics.median(walls[name]), "page faults": faults[name]}
        rows[name] = bench.add(Measurement(f"{title}: {name}", tuple(walls[name]), tuple(cpus[name]), facts))
    mine = rows["UCPStager, kept"]
    for name in ("stock", "stock, kept"):
        ratios = [a / b for a, b in zip(rows[name].wall_runs, mine.wall_runs, strict=True)]
        print(f"{title}: {name} / UCPStager, wall, median of {rounds} rounds: {statistics.median(ratios):.2f}")
    kept.close()
    ours.close()


def main() -> None:
    bench = Bench("async", "What stops training in dcp.async_save: copies of one state, seconds")
    mib = 64 if bench.quick else 1024
    rounds = 3 if bench.quick else 7
    case(bench, f"{human_bytes(mib << 20)} in 64 tensors", 64, mib * 4096, rounds)
    count = 500 if bench.quick else 10_000
    case(bench, f"{count:,} tensors of 4 KiB", count, 1024, rounds)
    bench.finish(f"Host memory only, {CORES} cores, {torch.get_num_threads()} torch threads.")


if __name__ == "__main__":
    sys.exit(main())
