"""The coordinator of a save: our columns beside stock DCP's objects.

873 tensors (LLaMA-2 7B with Adam, shapes only), each Shard(0) over R ranks.

Both start from the pickled plans of all ranks and end with the pickled ``.metadata``. Ours is shown in two parts: planning comes before the
scatter, where all ranks wait; the stock ``.metadata`` (only with ``stock_metadata=True``) is written in ``finish``.
"""

from __future__ import annotations

import math
import pickle
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "planners"))

from harness import Bench, Measurement
from models import LLAMA2_7B, LLAMA3_8B, adam_shapes
from plans import rank_plan, rows_of, whole
from stock_planning import stock_coordinator

from ucp_dcp.planners import plan_cache
from ucp_dcp.planners.merge import check_replicas, merge_objects
from ucp_dcp.planners.planned import Planned, with_objects
from ucp_dcp.storage.stock_metadata import StorageMeta, stock_metadata_bytes

GATE = 2.0  # CPU seconds of the coordinator for 873 tensors on 256 ranks, its .metadata included


def coordinator(wire: list[bytes], again: bool = False) -> Planned:
    """All that our coordinator does between the arrival of the plans and the scatter. ``again``: the layout is that of an earlier save."""
    plans = [pickle.loads(data) for data in wire]
    if not again:
        plan_cache.forget()
    plan = plan_cache.plan_tensors(plans, tied=True)
    check_replicas(plans, plan.merged)
    planned, assignments = with_objects(plan.planned, plan.assignments, merge_objects(plans))
    for assignment in assignments:
        pickle.dumps(assignment)
    return planned


def metadata_bytes(planned: Planned) -> bytes:
    """The stock ``.metadata``, with made-up places of the items."""
    chunks = len(planned.owner)
    files = [f"g-0/__{rank}_0.distcp" for rank in range(planned.world)]
    return stock_metadata_bytes(
        planned, planned.owner.tolist(), [i * 4096 for i in range(chunks)], [4096] * chunks, [], files, StorageMeta(), "1.0.0"
    )


def balance(planned: Planned) -> float:
    """Largest / mean bytes over the ranks."""
    loads = np.zeros(planned.world)
    sizes = np.asarray([math.prod(size) for _, _, size in planned.boxes()])
    np.add.at(loads, planned.owner, sizes)
    return float(loads.max() / loads.mean())


def main() -> None:
    """Run and save."""
    bench = Bench("planning", "Coordinator of a save, 873 tensors: CPU seconds")
    ranks = 32 if bench.quick else 256
    shapes = adam_shapes(LLAMA2_7B)
    tensors = {".".join(path): ("float32", shape) for path, shape in shapes.items()}
    wire = [pickle.dumps(rank_plan(tensors, {k: rows_of(s, r, ranks) for k, (_, s) in tensors.items()})) for r in range(ranks)]
    ours = bench.measure("ucp_dcp, sharded", lambda: coordinator(wire), repeat=3, ranks=ranks, plan_bytes=sum(map(len, wire)))
    bench.measure("  the same layout again", lambda: coordinator(wire, again=True), repeat=3, ranks=ranks)
    metadata = bench.measure("  + its stock .metadata", lambda: metadata_bytes(ours.result), repeat=3, ranks=ranks)
    metadata.facts["metadata_bytes"] = len(metadata.result)
    stock = stock_coordinator(shapes, ranks)
    bench.add(Measurement("stock DCP, sharded", (stock.seconds,), (stock.seconds,), {"ranks": ranks, "plan_bytes": stock.plan_bytes}))
    for replicas in (8, 64) if bench.quick else (8, 64, 512):
        llama = {".".join(path): ("float32", shape) for path, shape in adam_shapes(LLAMA3_8B).items()}
        one = pickle.dumps(rank_plan(llama, {k: [whole(s)] for k, (_, s) in llama.items()}))
        row = bench.measure(
            f"ucp_dcp, LLaMA-3 8B, {replicas} replicas", lambda n=replicas, p=one: coordinator([p] * n), repeat=3, ranks=replicas
        )
        row.facts["max/mean bytes"] = round(balance(row.result), 5)
        row.facts["chunks"] = len(row.result.owner)
    total = ours.cpu + metadata.cpu
    bench.finish(
        f"stock / ours: {stock.seconds / total:.1f}x CPU (the clock of stock is CPU in both columns)",
        f"gate, 873 tensors on {ranks} ranks: coordinator {total:.2f} CPU s, at most {GATE} s: {'met' if total <= GATE else 'MISSED'}",
    )


if __name__ == "__main__":
    main()
